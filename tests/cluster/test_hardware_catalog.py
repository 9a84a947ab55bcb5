"""Hardware catalogue: figures of GPUs and links, and the names they are found by."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrib.cluster.hardware_catalog import find_gpu, find_named_network, gpu_hint, hardware_catalog
from distrib.cluster.link_spec import parse_bus_link, parse_network_kind, parse_network_link, parse_uplink_rate
from distrib.errors import ConfigError


def test_every_figure_of_the_catalogue_has_a_source_and_is_plausible():
    known = hardware_catalog()
    for gpu in known.gpus:
        figures = [*gpu.tflops.values(), gpu.memory_bytes, gpu.memory_bandwidth_bytes_per_second]
        assert all(figure.source and figure.value > 0 for figure in figures), gpu.name
        for bus in (gpu.nvlink, gpu.pcie):
            assert bus is None or parse_bus_link(bus).rate_bytes_per_second > 0
        assert gpu.tflops["fp32"].value <= gpu.tflops.get("fp16", gpu.tflops["fp32"]).value
        assert find_gpu(gpu.name) == gpu
    for link in known.links:
        assert 0 < link.usable.value < 1 and link.rate_bytes_per_second.value > 0 and link.latency_seconds.value < 1e-4
        assert all(figure.source for figure in (link.usable, link.rate_bytes_per_second, link.latency_seconds))
    names = [name.lower() for gpu in known.gpus for name in (gpu.name, *gpu.names)]
    assert len({gpu.name for gpu in known.gpus}) == len(known.gpus)
    assert len(set(names)) >= len(names) - 4  # a name may differ from that of its GPU in case only


@pytest.mark.parametrize("text", ["a: [", "\udce9", "gpus: 1", "sources: {}\ngpus: []\nlinks: [{name: a, kind: roce, rate: [1Gb/s, x], usable: [1, x], latency: [1 us, x]}]"])  # fmt: skip
def test_a_damaged_catalogue_is_named(tmp_path, monkeypatch, text):
    path = tmp_path / "catalog.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    monkeypatch.setattr("distrib.cluster.hardware_catalog.PATH", path)
    with pytest.raises(ConfigError, match="is damaged"):
        hardware_catalog.__wrapped__()  # without its cache


@given(st.sampled_from(["ethernet", "roce"]), st.floats(0.5, 900), st.floats(1.0, 2.0))
def test_a_faster_port_never_carries_less(kind, gigabits, times):
    slower, faster = (parse_network_link(f"{rate:.6f}Gb/s", kind) for rate in (gigabits, gigabits * times))
    # A rate up to 1 % below a usual one counts as that one.
    assert slower.usable_bytes_per_second <= faster.usable_bytes_per_second * 1.011


GPU_NAMES = [
    ("A100", "A100-SXM4-80GB"),
    ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
    ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
    ("a100 40 gb", "A100-SXM4-40GB"),
    ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
    ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
    ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
    ("NVIDIA H200", "H200-SXM-141GB"),
    ("NVIDIA B200", "B200"),
    ("NVIDIA GB200", "GB200"),
    ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
    ("Tesla K80", "K80"),
    ("NVIDIA GeForce RTX 4090", "RTX-4090"),
    ("NVIDIA L4", "L4"),
    ("AMD Instinct MI300X", "MI300X"),
    ("mi355x", "MI355X"),
    ("A1000", None),
    ("L40", None),
    ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
    ("NVIDIA H100 NVL", "H100-NVL-94GB"),
    ("NVIDIA GeForce RTX 3090", "RTX-3090"),
    ("RTX 5090", "RTX-5090"),
    ("NVIDIA RTX A6000", "RTX-A6000"),
    ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
    ("NVIDIA H20", "H20-SXM5-96GB"),
    ("NVIDIA H800", "H800-SXM5-80GB"),
    ("NVIDIA GH200 480GB", "GH200-96GB"),
    ("NVIDIA B300", "B300"),
    ("gb300 nvl72", "GB300-NVL72"),
    ("GB200", "GB200"),
    ("mi325x", "MI325X"),
    ("AMD Instinct MI350X", "MI350X"),
    ("Gaudi 3", "Gaudi3"),
    ("RTX 3090 Ti", None),
    ("", None),
]


def test_gpus_are_found_by_their_names_in_nvml_and_common_names():
    found = [(kind, find_gpu(kind)) for kind, _ in GPU_NAMES]
    assert [(kind, gpu.name if gpu else None) for kind, gpu in found] == GPU_NAMES


def test_well_known_figures_of_gpus_and_links():
    assert find_gpu("A100").tflops["bf16"].value == 312
    assert find_gpu("H100").nvlink == "NVLink4 x18"
    assert parse_bus_link("NVLink3 x12").rate_bytes_per_second == 300e9
    assert parse_bus_link("PCIe 3.0 x16").rate_bytes_per_second == pytest.approx(15.75e9, rel=1e-3)
    assert parse_bus_link("PCI Express 4.0 x16") == msgspec.structs.replace(
        parse_bus_link("PCIe4 x16"), text="PCI Express 4.0 x16"
    )
    assert (
        parse_bus_link("PCIe2 x16").rate_bytes_per_second
        == 2 * parse_bus_link("PCIe1 x16").rate_bytes_per_second
        == 8e9
    )
    assert parse_bus_link("PCIe Gen5 x8").rate_bytes_per_second == pytest.approx(31.5e9, rel=1e-3)
    for name, rate in [
        ("EDR", 12.5e9),
        ("hdr", 25e9),
        ("IB NDR", 50e9),
        ("HDR 100", 12.5e9),
        ("10 GbE", 1.25e9),
        ("XDR", 1e11),
    ]:
        assert parse_network_link(name).rate_bytes_per_second == rate
    assert parse_uplink_rate("4 x HDR") == parse_uplink_rate("800Gb/s") == 100e9
    assert "bf16" not in find_gpu("V100").tflops
    assert "A100-SXM4-80GB" in gpu_hint("A1000")


@pytest.mark.parametrize(
    ("name", "nics", "gigabits"),
    [
        ("EFA v2", 32, 3200), ("efa-v3", 16, 3200), ("gVNIC", 1, 100), ("TCPX", 4, 800), ("azure ndr", 8, 3200),
        ("Slingshot", 1, 200), ("omni-path 400", 1, 400), ("Spectrum-X", 1, 400),
    ],
)  # fmt: skip
def test_networks_are_known_by_name(name, nics, gigabits):
    known = find_named_network(name)
    rate = parse_network_link(known.rate, parse_network_kind(known.kind)).rate_bytes_per_second
    assert (known.nics, known.nics * rate) == (nics, gigabits * 1e9 / 8)
    assert known.source and find_named_network("EFA v9") is None


def test_a_rack_with_nvlink_between_its_hosts_is_one_host():
    assert find_gpu("GB200 NVL72").gpus_per_host == find_gpu("GB300 NVL72").gpus_per_host == 72
    assert find_gpu("H100").gpus_per_host == 8


@pytest.mark.parametrize("kind", ["80GB", "16 GB", "80GB HBM3", "RTX", "GeForce RTX", "PCIe", "Tesla", "NVIDIA SXM4"])
def test_words_common_to_many_gpu_names_find_no_gpu(kind):
    assert find_gpu(kind) is None
