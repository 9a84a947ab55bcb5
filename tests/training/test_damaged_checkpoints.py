"""Damaged checkpoints: noticed by their checksum, and replaced by an older one or by another host's copy."""

from __future__ import annotations

import os
import random

import pytest
import torch
from torch import nn

from distrib.errors import TrainingError
from distrib.training.checkpoint import checkpoint_format, manager
from tests.support.ranks import run_ranks


def flip_bit(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << position % 8
    path.write_bytes(data)


@pytest.fixture
def saved(job, tmp_path):
    """Yield the newest of three checkpoints, of epoch 3."""
    path = tmp_path / "last.pt"
    for epoch in (1, 2, 3):
        job.save(path, keep=3, model=nn.Linear(8, 8), epoch=epoch)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["last.pt", "last.pt.1", "last.pt.2"]
    return path


def test_one_flipped_bit_anywhere_in_a_checkpoint_is_found(job, tmp_path):
    path = tmp_path / "last.pt"
    job.save(path, model=nn.Linear(8, 8), epoch=1)
    intact = path.read_bytes()
    assert torch.load(path, weights_only=True)["values"] == {"epoch": 1}  # without distrib, too
    for position in [*random.Random(0).sample(range(len(intact)), 300), *range(len(intact) - 30, len(intact))]:
        flip_bit(path, position)
        with pytest.raises(TrainingError, match=r"last\.pt is damaged") as failed:
            job.restore(path, model=nn.Linear(8, 8))
        assert failed.value.code == "checkpoint-invalid"
        path.write_bytes(intact)


@pytest.mark.parametrize("left", [0, 1, 0.3, 0.99, -10, -30])
def test_a_truncated_checkpoint_is_skipped_for_the_one_before(job, saved, capfd, left):
    whole = saved.read_bytes()
    saved.write_bytes(whole[: left if isinstance(left, int) else int(left * len(whole))])
    assert job.restore(saved, model=nn.Linear(8, 8), epoch=0) == {"epoch": 2}
    err = capfd.readouterr().err
    assert "warning: checkpoint skipped" in err and f"{saved} " in err and f"restored {saved}.1, epoch 2" in err


def test_the_newest_valid_checkpoint_is_restored_and_each_damaged_one_named(job, saved, capfd):
    second = saved.with_name("last.pt.1")
    for path in (saved, second):
        flip_bit(path, 700)
    assert job.restore(saved, model=nn.Linear(8, 8), epoch=0) == {"epoch": 1}
    err = capfd.readouterr().err
    assert f"{saved} is damaged" in err and f"{second} is damaged" in err
    saved.with_name("last.pt.2").write_bytes(b"")
    with pytest.raises(TrainingError, match=r"last\.pt is damaged"):  # nothing is trained again from the start
        job.restore(saved, epoch=0)


def test_names_of_checkpoints_may_have_any_bytes(job, tmp_path, monkeypatch):
    monkeypatch.setattr(manager.log, "disabled", True)  # pytest-xdist cannot send the name
    path = tmp_path / os.fsdecode(b"caf\xe9\n.pt")
    for epoch in (1, 2):
        job.save(path, keep=2, model=nn.Linear(8, 8), epoch=epoch)
    flip_bit(path, 700)
    assert job.restore(path, model=nn.Linear(8, 8), epoch=0) == {"epoch": 1}


def test_a_lost_newest_checkpoint_is_replaced_by_the_one_before(job, saved):
    saved.unlink()
    assert job.restore(saved, epoch=0) == {"epoch": 2}


def test_the_age_of_kept_checkpoints_counts_not_their_number_in_a_run(job, tmp_path):
    for epoch, number in ((1, 7), (2, 1)):
        stamp = checkpoint_format.NO_STAMP._replace(number=number, time=float(epoch))
        checkpoint_format.write(tmp_path / "last.pt", {"epoch": epoch}, stamp=stamp, keep=2)
    assert job.restore(tmp_path / "last.pt") == {"epoch": 2}


@pytest.mark.parametrize("keep", [0, -1, 1.5, True])
def test_the_number_of_kept_checkpoints_is_checked(job, tmp_path, keep):
    with pytest.raises(TrainingError, match="keep"):
        job.save(tmp_path / "last.pt", keep=keep, epoch=1)


def test_the_older_checkpoint_is_complete_where_files_cannot_be_linked(job, tmp_path, monkeypatch):
    monkeypatch.setattr("os.link", lambda *_, **__: (_ for _ in ()).throw(PermissionError()))
    for epoch in (1, 2):
        job.save(tmp_path / "last.pt", keep=2, epoch=epoch)
    assert job.restore(tmp_path / "last.pt.1") == {"epoch": 1}


def test_a_checkpoint_without_checksum_of_an_older_version_is_restored(job, tmp_path):
    content = {"distrib": 1, "stamp": ("", 0, 1, 1.0), "states": {}, "values": {"epoch": 5}, "backend": {}}
    torch.save(content, tmp_path / "last.pt")
    assert job.restore(tmp_path / "last.pt") == {"epoch": 5}
    torch.save(content | {"distrib": 2}, tmp_path / "last.pt")
    with pytest.raises(TrainingError, match=r"last\.pt is damaged"):
        job.restore(tmp_path / "last.pt")


@pytest.mark.forked
def test_the_copy_of_another_host_replaces_a_damaged_checkpoint(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os, shutil, sys\n"
        "import distrib\n"
        "os.chdir(sys.argv[1])\n"
        "job = distrib.init()\n"
        "os.makedirs(f'disk{job.rank}')\n"
        "os.chdir(f'disk{job.rank}')\n"
        "job.save('last.pt', epoch=3)\n"
        "job.barrier()\n"
        "if job.rank:\n"
        "    shutil.copy('../disk0/last.pt', 'last.pt')\n"
        "job.barrier()\n"
        "if not job.rank:\n"
        "    with open('last.pt', 'r+b') as file:\n"
        "        file.seek(700)\n"
        "        file.write(b'!')\n"
        "print(job.restore('last.pt', epoch=0))\n"
        "with open('last.pt', 'r+b') as file:\n"
        "    file.truncate(800)\n"
        "try:\n"
        "    job.restore('last.pt', epoch=0)\n"
        "except distrib.TrainingError as error:\n"
        "    print(error.code)\n"
    )
    run_of_launcher = {"DISTRIB_JOB": "j", "TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_MAX_RESTARTS": "1"}
    run = run_ranks(2, script, tmp_path, **run_of_launcher)
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == [
        "checkpoint-invalid",
        "checkpoint-invalid",
        "{'epoch': 3}",
        "{'epoch': 3}",
    ]
    assert "disk0/last.pt is damaged" in run.stderr


class RunsCode:
    """A value whose unpickling creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.parametrize("place", ["states", "values", "backend", "stamp"])
def test_a_hostile_checkpoint_runs_no_code(job, tmp_path, place):
    path = tmp_path / "last.pt"
    content = {"distrib": 1, "stamp": ("", 0, 1, 1.0), "states": {}, "values": {}, "backend": {}}
    torch.save(content | {place: {"x": RunsCode(tmp_path / "ran")}}, path)
    with pytest.raises(TrainingError, match=r"last\.pt is not a checkpoint"):
        job.restore(path)
    assert [file.name for file in tmp_path.iterdir()] == ["last.pt"]


def test_a_checkpoint_is_never_written_over_an_older_one(job, tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    for epoch in (1, 2):
        job.save(path, keep=2, epoch=epoch)
    with path.open("rb") as reader:
        job.save(path, epoch=3)
        assert reader.read() != path.read_bytes()  # a reader keeps the whole old file
        reader.seek(0)
        values, _ = checkpoint_format.read(reader.read(), {}, torch.device("cpu"), source="old")
    assert values == {"epoch": 2}
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        job.save(path, epoch=4)
    assert job.restore(path) == {"epoch": 3}
    assert sorted(file.name for file in tmp_path.iterdir()) == ["last.pt", "last.pt.1"]
