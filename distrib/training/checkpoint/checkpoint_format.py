"""The file format of checkpoints: written atomically, ended by a checksum, and read without running code."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import io
import os
import pickle
import socket
import tempfile
import textwrap
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from distrib.errors import TrainingError
from distrib.training.checkpoint.replicas import NO_STAMP, Stamp, load_mapped, older_name
from distrib.training.model_parameters import unwrap_model
from distrib.training.strategies.ddp_module import DdpModule
from distrib.training.to_device import move_to_device

_CHECKSUM_MARK = b"\ndistrib-crc32 "
_CHECKSUM_BYTES = len(_CHECKSUM_MARK) + 9
"""Length of the line after torch's archive: mark, CRC-32 of all bytes before it as 8 digits, newline. `torch.load` ignores it."""


class _ChecksummedFile:
    """Wrapper of a file that computes the CRC-32 of the bytes that torch.save writes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._checksum = file, 0

    def write(self, data: bytes | memoryview) -> int:
        self._checksum = zlib.crc32(data, self._checksum)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def end(self) -> None:
        self._file.write(_checksum_line(self._checksum))


def _checksum_line(checksum: int) -> bytes:
    return b"%s%08x\n" % (_CHECKSUM_MARK, checksum)


def _has_checksum(data: bytes | memoryview) -> bool:
    return bytes(data[-_CHECKSUM_BYTES:]).startswith(_CHECKSUM_MARK)


def pack(objects: dict[str, Any], backend: dict[str, Any] | None = None) -> dict[str, Any]:
    """Collect the content of a checkpoint, as of version 1: without a checksum.

    Args:
        objects: Objects with a state_dict, and plain values. Names in models are those without DDP and torch.compile.
        backend: State of the training strategy.

    Returns:
        The content, which `read` opens once it is serialized.

    Raises:
        TrainingError: `read` could not open a value safely.
    """
    states = {name: _without_numpy(_state(thing)) for name, thing in objects.items() if has_state(thing)}
    values = {name: _without_numpy(thing) for name, thing in objects.items() if not has_state(thing)}
    for name, value in values.items():
        if not _is_plain(value):
            where, what = _unsafe(name, value) or (name, f"a {type(value).__name__}")
            raise TrainingError(
                f"cannot save {where}, {what}",
                hint="pass loaders to job.prepare first"
                if isinstance(value, DataLoader)
                else "save objects with a state_dict, tensors, numbers, strings, or lists and dicts of them",
                code="checkpoint-unsavable",
            )
    return {"distrib": 1, "states": states, "values": values, "backend": backend or {}}


def write(
    path: str | os.PathLike[str],
    objects: dict[str, Any],
    backend: dict[str, Any] | None = None,
    stamp: Stamp = NO_STAMP,
    *,
    keep: int = 1,
) -> None:
    """Write a checkpoint beside `path`, flush it to the disk and rename it, so that `path` is complete at every moment.

    Args:
        path: The file to replace.
        objects: Objects with a state_dict, and plain values. Names in models are those without DDP and torch.compile.
        backend: State of the training strategy.
        stamp: The identity of the checkpoint.
        keep: Number of checkpoints to keep, with this one. Older ones are named `path`.1, `path`.2 and so on.

    Raises:
        TrainingError: `read` could not open the content safely. The old file stays.
    """
    content = {**pack(objects, backend), "distrib": 2, "stamp": tuple(stamp)}  # version 1 has no checksum
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{path.name[:100]}.{socket.gethostname()[:64]}."
    _remove_partial(path.parent, prefix)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=prefix)
    try:
        with os.fdopen(descriptor, "wb") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            checksummed = _ChecksummedFile(file)
            _save(content, checksummed)
            checksummed.end()
            file.flush()
            os.fsync(file.fileno())
        mask = os.umask(0)
        os.umask(mask)
        _check_opens(name, content["states"])
        Path(name).chmod(0o666 & ~mask)  # mkstemp gives access to the owner only
        _rename_older(path, keep)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _save(content: dict[str, Any], file: _ChecksummedFile) -> None:
    try:
        torch.save(content, file)  # type: ignore[arg-type]  # it needs write and flush only
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # a full disk; torch's own message only names file positions
            raise error.__context__ from None
        raise


def _rename_older(path: Path, keep: int) -> None:
    """Give each older checkpoint the next number. `path` stays a complete file, where the file system has hard links."""
    for number in range(keep - 1, 1, -1):
        with contextlib.suppress(FileNotFoundError):
            older_name(path, number - 1).replace(older_name(path, number))
    if keep > 1 and path.exists():
        last = older_name(path, 1)
        last.unlink(missing_ok=True)
        try:
            last.hardlink_to(path)
        except OSError:  # a file system without hard links
            path.replace(last)


def _remove_partial(folder: Path, prefix: str) -> None:
    """Remove partial files of killed processes of this host, which do not hold their lock any more."""
    for name in os.listdir(folder):
        if name.startswith(prefix):
            with contextlib.suppress(OSError), (folder / name).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                (folder / name).unlink()


def _check_opens(path: str, states: dict[str, Any]) -> None:
    """Raise TrainingError with the path in `states` if `read` could not open the file."""
    try:
        load_mapped(path)
    except pickle.UnpicklingError as error:
        where, what = _unsafe("", states) or ("", "something")
        raise TrainingError(
            f"cannot save {where or 'this'}: {what} could not be restored without running code",
            hint="store only numbers, strings and tensors in the saved states",
            code="checkpoint-unsavable",
        ) from error
    except (OSError, RuntimeError):
        pass  # some file systems cannot map files


def _unsafe(where: str, thing: Any) -> tuple[str, str] | None:
    """Find the first path in `thing` that torch.load refuses, and its type."""
    inside: list[tuple[Any, Any]] = []
    if isinstance(thing, dict):
        inside = list(thing.items())
    elif isinstance(thing, (list, tuple)):
        inside = list(enumerate(thing))
    for key, value in inside:
        if found := _unsafe(f"{where}[{key!r}]" if where else str(key), value):
            return found
    if isinstance(thing, torch.Tensor):
        return None
    try:
        file = io.BytesIO()
        torch.save(type(thing)() if inside else thing, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # of any type: the object's class may raise it
        return where, f"a {type(thing).__name__}"
    return None


def content(path: str | os.PathLike[str]) -> bytes | None:
    """Read the bytes of a checkpoint and verify its checksum.

    Args:
        path: The file.

    Returns:
        The content; None if the file does not exist.

    Raises:
        TrainingError: The content has another checksum than the one at its end.
    """
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        return None
    if _has_checksum(data):
        found = _checksum_line(zlib.crc32(memoryview(data)[:-_CHECKSUM_BYTES]))
        if not data.endswith(found):
            what = f"checksum {found[-9:-1].decode()}, expected {data[-9:-1].decode(errors='replace')}"
            raise TrainingError(f"{path} is damaged: {what}", code="checkpoint-invalid")
    return data


class _Memory(io.RawIOBase):
    """Read-only file over bytes. Data is copied only when it is read."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data, self._place = memoryview(data), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: len(self._data)}[whence])
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, target: Any) -> int:
        part = self._data[self._place : self._place + len(target)]
        target[: len(part)] = part
        self._place += len(part)
        return len(part)


