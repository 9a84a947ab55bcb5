"""Gradient averaging: exact as in DDP, with fewer bytes, over hosts of any shape, and without leftovers."""

from __future__ import annotations

import math
import os
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from distrib.errors import TrainingError
from distrib.training.gradients.hierarchical_allreduce import _group_between_hosts, _group_by_host
from distrib.training.gradients.host_shared_memory import HostSharedMemory, PeerListener
from distrib.training.gradients.int8_blocks import BLOCK_ELEMENTS, Int8Blocks
from tests.conftest import SCRIPTS

pytestmark = pytest.mark.forked
AVERAGES = SCRIPTS / "averages.py"


def test_an_inter_host_group_has_one_rank_of_every_host():
    hosts = _group_by_host(["a", "b", "a", "a", "b"])
    assert hosts == [[0, 2, 3], [1, 4]]
    assert _group_between_hosts(hosts) == [[0, 1], [2, 4]]


def host_ranks(count: int, shared_bytes: int) -> list[HostSharedMemory]:
    """Return all ranks of a host, in one process."""
    listeners = [PeerListener() for _ in range(count)]
    addresses = [listener.address for listener in listeners]
    found: list[HostSharedMemory | None] = [None] * count

    def join(index: int) -> None:
        found[index] = HostSharedMemory(listeners[index].connect_all(addresses, index, 10), index, 2, shared_bytes)

    threads = [threading.Thread(target=join, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return [one for one in found if one is not None]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
def test_connections_of_other_users_delay_no_rank_and_no_rank_connects_to_another_user():
    first, second, third = PeerListener(), PeerListener(), PeerListener()
    addresses = [first.address, second.address]
    with socket.socket(socket.AF_UNIX) as foreign, ThreadPoolExecutor(1) as own:
        os.seteuid(65534)
        try:
            foreign.connect(first.address)
            foreign.sendall(struct.pack("i", 1))
        finally:
            os.seteuid(0)
        joined = own.submit(first.connect_all, addresses, 0, 5)
        connected = second.connect_all(addresses, 1, 5)[0]
        peer = joined.result()[1]
        assert connected and peer and connected.getsockname() == peer.getpeername()
        os.seteuid(65534)  # now the listener is of another user
        try:
            with pytest.raises(TrainingError, match="user 0 listens, expected 65534"):
                PeerListener().connect_all([third.address, b""], 1, 5)
        finally:
            os.seteuid(0)
        connected.close()
        peer.close()


def test_ranks_of_a_host_share_memory_and_wake_each_other():
    before = ours_in_shared_memory()
    a, b, c = host_ranks(3, 1 << 16)
    a.tensor(64, 128, torch.float32).fill_(7)
    assert c.tensor(64, 128, torch.float32).tolist() == [7.0] * 16
    assert c.tensor(64, 128, torch.float32).storage_offset() == 0
    a.set_counter(1, 5)
    c.wait()
    assert c.min_counter(1) == 0 and c.min_counter(1, among=1) == 5
    for one in (b, c):
        one.set_counter(1, 6)
    a.wait()
    assert a.min_counter(1) == 5 and a.min_counter(0) == 0
    for _ in range(100_000):  # no rank reads or waits
        b.set_counter(0, 1)
    waiting = threading.Thread(target=lambda: (b.wait(), b.wait()))
    waiting.start()
    b.close()
    b.wake()
    waiting.join(10)
    while 1 not in a.exited:
        a.wait()
    assert ours_in_shared_memory() == before


def test_int8_rounds_to_a_127th_of_the_largest_of_a_block():
    elements = Int8Blocks.padded(3 * BLOCK_ELEMENTS - 5)
    rows = torch.randn(4, elements) * torch.tensor([[1e-3], [1.0], [30.0], [0.0]])
    sent = Int8Blocks.encode(rows)
    assert sent.shape == (4, elements + 4 * elements // BLOCK_ELEMENTS) and sent.dtype == torch.uint8
    back = Int8Blocks.decode(sent, elements)
    for row, other in zip(rows, back, strict=True):
        assert (row - other).abs().max() <= row.abs().max() / 127
    rows[1, 3] = math.inf
    assert not Int8Blocks.decode(Int8Blocks.encode(rows), elements)[1].isfinite().all()
    assert Int8Blocks.decode(Int8Blocks.encode(rows), elements)[2].isfinite().all()


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


@pytest.mark.parametrize("hosts", ["0,1", "0,0,1,1"])
def test_what_compression_keeps_from_step_to_step(launch, hosts):
    run = launch("-np", len(hosts.split(",")), AVERAGES, "numbers,begins,seldom,scales,arrives", hosts)
    assert run.code == 0 and run.out.count("done") == 5, run


def test_a_killed_rank_leaves_no_memory_behind(launch):
    before = ours_in_shared_memory()
    run = launch("-np", "3", AVERAGES, "dies", "0,0,0")
    assert run.code == 137 and run.result["first_failure"]["rank"] == 2, run
    assert ours_in_shared_memory() <= before


def ours_in_shared_memory() -> set[str]:
    """List the files in /dev/shm, without those of Open MPI, whose killed processes leave some."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sm_segment", "vader", "pmix", "sem.mp"))}


@pytest.mark.cluster
def test_unequal_hosts(launch, make_cluster):
    cluster = make_cluster(2, slots=2)
    cluster.hostfile.write_text("n1 slots=2\nn2 slots=1\n")
    run = launch("-H", cluster.hostfile, AVERAGES, "exact", cluster=cluster)
    assert run.code == 0 and "True 2 hosts" in run.out, run
    for host in cluster.hosts:
        assert cluster.run(host, ["ls", "/dev/shm"]).stdout == ""
