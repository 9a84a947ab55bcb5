"""File format of checkpoints: names of wrapped models, values, permissions, leftover and older files, refusals."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import socket
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from distrib.errors import TrainingError
from distrib.training.checkpoint import checkpoint_format
from distrib.training.checkpoint.replicas import Stamp

CPU = torch.device("cpu")
STAMP = Stamp("run", 1, 2, 3.0)


class Counter:
    """Object with a state."""

    def __init__(self, count: Any = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def load(path: Path, **objects: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    data = checkpoint_format.content(path)
    assert data is not None
    return checkpoint_format.read(data, objects, CPU, source=str(path))


def test_a_file_is_an_archive_of_torch_that_ends_with_its_checksum(tmp_path):
    path = tmp_path / "new" / "folder" / "last.pt"
    checkpoint_format.write(path, {"counter": Counter(3), "epoch": 7}, {"clock": 4}, STAMP)
    data = path.read_bytes()
    assert data.endswith(b"\ndistrib-crc32 %08x\n" % zlib.crc32(data[:-24]))
    assert torch.load(path, weights_only=True) == {
        "distrib": 2, "states": {"counter": {"count": 3}}, "values": {"epoch": 7}, "backend": {"clock": 4}, "stamp": tuple(STAMP)
    }  # fmt: skip
    counter = Counter()
    assert load(path, counter=counter, epoch=0, best=1.5) == ({"epoch": 7, "best": 1.5}, {"clock": 4})
    assert counter.count == 3
    assert checkpoint_format.content(tmp_path / "missing.pt") is None


def test_packed_content_has_no_checksum_and_is_read(tmp_path):
    packed = checkpoint_format.pack({"counter": Counter(3), "epoch": 7})
    assert packed == {"distrib": 1, "states": {"counter": {"count": 3}}, "values": {"epoch": 7}, "backend": {}}
    file = io.BytesIO()
    torch.save(packed, file)
    assert checkpoint_format.read(file.getvalue(), {}, CPU, source="bytes") == ({"epoch": 7}, {})


def test_the_permissions_are_those_of_a_new_file(tmp_path):
    mask = os.umask(0o026)
    try:
        checkpoint_format.write(tmp_path / "last.pt", {"epoch": 1})
        assert os.umask(0o026) == 0o026
    finally:
        os.umask(mask)
    assert (tmp_path / "last.pt").stat().st_mode & 0o777 == 0o640


def test_partial_files_of_killed_processes_of_this_host_are_removed(tmp_path):
    prefix = f".last.pt.{socket.gethostname()}."
    names = [f"{prefix}killed", f"{prefix}running", ".last.pt.another-host.x", ".other.pt.x", "last.pt.1"]
    for name in names:
        (tmp_path / name).touch()
    with (tmp_path / names[1]).open("rb") as running:
        fcntl.flock(running, fcntl.LOCK_EX)
        checkpoint_format.write(tmp_path / "last.pt", {"epoch": 1})
    assert {file.name for file in tmp_path.iterdir()} == {*names[1:], "last.pt"}


def test_a_partial_file_has_a_lock_and_the_name_of_this_host(tmp_path, monkeypatch):
    seen: list[str] = []

    def save(content: dict[str, Any], file: Any) -> None:
        (partial,) = tmp_path.iterdir()
        with partial.open("rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
        seen.append(partial.name)
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_format, "_save", save)
    with pytest.raises(KeyboardInterrupt):
        checkpoint_format.write(tmp_path / ("n" * 200), {"epoch": 1})
    assert seen[0].startswith(f".{'n' * 100}.{socket.gethostname()[:64]}.") and not list(tmp_path.iterdir())


def test_older_files_are_numbered(tmp_path):
    for epoch in range(1, 6):
        checkpoint_format.write(tmp_path / "last.pt", {"epoch": epoch}, keep=3)
    found = {file.name: load(file)[0]["epoch"] for file in tmp_path.iterdir()}
    assert found == {"last.pt": 5, "last.pt.1": 4, "last.pt.2": 3}
    checkpoint_format.write(tmp_path / "last.pt", {"epoch": 6})
    assert {file.name: load(file)[0]["epoch"] for file in tmp_path.iterdir()} == {**found, "last.pt": 6}
    checkpoint_format.write(tmp_path / "last.pt", {"epoch": 7}, keep=2)
    assert load(tmp_path / "last.pt.1")[0]["epoch"] == 6
    for epoch in range(8, 12):
        checkpoint_format.write(tmp_path / "last.pt", {"epoch": epoch}, keep=4)
    assert [load(tmp_path / f"last.pt.{number}")[0]["epoch"] for number in (1, 2, 3)] == [10, 9, 8]


@pytest.mark.parametrize("context", [OSError(errno.ENOSPC, "No space left on device"), None])
def test_the_error_of_a_full_disk_is_raised_and_the_old_file_stays(tmp_path, monkeypatch, context):
    checkpoint_format.write(tmp_path / "last.pt", {"epoch": 1})

    def fail(content: Any, file: Any) -> None:
        try:
            if context:
                raise context
        finally:
            raise RuntimeError("unexpected pos 64 vs 0")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail)
        with pytest.raises(OSError if context else RuntimeError) as failed:
            checkpoint_format.write(tmp_path / "last.pt", {"epoch": 2})
    assert context is None or failed.value is context
    assert load(tmp_path / "last.pt")[0] == {"epoch": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("call", ["open", "fsync"])
def test_a_file_system_that_cannot_flush_a_folder_keeps_the_checkpoint(tmp_path, monkeypatch, call):
    original, flushed = getattr(os, call), []

    def fail_for_folders(target: Any, *rest: Any) -> Any:
        if Path(target if call == "open" else f"/proc/self/fd/{target}").resolve() == tmp_path:
            flushed.append(target)
            raise OSError(errno.EINVAL, "Invalid argument")
        return original(target, *rest)

    descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, call, fail_for_folders)
    checkpoint_format.write(tmp_path / "last.pt", {"epoch": 1})
    assert load(tmp_path / "last.pt")[0] == {"epoch": 1} and flushed
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_file_system_without_locks_has_checkpoints(tmp_path, monkeypatch):
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    checkpoint_format.write(tmp_path / "last.pt", {"epoch": 1})
    assert load(tmp_path / "last.pt")[0] == {"epoch": 1}


class ScriptsDdp(DistributedDataParallel):
    """DistributedDataParallel of a script, without process group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


