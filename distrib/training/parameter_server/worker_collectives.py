"""Collectives of elastic workers: all-gather, and results of the main rank for all. Shard 0 stores and collects."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from distrib.errors import DistribError, TrainingError
from distrib.training.checksums import content_digest
from distrib.training.collectives import to_bytes
from distrib.training.parameter_server.client import ParameterClient
from distrib.training.parameter_server.server_table import as_memoryview
from distrib.training.parameter_server.transport import Frame, FrameFlag, FrameKind, check_payload_size, decode, encode
from distrib.training.world import World

T = TypeVar("T")

EVALUATION = "view"
"""Tag of the collective at the beginning of an evaluation."""


class WorkerCollectives:
    """A worker's side of the collectives.

    Args:
        is_replacement: True for a replacement worker, which is at another place of the script. It receives the results of
            main, and takes part in no all-gather.
        on_collective: Called at the beginning of each collective, which other workers may reach with newer parameters.
        piece_bytes: Size of the pieces of a stored result. A frame has a maximum size, and a server must answer other workers meanwhile.
    """

    def __init__(
        self, client: ParameterClient, world: World, *, is_replacement: bool,
        on_collective: Callable[[], None] = lambda: None, piece_bytes: int = 256 << 20,
    ) -> None:  # fmt: skip
        self._client, self._world, self._is_replacement = client, world, is_replacement
        self._on_collective, self.piece_bytes = on_collective, piece_bytes
        self._results = 0
        self._since_evaluation: int | None = None  # collectives since an evaluation began

    def from_main(self, work: Callable[[], T]) -> T:
        """Run a function on the main rank and return its result on every rank. The result stays stored for replacement workers.

        Args:
            work: The function, which is called on the main rank only.

        Returns:
            The result, on every rank.

        Raises:
            TrainingError: The function raised an error on the main rank; there the error itself is raised.
        """
        self._on_collective()
        with self._waiting():
            number, self._results = self._results, self._results + 1
            error: Exception | None = None
            content = self._fetch_from_main(number)
            if content is None:
                try:
                    outcome: tuple[Any, str | None] = work(), None
                except (OSError, DistribError) as caught:
                    error, outcome = caught, (None, str(caught))
                own = pickle.dumps(outcome)
                # Another worker was main before if the servers have its result.
                content = own if self.store(number, own) else self._join_pieces(*self._fetch(number, 0))
        value, reason = pickle.loads(content)  # written by a rank of this job, which has proven that it knows the key
        if reason is not None:
            raise error or TrainingError(f"on the main rank: {reason}", code="error-on-other-rank")
        result: T = value
        return result

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Let other workers of this host continue: they may be in another step."""
        group = self._client.group
        if group:
            group.announce_wait()
        try:
            yield
        finally:
            if group:
                group.end_wait()

    def store(self, number: int, content: bytes) -> bool:
        """Store a result on the servers. Returns False if they have one of another worker.

        Args:
            number: Number of the collective.
            content: The result, sent in pieces.
        """
        size = self.piece_bytes
        whole, count = memoryview(content), -(-len(content) // size)
        pieces = [
            (Frame(FrameKind.STORE, chunk=n, version=number, weight=count), whole[n * size :][:size])
            for n in range(count)
        ]
        while True:  # from the first piece again if the server was lost between two
            for frame, piece in pieces:
                flags = self._client.result(self._client.request(0, frame, piece))[0].flags
                if flags & FrameFlag.FINAL:
                    if flags & FrameFlag.APPLIED:
                        self._client.retain_result(number, pieces)
                    return bool(flags & FrameFlag.APPLIED)

    def _fetch(self, number: int, piece: int) -> tuple[Frame, Any]:
        frame = Frame(FrameKind.FETCH, chunk=piece, version=number)
        return self._client.result(self._client.request(0, frame))

    def _fetch_from_main(self, number: int) -> Any:
        """Return main's stored result; None if this worker is main or becomes it meanwhile."""
        if self._client.is_main():
            return None
        future = self._client.request(0, Frame(FrameKind.FETCH, version=number))
        while not self._client.is_main():
            concurrent.futures.wait([future], timeout=0.2)
            if future.done():
                return self._join_pieces(*future.result())
            self._client.check()
        return None

    def _join_pieces(self, first: Frame, content: Any) -> Any:
        rest = [self._fetch(first.version, piece)[1] for piece in range(1, first.weight)]
        return b"".join([content, *rest]) if rest else content

    def gather(self, tag: str, data: Any = b"") -> list[tuple[int, Any]]:
        """Gather bytes of all workers that are at the same place of the script.

        A replacement worker is alone. A worker that was disconnected may return in the middle of the others' collectives: a
        contribution with another tag does not count, and its next evaluation begins with that of the others.

        Args:
            tag: Text that distinguishes places of the script.
            data: The bytes of this worker.

        Returns:
            Rank and bytes of each worker.

        Raises:
            TrainingError: All of it is too large for a frame.
        """
        self._on_collective()
        if self._is_replacement:
            return [(self._world.rank, data)]
        with self._waiting():
            if tag == EVALUATION:
                self._since_evaluation = 0
            elif self._since_evaluation is not None:
                self._since_evaluation += 1
            head = encode([tag, self._since_evaluation]) + b"\n"
            own = b"".join([head, data])
            # 32 bytes are an upper bound for the index entry of one contribution.
            check_payload_size(self._world.size * (len(own) + 32), hint="reduce it in several parts")
            while True:
                contributions = self._all_gather(own)
                same = [(rank, whole[len(head) :]) for rank, whole in contributions if whole[: len(head)] == head]
                if tag != EVALUATION or not self._client.missed_rounds or len(same) == len(contributions):
                    break
        if tag == EVALUATION:
            self._client.missed_rounds = False
        return same or [(self._world.rank, data)]

    def broadcast(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set tensors to the main rank's values. Only tensors that differ are sent; they stay on the servers. Collective.

        Args:
            tensors: Tensors by name, with the same names on every rank.
        """
        own = [content_digest(value)[:16] if value.layout is torch.strided else "" for value in tensors.values()]
        digests = [decode(data) for _, data in self.gather(f"{len(own)} values", encode(own))]
        all_present = len(digests) == self._world.size
        equal = {
            name
            for name, *found in zip(tensors, *digests, strict=True)
            if all_present and found[0] and len({*found}) == 1
        }
        content = self.from_main(lambda: to_bytes({n: v.detach() for n, v in tensors.items() if n not in equal}))
        with torch.no_grad():
            # In host memory: a GPU may lack room for a second copy.
            for name, value in torch.load(io.BytesIO(content), weights_only=True, map_location="cpu").items():
                target = tensors.get(name)
                if target is None or target.shape != value.shape:  # a buffer that has grown here
                    continue
                # An equal tensor is not written, as it may be an expanded view.
                if target.layout is not torch.strided or not torch.equal(target, value.to(target.device)):
                    target.copy_(value)

    def reduce(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        """Reduce a tensor over the present ranks. Collective.

        Args:
            tensor: A tensor of the same shape and type on every rank.
            op: `mean`, `sum`, `max` or `min`.

        Returns:
            A new tensor on the same device.
        """
        own = tensor.cpu().contiguous().resolve_conj().resolve_neg()
        # The tag contains type and shape, so that calls from different lines of the script do not match.
        gathered = self.gather(f"{op} {own.dtype} {list(own.shape)}", as_memoryview(own))
        tensors = [
            torch.frombuffer(data, dtype=own.dtype).view(own.shape) if own.numel() else own for _, data in gathered
        ]
        stacked = torch.stack(tensors)
        if op == "mean":
            result = stacked.sum(0) / len(tensors)
        elif op == "sum":
            result = stacked.sum(0, dtype=tensor.dtype)
        else:
            result = stacked.amax(0) if op == "max" else stacked.amin(0)
        return result.to(tensor.device)

    def _all_gather(self, data: Any) -> list[tuple[int, memoryview]]:
        number, self._client.round = self._client.round, self._client.round + 1
        reply = self._client.result(self._client.request(0, Frame(FrameKind.ALL_GATHER, version=number), data))[1]
        offset = 4 + int.from_bytes(reply[:4], "big")
        found = []
        for rank, size in decode(reply[4:offset]):
            found.append((rank, reply[offset : offset + size]))
            offset += size
        return found
