"""Predicted training steps on one and several hosts, by strategy and topology."""

from __future__ import annotations

import math

import msgspec
import pytest

from distrib.bandwidth_model.hypothetical import hypothetical_cluster, parse_network_option
from distrib.bandwidth_model.scaling import predict_limit, predict_step
from distrib.bandwidth_model.workload import Gradient
from distrib.bandwidth_model.workload_catalog import catalog_workload
from distrib.cluster.topology import parse_topology
from distrib.errors import ConfigError
from distrib.strategy import Gradients, OuterOptimizer, Strategy
from tests.support.predicted_jobs import LAB, POD, job, lab, measured_lab


def test_one_rank_without_topology_has_full_efficiency():
    told = predict_step(None, job(), hosts=1)
    assert (told.efficiency, told.exposed_seconds, told.cap, told.notes) == (1.0, 0.0, None, ())
    assert told.step_seconds == pytest.approx(0.152)


def test_hosts_beyond_the_topology_are_extrapolated_with_a_note():
    told = predict_step(lab(), job(), hosts=100, ranks_per_host=2)
    assert any("100 are extrapolated" in note for note in told.notes)
    assert any("not measured" in note for note in told.notes)
    assert told.efficiency < predict_step(lab(), job(), hosts=4, ranks_per_host=2).efficiency


def test_extrapolated_nodes_copy_the_named_hosts():
    """Extrapolated nodes copy the named hosts a1 and a2, not a3 and a4 with 1 GbE."""
    text = LAB.replace("n[1-4]", "a[1-2]").replace("RATE", "10 GbE") + LAB[LAB.index("  -") :].replace(
        "n[1-4]", "a[3-4]"
    ).replace("RATE", "1 GbE")
    told = predict_step(parse_topology(text, "x"), job(), hosts=["a1", "a2"], nodes=4, ranks_per_host=2)
    assert told.cap.link == "a1-a2, 10 GbE" and told.ranks == 8
    assert told.notes[0].startswith("2 hosts are known; 4 are extrapolated")


def test_measured_links_reduce_the_expected_error():
    measured = predict_step(measured_lab(), job(device="cpu"), hosts=4)
    assert measured.expected_error < predict_step(lab("1 GbE"), job(device="cpu"), hosts=4).expected_error
    assert not any("not measured" in note for note in measured.notes)


def test_an_unknown_link_is_refused():
    with pytest.raises(ConfigError, match="distrib-topo probe"):
        predict_step(None, job(), hosts=2)
    with pytest.raises(ConfigError, match="between x and y"):
        predict_step(lab(), job(), hosts=["x", "y"])
    with pytest.raises(ConfigError, match="0 hosts"):
        predict_step(lab(), job(), hosts=0)


@pytest.mark.parametrize(
    ("field", "value", "where"),
    [
        ("backward_seconds", math.nan, r"\$\.backward_seconds"),
        ("loader_seconds", math.inf, r"\$\.loader_seconds"),
        ("gradients", (), r"\$\.gradients"),
        ("batch", 0, r"\$\.batch"),
        ("parameter_bytes", 0, r"\$\.parameter_bytes"),
        ("gradients", (Gradient(name="w", elements=0, size_bytes=0, ready_seconds=0.0),), r"\$\.gradients\[0\]"),
        ("gradients", (Gradient(name="w", elements=1, size_bytes=4, ready_seconds=math.nan),), r"ready_seconds"),
    ],
)
def test_an_impossible_workload_is_refused_with_its_field(field, value, where):
    with pytest.raises(ConfigError, match=where):
        predict_step(lab(), msgspec.structs.replace(job(), **{field: value}), hosts=2)


def test_ranks_on_fast_gpus_wait_for_ranks_on_slow_gpus():
    text = LAB.replace("RATE", "100 GbE") + LAB[LAB.index("  -") :].replace("n[1-4]", "old[1-4]").replace(
        "RTX A6000", "T4"
    ).replace("RATE", "100 GbE")
    told = predict_step(parse_topology(text, "x"), job(megabytes=1), hosts=8, ranks_per_host=2)
    alone = predict_step(parse_topology(text, "x"), job(megabytes=1), hosts=4, ranks_per_host=2)
    assert told.step_seconds == pytest.approx(alone.step_seconds * 154.8 / 65, rel=0.05)
    assert any("T4 takes 2.4 times as long" in note for note in told.notes)
    balanced = predict_step(
        parse_topology(text, "x"), job(megabytes=1), Strategy(balance=True), hosts=8, ranks_per_host=2
    )
    assert balanced.samples_per_second > told.samples_per_second
    free, bounded = (
        predict_step(
            parse_topology(text, "x"),
            job(megabytes=1),
            Strategy(mode="async", staleness=bound),
            hosts=8,
            ranks_per_host=2,
        )
        for bound in (None, 4)
    )
    assert free.samples_per_second > bounded.samples_per_second  # with a bound, all ranks wait for the slow ones


def test_host_reduction_sends_once_per_host_in_mode_async():
    wide, work = lab(), job(megabytes=100, backward=0.01)
    for servers in (None, 4):
        once, each = (
            predict_step(
                wide, work, Strategy(mode="async", servers=servers, host_reduction=way), hosts=4, ranks_per_host=2
            )
            for way in (True, False)
        )
        # The bytes double, but several pushing ranks use more of the link's bandwidth.
        assert 1.8 * once.communication_seconds < each.communication_seconds < 2.05 * once.communication_seconds
    alone = [
        predict_step(wide, work, Strategy(mode="async", host_reduction=way), hosts=1, ranks_per_host=2)
        for way in (True, False)
    ]
    assert alone[0].step_seconds == alone[1].step_seconds


