"""Host CPUs that ranks, loader processes and parameter servers share."""

from __future__ import annotations

import msgspec
import pytest

from distrib.bandwidth_model.fabric import find_fabric
from distrib.bandwidth_model.scaling import predict_limit, predict_step
from distrib.cluster.topology import parse_topology
from distrib.strategy import Gradients, Strategy
from tests.support.predicted_jobs import LAB, job, lab, measured_lab

ONE_MACHINE = measured_lab(machines=((("n1", "n2", "n3", "n4"), 2),))
FOUR_MACHINES = measured_lab(machines=tuple(((f"n{n}",), 2) for n in range(1, 5)))


def test_hosts_on_one_machine_share_its_processors():
    work = job(10, device="cpu")
    assert find_fabric(ONE_MACHINE, work, 4, 1).ranks_per_cpu == 2
    assert find_fabric(ONE_MACHINE, work, 4, 1, nodes=8).ranks_per_cpu == 4  # more nodes on the same machine
    assert find_fabric(FOUR_MACHINES, work, 4, 1, nodes=8).ranks_per_cpu == 0.5
    assert find_fabric(FOUR_MACHINES, work, 4, (1, 4, 2, 1)).ranks_per_cpu == 2
    assert find_fabric(measured_lab(), work, 4, 1).ranks_per_cpu == 0
    two = measured_lab(machines=((("n1", "n2"), 2), (("n3", "n4"), 2)))
    assert find_fabric(two, work, 4, 1, nodes=64).ranks_per_cpu == 1  # more machines of the same kind
    assert find_fabric(ONE_MACHINE, work, 4, 1).cpus_per_rank == 1
    for strategy, each in ((Strategy(gradients=Gradients("bf16")), 1), (Strategy(), 4)):
        crowded = predict_step(ONE_MACHINE, work, strategy, hosts=4, ranks_per_host=each)
        assert any("n1 and n4, for one, are one machine" in note for note in crowded.notes)
        own = predict_step(
            measured_lab(machines=tuple(((f"n{n}",), 8) for n in range(1, 5))),
            work,
            strategy,
            hosts=4,
            ranks_per_host=each,
        )
        assert own.step_seconds < crowded.step_seconds < 2 * own.step_seconds
        assert not any("processor" in note for note in own.notes)


def test_more_computing_ranks_than_processors_lengthen_the_step():
    busy = msgspec.structs.replace(job(1, device="cpu"), processor_share=0.9, processors=1)
    own, crowded = (predict_step(topology, busy, hosts=4) for topology in (FOUR_MACHINES, ONE_MACHINE))
    assert own.efficiency > 0.8
    assert crowded.step_seconds / own.step_seconds == pytest.approx(0.9 * 2, rel=0.1)
    assert crowded.losses[0].what == "more ranks than CPUs"


def test_a_slow_loader_is_noted():
    told = predict_step(lab(), msgspec.structs.replace(job(), loader_seconds=0.1), hosts=2)
    assert any("for data" in note for note in told.notes)


def test_loader_processes_load_beside_communication():
    """Loader processes load data during communication. A script that loads data by itself adds the time to the step."""
    slow = lab("1 GbE")
    plain, free = predict_step(slow, job(), hosts=2), job().compute_seconds
    exposed = plain.exposed_seconds
    for loader_seconds in (0.5 * exposed, 2 * exposed):
        itself = msgspec.structs.replace(job(), loader_seconds=loader_seconds)
        processes = msgspec.structs.replace(itself, loading_processor_seconds=1e-3)
        told = predict_step(slow, processes, hosts=2)
        assert told.step_seconds == pytest.approx(plain.step_seconds + max(0.0, loader_seconds - exposed))
        assert told.exposed_seconds == pytest.approx(max(0.0, exposed - loader_seconds))
        assert told.efficiency == pytest.approx((free + loader_seconds) / told.step_seconds)
        assert predict_step(slow, itself, hosts=2).step_seconds == pytest.approx(plain.step_seconds + loader_seconds)


def test_servers_are_no_faster_than_processors_and_tcp():
    """The measured throughput of a server caps its share of a fast NIC, for any number of servers."""
    work = job(1000, 40)
    ndr, hdr = (
        predict_step(lab(name), work, Strategy(mode="async"), hosts=2).communication_seconds for name in ("NDR", "HDR")
    )
    assert ndr == pytest.approx(hdr)
    assert ndr > 1e9 / 3.4e9 / 2


def test_loader_processes_share_the_processors_of_their_host():
    """Eight batches of 0.4 CPU seconds keep 16 CPUs busy for 0.2 s. A step without loading takes 0.152 s."""
    described = parse_topology(LAB.replace("RATE", "HDR").replace("count: 2", "count: 8") + "    cores: 16\n", "x")
    hungry = msgspec.structs.replace(job(1), loading_processor_seconds=0.4)
    alone, few, all_eight = (predict_step(described, hungry, hosts=1, ranks_per_host=count) for count in (1, 4, 8))
    assert alone.efficiency == 1 and few.efficiency > 0.95
    assert all_eight.step_seconds == pytest.approx(0.2)
    assert all_eight.loader_seconds == pytest.approx(
        0.2 - predict_step(described, job(1), hosts=1, ranks_per_host=8).step_seconds
    )
    assert all_eight.losses[0].what.startswith("loading data") and all_eight.cap is None
    assert predict_step(described, hungry, hosts=4, ranks_per_host=8).step_seconds == pytest.approx(0.2)
    held = predict_limit(described, hungry, hosts=4, ranks_per_host=8)
    assert held.efficiency == pytest.approx(0.152 / 0.2) and held.losses[0].what.startswith("loading data")
    assert predict_step(lab(), hungry, hosts=4, ranks_per_host=8).loader_seconds == 0  # the number of CPUs is unknown
    (first, *_) = predict_step(described, hungry, hosts=1, ranks_per_host=8, timeline=True).timeline
    assert first.phase == "loader" and first.end_seconds == pytest.approx(all_eight.loader_seconds)


def test_loader_processes_of_cpu_hosts_slow_the_computing_ranks():
    """Two ranks compute for 0.152 s and load for 0.1 CPU seconds: 0.252 s on two CPUs, less on eight."""
    work = msgspec.structs.replace(job(0.001, 1, device="cpu"), processor_share=1.0, loading_processor_seconds=0.1)
    small, large = (
        predict_step(measured_lab(machines=((("n1",), cores), (("n2",), cores))), work, hosts=2, ranks_per_host=2)
        for cores in (2, 8)
    )
    assert small.step_seconds == pytest.approx(0.252)
    assert large.loader_seconds == 0 and large.step_seconds < 0.2