class Compiled(nn.Module):
    """Module with the names of one that torch.compile returned."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def test_names_in_models_are_those_without_wrappers():
    def plain() -> nn.Module:
        return nn.ModuleDict({"module": nn.Linear(2, 1), "head": nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))})

    wrapped = plain()
    wrapped["head"][1] = ScriptsDdp(Compiled(wrapped["head"][1]))
    wrapped["head"] = ScriptsDdp(wrapped["head"])
    assert "head.module.1.module._orig_mod.weight" in wrapped.state_dict()
    packed = checkpoint_format.pack({"model": wrapped})
    assert packed["states"]["model"].keys() == plain().state_dict().keys()
    file = io.BytesIO()
    torch.save(packed, file)
    for target in (plain(), wrapped):
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.zero_()
        checkpoint_format.read(file.getvalue(), {"model": target}, CPU, source="bytes")
        assert all(
            torch.equal(own, packed["states"]["model"][name])
            for own, name in zip(target.state_dict().values(), plain().state_dict(), strict=True)
        )


class Settings(dict):  # a class of dict whose attributes are kept
    pass


def test_numbers_of_numpy_become_those_of_python_and_all_else_stays():
    given = {"a": [np.float64(0.5), (np.int64(3), {np.int32(2)})], np.int64(4): "x", "same": {"y": 1}}
    packed = checkpoint_format.pack({"value": given})["values"]["value"]
    assert packed == {"a": [0.5, (3, {2})], 4: "x", "same": {"y": 1}} and packed["same"] is given["same"]
    assert [type(packed["a"][0]), type(packed["a"][1][0])] == [float, int]
    assert type(next(iter(packed["a"][1][1]))) is int and type([*packed][1]) is int
    assert type(given["a"][0]) is np.float64
    settings = Settings(lr=np.float32(0.5))
    settings.note = "kept"
    state = checkpoint_format.pack({"counter": Counter(settings)})["states"]["counter"]["count"]
    assert (
        type(state) is Settings and state == {"lr": 0.5} and state.note == "kept" and type(settings["lr"]) is np.float32
    )


@pytest.mark.parametrize(
    "value", [None, True, 1, 0.5, 1j, "text", b"bytes", torch.ones(1), [(1, {2})], {"a": {(1, 2): [None]}}, {1, "b"}]
)
def test_plain_values_are_saved(value):
    assert checkpoint_format.pack({"value": value})["values"] == {"value": value}


class Point(NamedTuple):
    x: object


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (object(), "value, a object"), ([1, Path()], r"value\[1\], a PosixPath"), ({"a": Path()}, r"value\['a'\], a PosixPath"),
        ({Path(): 1}, "value"), ({1: {2, Path()}}, "value"), ((1, (2, object())), r"value\[1\]\[1\], a object"),
    ],
)  # fmt: skip
def test_other_values_are_refused_with_their_place(value, where):
    with pytest.raises(TrainingError, match=f"^cannot save {where}") as refused:
        checkpoint_format.pack({"value": value})
    assert refused.value.code == "checkpoint-unsavable" and "state_dict" in str(refused.value.hint)


def test_a_loader_among_the_values_is_to_be_prepared():
    with pytest.raises(TrainingError, match="cannot save loader, a DataLoader") as refused:
        checkpoint_format.pack({"loader": DataLoader([1])})
    assert "job.prepare" in str(refused.value.hint)


@pytest.mark.parametrize(
    ("state", "where"), [(Path(), r"counter\['count'\]"), (Point(Path()), r"counter\['count'\]"), ([{"a": Path()}], r"counter\['count'\]\[0\]\['a'\]")]
)  # fmt: skip
def test_a_state_that_cannot_be_read_is_refused_with_its_place(tmp_path, state, where):
    with pytest.raises(TrainingError, match=f"cannot save {where}") as refused:
        checkpoint_format.write(tmp_path / "last.pt", {"counter": Counter(state)})
    assert refused.value.code == "checkpoint-unsavable" and "numbers" in str(refused.value.hint)
    assert not list(tmp_path.iterdir())


def refusal(data: bytes, **objects: Any) -> TrainingError:
    with pytest.raises(TrainingError) as refused:
        checkpoint_format.read(data, objects, CPU, source="last.pt")
    return refused.value


def test_what_does_not_fit_is_refused_with_what_there_is(tmp_path):
    checkpoint_format.write(tmp_path / "last.pt", {"b": Counter(1), "a": Counter(2)})
    data = (tmp_path / "last.pt").read_bytes()
    missing = refusal(data, a=Counter(), d=Counter(), c=Counter())
    assert "last.pt holds no state of c, d" in str(missing) and missing.hint == "it holds a, b"
    assert missing.code == "checkpoint-mismatch"
    checkpoint_format.write(tmp_path / "empty.pt", {})
    assert refusal((tmp_path / "empty.pt").read_bytes(), a=Counter()).hint == "it holds none"

    class Strict(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise state["error"] if "error" in state else KeyError("lr")

    unfit = refusal(data, a=Strict())
    assert "state of a does not fit: KeyError: 'lr'" in str(unfit) and unfit.code == "checkpoint-mismatch"
    assert "same model" in str(unfit.hint)

    class Own(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise TrainingError("own words")

    assert str(refusal(data, a=Own())) == "own words"

    class Long(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ValueError("many names,\n" * 100)

    _, _, long = str(refusal(data, a=Long())).partition(" does not fit: ")
    assert long.startswith("many names, many names") and "\n" not in long and 380 < long.index(";") <= 400


def test_other_files_are_refused(tmp_path):
    foreign = refusal(b"not a checkpoint")
    assert "last.pt is not a checkpoint" in str(foreign) and foreign.code == "checkpoint-invalid"
    for content in ({"states": {}, "values": {}}, {"distrib": 1}, [1], 5):
        file = io.BytesIO()
        torch.save(content, file)
        other = refusal(file.getvalue())
        assert "last.pt was not written by job.save" in str(other) and "torch.load" in str(other.hint)
        assert other.code == "checkpoint-invalid"
    checkpoint_format.write(tmp_path / "last.pt", {"epoch": 1})
    cut = refusal((tmp_path / "last.pt").read_bytes()[:-24])
    assert "checksum" in str(cut) and "damaged" in str(cut) and cut.code == "checkpoint-invalid"


def test_a_damaged_file_is_refused_with_both_checksums(tmp_path):
    checkpoint_format.write(tmp_path / "last.pt", {"epoch": 1})
    data = bytearray((tmp_path / "last.pt").read_bytes())
    data[100] ^= 1
    (tmp_path / "last.pt").write_bytes(data)
    with pytest.raises(TrainingError) as refused:
        checkpoint_format.content(tmp_path / "last.pt")
    assert f"checksum {zlib.crc32(data[:-24]):08x}, expected {bytes(data[-9:-1]).decode()}" in str(refused.value)
    assert refused.value.code == "checkpoint-invalid" and str(tmp_path / "last.pt") in str(refused.value)
    data[-2] = 0xFF  # damage in the checksum itself
    (tmp_path / "last.pt").write_bytes(data)
    with pytest.raises(TrainingError, match="damaged"):
        checkpoint_format.content(tmp_path / "last.pt")


@pytest.mark.parametrize(
    ("thing", "expected"),
    [(Counter(), True), (nn.Linear(1, 1), True), (1, False), (type("Half", (), {"state_dict": 1})(), False),
     (type("Half", (), {"load_state_dict": 1})(), False)],
)  # fmt: skip
def test_objects_with_a_state_have_both_methods(thing, expected):
    assert checkpoint_format.has_state(thing) is expected