def test_mode_local_exchanges_parameters_after_its_inner_steps():
    wide, work = lab(), msgspec.structs.replace(job(megabytes=100), variation=0.2)
    default, every, half, hidden = (
        predict_step(wide, work, Strategy(mode="local", **settings), hosts=4)
        for settings in (
            {}, {"inner_steps": 10}, {"inner_steps": 10, "gradients": Gradients("bf16")},
            {"inner_steps": 10, "outer": OuterOptimizer(overlap_steps=5)},
        )
    )  # fmt: skip
    assert every.communication_seconds == pytest.approx(50 * default.communication_seconds)
    assert half.communication_seconds == pytest.approx(every.communication_seconds / 2, rel=0.05)
    assert hidden.exposed_seconds == 0 and hidden.communication_seconds == every.communication_seconds
    # Ranks synchronize rarely, so they do not wait for the slowest rank in each step.
    assert default.step_seconds < 1.02 * work.compute_seconds


def test_topk_gradients_are_sent_once_per_host():
    work, most = job(megabytes=100, device="cpu"), Strategy(gradients=Gradients("topk", fraction=0.1))
    one, four = (
        predict_step(measured_lab(each=each), work, most, hosts=4, ranks_per_host=each).communication_seconds
        for each in (1, 4)
    )
    assert four == pytest.approx(one, rel=0.25)


def test_horovod_does_not_average_inside_hosts_first():
    plain, horovod = (
        predict_step(
            lab("1 GbE"), job(megabytes=50, device="cpu"), Strategy(backend=backend), hosts=2, ranks_per_host=4
        )
        for backend in ("torch", "horovod")
    )
    assert horovod.communication_seconds == pytest.approx(1.75 * plain.communication_seconds, rel=0.1)


def test_measured_cpu_hosts_with_several_ranks_have_the_error_of_measured_links():
    told = predict_step(measured_lab(each=2), job(megabytes=400, device="cpu"), hosts=4, ranks_per_host=2)
    assert told.expected_error == predict_step(measured_lab(), job(device="cpu"), hosts=4).expected_error
    assert not any("loopback" in note for note in told.notes)
    assert told.cap and told.cap.link.startswith("n1-n2")


def test_gpus_without_described_links_have_those_of_the_catalogue():
    bare = POD.replace("    links: {nvlink: NVLink2 x6, nvswitch: yes, pcie: PCIe3 x16}\n", "").replace(
        "V100", "V100-SXM2-16GB"
    )
    work = job(device="V100-SXM2-16GB")
    told = predict_step(parse_topology(bare, "bare"), work, hosts=1, ranks_per_host=8)
    described = predict_step(
        parse_topology(POD.replace("V100", "V100-SXM2-16GB"), "pod"), work, hosts=1, ranks_per_host=8
    )
    assert told.step_seconds == described.step_seconds
    assert any("`links` are not described for a1: NVLink2 x6 is assumed" in note for note in told.notes)
    pcie = POD.replace("nvlink: NVLink2 x6, nvswitch: yes, ", "").replace("V100", "V100-SXM2-16GB")
    assert predict_step(parse_topology(pcie, "pcie"), work, hosts=1, ranks_per_host=8).step_seconds > told.step_seconds


def test_an_unknown_gpu_is_noted():
    (note,) = predict_step(None, job(device="GPU9"), hosts=1).notes
    assert note.startswith("GPU9 is not in the catalogue")


def test_a_workload_that_exceeds_gpu_memory_does_not_fit():
    assert predict_step(lab(), job(), hosts=2).fits_memory is True
    large = msgspec.structs.replace(job(), memory_bytes=48 * 10**9)
    assert predict_step(lab(), large, hosts=2).fits_memory is False
    assert predict_step(lab(), msgspec.structs.replace(job(), memory_bytes=None), hosts=2).fits_memory is None


def test_mode_async_on_one_host_says_why_it_is_slower_than_on_two():
    cluster = hypothetical_cluster(("n1", "n2"), 8, "A100-SXM4-80GB", parse_network_option("HDR", None))
    work = catalog_workload("ResNet-50", "A100")
    one, two = (predict_step(cluster, work, Strategy(mode="async"), hosts=n, ranks_per_host=8) for n in (1, 2))
    assert one.efficiency < two.efficiency
    assert any("mode async on one host: each of 8 ranks" in note for note in one.notes)
    assert not any("mode async" in note for note in two.notes)
    assert one.cap is None and one.losses[0].what.startswith("the one parameter server: ")


def test_parameter_servers_that_are_slower_than_the_network_are_named():
    work, strategy = catalog_workload("ResNet-50", "A100"), Strategy(mode="async")

    def on(network):
        return hypothetical_cluster(("n1", "n2"), 4, "A100-SXM4-80GB", parse_network_option(network, None))

    fast, slow = (predict_step(on(name), work, strategy, hosts=2, ranks_per_host=4) for name in ("4 x HDR", "10GbE"))
    assert fast.cap is None and fast.losses[0].what.startswith("the parameter servers: ")
    assert slow.cap is not None and "10GbE" in slow.cap.link
    assert predict_step(on("4 x NDR"), work, strategy, hosts=2, ranks_per_host=4).efficiency == fast.efficiency
    limit = predict_limit(on("10GbE"), work, strategy, hosts=2, ranks_per_host=4)
    assert [one.what.partition(":")[0] for one in limit.losses][:1] == ["the parameter servers"]
    dedicated = [
        predict_step(on("4 x HDR"), work, Strategy(mode="async", servers=n), hosts=2, ranks_per_host=4) for n in (1, 4)
    ]
    assert dedicated[0].efficiency < dedicated[1].efficiency