def read(
    data: bytes | memoryview, objects: dict[str, Any], device: torch.device, *, source: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load the states of a checkpoint.

    Args:
        data: The content of the file.
        objects: Objects to load, and default values.
        device: The device of values that were saved from a GPU. All else is on the CPU.
        source: The file's name, for messages.

    Returns:
        The plain values, and the state of the training strategy.

    Raises:
        TrainingError: `data` is not a checkpoint, or has no state of an object.
    """
    from_gpus: set[int] = set()

    def place(storage: Any, where: str) -> Any:
        if where != "cpu":
            from_gpus.add(storage.data_ptr())
        return storage  # on the CPU, as GPUs may have no room for all of it

    try:
        saved = torch.load(_Memory(data), map_location=place, weights_only=True)  # type: ignore[arg-type]  # it reads and seeks
    except Exception as error:  # torch raises a dozen types here
        raise TrainingError(
            f"{source} is not a checkpoint of job.save: {_one_line(error)}", code="checkpoint-invalid"
        ) from error
    try:
        states, values, version = saved["states"], saved["values"], saved["distrib"]
    except (KeyError, TypeError, IndexError) as error:
        raise TrainingError(
            f"{source} was not written by job.save",
            hint="read what another script saved with torch.load, and give it to the model before job.prepare(model)",
            code="checkpoint-invalid",
        ) from error
    if version != 1 and not _has_checksum(data):
        raise TrainingError(f"{source} is damaged: its end, with the checksum, is missing", code="checkpoint-invalid")
    wanted = {name: thing for name, thing in objects.items() if has_state(thing)}
    if missing := sorted(wanted.keys() - states.keys()):
        raise TrainingError(
            f"{source} holds no state of {', '.join(missing)}",
            hint=f"it holds {', '.join(sorted(states)) or 'none'}",
            code="checkpoint-mismatch",
        )
    for name, thing in wanted.items():
        try:
            _load(thing, states[name])
        except TrainingError:
            raise
        except Exception as error:  # of any type: the object's class may raise it
            raise TrainingError(
                f"{source}: the state of {name} does not fit: {_one_line(error)}",
                hint="restore it into the same model or optimizer, or name another file",
                code="checkpoint-mismatch",
            ) from error
    values = move_to_device(values, device, lambda tensor: _place(tensor) in from_gpus)
    given = {name: thing for name, thing in objects.items() if name not in wanted}
    return {**given, **values}, saved.get("backend", {})


def _one_line(error: Exception) -> str:
    """Return an error in one line: that of a large model may list hundreds of names."""
    return textwrap.shorten(f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error), 400)


def _place(tensor: torch.Tensor) -> int:
    """Return the memory address of a tensor's elements."""
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    elif tensor.layout is not torch.strided:  # compressed sparse layouts
        tensor = tensor.values()
    return tensor.untyped_storage().data_ptr()


_COMPILED = "_orig_mod."
"""torch.compile's prefix of names in a compiled submodule."""
_DDP_PREFIX = "module."
"""The prefix of a script's own DistributedDataParallel."""


def _state(thing: Any) -> Any:
    thing = unwrap_model(thing)
    state = thing.state_dict()
    if isinstance(thing, nn.Module) and (names := _names(thing, state)):
        return {names.get(name, name): value for name, value in state.items()}
    return state


def _load(thing: Any, state: Any) -> None:
    thing = unwrap_model(thing)
    if isinstance(thing, nn.Module) and (names := _names(thing, thing.state_dict())):
        present = {plain: name for name, plain in names.items()}
        state = {present.get(name, name): value for name, value in state.items()}
    thing.load_state_dict(state)


def _names(model: nn.Module, state: Iterable[str]) -> dict[str, str]:
    """Map parameter names that contain wrappers to the plain names."""
    wrappers = [
        f"{name}."
        for name, module in model.named_modules()
        if isinstance(module, DistributedDataParallel) and not isinstance(module, DdpModule)
    ]
    names = {}
    for name in state:
        plain = name
        for wrapper in reversed(wrappers):  # the inner ones first
            if plain.startswith(wrapper + _DDP_PREFIX):
                plain = wrapper + plain.removeprefix(wrapper + _DDP_PREFIX)
        plain = plain.replace(_COMPILED, "")
        if plain != name:
            names[name] = plain
    return names


def has_state(thing: Any) -> bool:
    """Test if an object is saved by its state_dict, not as a plain value.

    Args:
        thing: Any object.

    Returns:
        True if it has state_dict and load_state_dict.
    """
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def _without_numpy(thing: Any) -> Any:
    """Replace NumPy scalars, which schedulers store in optimizers, by Python numbers: torch.load refuses them."""
    if isinstance(thing, np.generic):
        return thing.item()
    if isinstance(thing, dict):
        items = [(_without_numpy(key), _without_numpy(value)) for key, value in thing.items()]
        if all(a is c and b is d for (a, b), (c, d) in zip(items, thing.items(), strict=True)):
            return thing
        changed = copy.copy(thing)  # keeps class and attributes
        changed.clear()
        changed.update(items)
        return changed
    if type(thing) in (list, tuple, set):
        return type(thing)(_without_numpy(item) for item in thing)
    return thing


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, set)):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    return value is None or type(value) in (bool, int, float, complex, str, bytes) or isinstance(value, torch.Tensor)


def _sync_folder(folder: Path) -> None:
    """Flush the rename to the disk, if the file system can."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)
