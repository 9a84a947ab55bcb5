"""How gradients are averaged: exactly as DDP does, with fewer bytes, over hosts of any shape, and without a trace."""

from __future__ import annotations

import math
import os
import threading

import pytest
import torch

from distrib.training.gradients.compression import BLOCK, Blocks
from distrib.training.gradients.host_shared_memory import Doorway, Neighbours
from distrib.training.gradients.process_groups import hosts_of, lanes_of
from tests.conftest import SCRIPTS

AVERAGES = SCRIPTS / "averages.py"


def test_lanes_have_one_rank_of_every_host():
    hosts = hosts_of(["a", "b", "a", "a", "b"])
    assert hosts == [[0, 2, 3], [1, 4]]
    assert lanes_of(hosts) == [[0, 1], [2, 4]]


def neighbours(count: int, shared_bytes: int) -> list[Neighbours]:
    """All ranks of a host, in one process."""
    doorways = [Doorway() for _ in range(count)]
    names = [doorway.name for doorway in doorways]
    found: list[Neighbours | None] = [None] * count

    def join(index: int) -> None:
        found[index] = Neighbours(doorways[index].meet(names, index, 10), index, 2, shared_bytes)

    threads = [threading.Thread(target=join, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return [one for one in found if one is not None]


def test_neighbours_share_memory_and_wake_each_other():
    before = ours_in_shared_memory()
    a, b, c = neighbours(3, 1 << 16)
    a.shared(64, 128, torch.float32).fill_(7)
    assert c.shared(64, 128, torch.float32).tolist() == [7.0] * 16
    assert c.shared(64, 128, torch.float32).storage_offset() == 0
    a.tell(1, 5)
    c.sleep()
    assert c.slowest(1) == 0 and c.slowest(1, among=1) == 5
    for one in (b, c):
        one.tell(1, 6)
    a.sleep()
    assert a.slowest(1) == 5 and a.slowest(0) == 0
    for _ in range(100_000):  # nobody reads, and nobody waits
        b.tell(0, 1)
    waiting = threading.Thread(target=lambda: (b.sleep(), b.sleep()))
    waiting.start()
    b.close()
    b.wake()
    waiting.join(10)
    while 1 not in a.gone:
        a.sleep()
    assert ours_in_shared_memory() == before


def test_blocks_give_back_about_what_they_were_given():
    elements = Blocks.padded(3 * BLOCK - 5)
    rows = torch.randn(4, elements) * torch.tensor([[1e-3], [1.0], [30.0], [0.0]])
    sent = Blocks.encode(rows)
    assert sent.numel() == 2 * Blocks().sent_bytes(4 * elements, 4, 4, None) // 3 and sent.dtype == torch.uint8
    back = Blocks.decode(sent, elements)
    for row, other in zip(rows, back, strict=True):
        assert (row - other).abs().max() <= row.abs().max() / 127
    rows[1, 3] = math.inf
    assert not Blocks.decode(Blocks.encode(rows), elements)[1].isfinite().all()
    assert Blocks.decode(Blocks.encode(rows), elements)[2].isfinite().all()


def test_averages_are_those_of_ddp(launch):
    run = launch("-np", "4", AVERAGES, "exact", "0,1,2,3", "0,0,1,1", "0,0,0,1", "0,0,0,0")
    assert run.code == 0, run
    assert run.out.count("done") == 4 and "True 2 hosts" in run.out and "False 4 hosts" in run.out


def test_with_fewer_bytes_models_learn_as_well(launch):
    run = launch("-np", "3", AVERAGES, "formats", "0,1,2", "0,0,1")
    assert run.code == 0, run
    assert run.out.count("of the bytes") == 10


def test_gradients_in_16_bits_are_those_of_ddp_but_for_rounding(launch):
    run = launch("-np", "4", AVERAGES, "halves", "0,1,2,3", "0,0,1,1", "0,0,0,1")
    assert run.code == 0 and run.out.count("done") == 3, run


def test_models_of_all_kinds(launch):
    run = launch("-np", "3", AVERAGES, "mixed,restored,ends", "0,0,1")
    assert run.code == 0 and run.out.count("done") == 3, run


def test_what_compression_keeps_from_step_to_step(launch):
    run = launch("-np", "4", AVERAGES, "numbers,begins,seldom,scales,arrives", "0,1,2,3", "0,0,1,1")
    assert run.code == 0 and run.out.count("done") == 10, run


def test_a_killed_rank_leaves_no_memory_behind(launch):
    before = ours_in_shared_memory()
    run = launch("-np", "3", AVERAGES, "dies", "0,0,0")
    assert run.code == 137 and run.result["first_failure"]["rank"] == 2, run
    assert ours_in_shared_memory() <= before


def ours_in_shared_memory() -> set[str]:
    """Files in /dev/shm but those of Open MPI, whose killed processes leave some."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sm_segment", "vader", "pmix", "sem.mp"))}


@pytest.mark.cluster
def test_unequal_hosts(launch, make_cluster):
    cluster = make_cluster(2, slots=2)
    cluster.hostfile.write_text("n1 slots=2\nn2 slots=1\n")
    run = launch("-H", cluster.hostfile, AVERAGES, "exact", cluster=cluster)
    assert run.code == 0 and "True 2 hosts" in run.out, run
    for host in cluster.hosts:
        assert cluster.run(host, ["ls", "/dev/shm"]).stdout == ""
