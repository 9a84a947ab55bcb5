"""`distrib-topo plan` from the command line, and the forecast of `distrib-launch` before a job starts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from datetime import datetime, timezone
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from distrib.bandwidth_model.workload import Gradient, read_workload, write_workload
from distrib.bandwidth_model.workload_catalog import catalog_workload
from distrib.cluster.topology import age_notes, parse_topology
from distrib_launch.cli import launch, topo
from tests.conftest import LAUNCH, ROOT, SCRIPTS, TOPO, call

EXAMPLES = ROOT / "hostfiles"
LAB = EXAMPLES / "four-hosts-10gbe.txt"


def plan(*words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return call(topo.main, "plan", *words, cwd=cwd, COLUMNS="100")


def planned(*words: object) -> dict:
    done = plan(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.processes
def test_a_table_says_how_far_it_scales_and_what_caps_it():
    words = [TOPO, "plan", "--workload", "bert-large", "-H", LAB, "--nodes", "1..9"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env={**os.environ, "COLUMNS": "100"})
    assert done.returncode == 0 and not done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "BERT-large on RTX-A6000: 2 ranks a host, 8 samples of 512 tokens a rank"
    head = next(number for number, line in enumerate(lines) if line.startswith("hosts  ranks"))
    rows = lines[head + 1 : head + 6]
    assert [line.split()[:2] for line in rows] == [["1", "2"], ["2", "4"], ["4", "8"], ["8", "16"], ["9", "18"]]
    assert "node1-node2, 10 GbE, 9.1 Gb/s" in rows[1]
    assert max(map(len, lines)) <= 100
    assert "it fits" in done.stdout and "expected errors: " in done.stdout
    assert " scaled from " in " ".join(done.stdout.split())  # the A6000's time is scaled from another GPU
    assert "extrapolated" in done.stdout and "not measured" in done.stdout
    lossy = done.stdout[done.stdout.index("effect on convergence") :]
    assert "--mode local --inner-steps 100" in lossy and "averaged every 100 steps" in lossy
    assert "relative to one rank alone; relative to one host, 9 hosts reach " in " ".join(done.stdout.split())


def test_slower_settings_are_not_recommended():
    out = plan("--workload", "ResNet-50", "--gpu", "A100", "--network", "25GbE", "--nodes", "16").stdout
    speeds = re.findall(r"^--\S.*?  +x ([\d.]+) ", out, re.MULTILINE)
    assert len(speeds) > 2 and "--mode async" not in out
    assert min(map(float, speeds)) > 1


MIXED = EXAMPLES / "mixed-gpus.txt"


@pytest.mark.parametrize(
    ("words", "hosts", "ranks"),
    [
        (["-H", MIXED], [1, 2, 4, 6], [4, 8, 12, 16]),
        (["-H", MIXED, "--ranks-per-node", 2], [1, 2, 4, 6], [2, 4, 8, 12]),
        (["-H", MIXED, "--nodes", "6,12"], [6, 12], [16, 32]),  # no more ranks beyond the last host
        (["--topology", MIXED.with_suffix(".yaml")], [1, 2, 4, 6], [4, 8, 12, 16]),  # the file server has no rank
        (["-H", MIXED, "--exclude", "new2@old[2-4]"], [1, 2], [4, 6]),
        (["-H", MIXED, "--include", "new1:0,3@new2:1"], [1, 2], [2, 3]),
        (["-H", "a:8,b:4,c:4", "--gpu", "V100", "--network", "HDR"], [1, 2, 3], [8, 12, 16]),
    ],
)
def test_ranks_are_those_that_a_launch_would_start(words, hosts, ranks):
    told = planned("--workload", "ResNet-50", *words)["predictions"]
    assert [(each["hosts"], each["ranks"]) for each in told] == list(zip(hosts, ranks, strict=True))
    for each in told:
        rate = each["efficiency"] * each["ranks"] * 64 / each["compute_seconds"]
        assert each["samples_per_second"] == pytest.approx(rate)


def test_a_network_of_the_catalogue_runs_on_the_gpus_that_were_chosen():
    for words in (
        ["-H", MIXED, "--gpu-type", "v100"],
        ["--topology", MIXED.with_suffix(".yaml"), "--include", "old[1-4]"],
    ):
        told = planned("--workload", "ResNet-50", *words)
        assert (told["workload"]["device"], told["predictions"][-1]["ranks"]) == ("V100-PCIe-16GB", 8)
    done = plan("--workload", "ResNet-50", "--gpu", "A100", "--network", "HDR", "--gpu-type", "A100")
    assert done.returncode == 2 and "no hosts to choose from" in done.stderr


@pytest.mark.parametrize(
    ("when", "says"),
    [
        (
            "2026-01-01T00:00:00Z",
            "the links were measured 328 days ago, 2026-01-01; distrib-topo probe -o t.yaml",
        ),
        ("2026-01-01", "the links were measured 328 days ago"),
        ("2026-11-20T10:00:00+02:00", ""),
        ("last tuesday", "t.yaml: `measured.when` is 'last tuesday'"),
    ],
)
def test_what_was_measured_long_ago_is_told_to_be_so(when, says):
    topology = parse_topology(
        f'nodes: [{{hosts: n1}}]\nmeasured: {{when: "{when}", software: {{}}, hosts: [n1]}}\n', "t.yaml"
    )
    told = age_notes(topology, datetime(2026, 11, 25, tzinfo=timezone.utc))
    assert bool(told) == bool(says) and all(note.startswith(says) for note in told)


def test_what_the_network_must_carry_is_not_compared_with_a_link_inside_a_host():
    done = plan("--workload", "GPT-2", "-H", EXAMPLES / "h100-ndr.txt")
    assert re.search(
        r"^90% efficiency on 8 hosts needs [\d.]+ [GT]b/s a host over 8 ports of InfiniBand \(reached\)$",
        done.stdout,
        re.M,
    ), done.stdout
    assert "NVLink4" in done.stdout  # NVLink is the bottleneck


def test_hosts_keep_the_names_that_they_were_given(tmp_path):
    words = ["--workload", "BERT-large", "--gpu", "V100", "--network", "10GbE", "-H"]
    assert planned(*words, "alpha:8,beta:8")["predictions"][-1]["cap"]["link"] == "alpha-beta, 10GbE"
    (tmp_path / "hosts.txt").write_text("\n".join(f"gpu{n} slots=8" for n in range(100)))
    told = planned(*words, tmp_path / "hosts.txt")
    assert told["predictions"][-1]["hosts"] == 100 and not any("extrapolated" in note for note in told["notes"])


def test_what_holds_a_job_back_that_no_network_would_help_is_said():
    done = plan("--workload", "ResNet-50", "-H", MIXED)
    assert "90% efficiency on 6 hosts is out of reach: the fastest network brings " in done.stdout
    assert "limited by slower GPUs\n" in done.stdout and "not the wire" not in done.stdout


def test_json_has_all_of_it_and_the_numbers_agree():
    told = planned("--workload", "ResNet-50", "--gpu", "V100", "--network", "100GbE", "--nodes", "1,2,16")
    assert [p["hosts"] for p in told["predictions"]] == [1, 2, 16]
    assert told["ranks_per_node"] == 8 and told["workload"]["gradient_bytes"] == 102_228_128
    last = told["predictions"][-1]
    assert last["efficiency"] == pytest.approx(last["compute_seconds"] / last["step_seconds"], rel=1e-6)
    assert last["samples_per_second"] == pytest.approx(16 * 8 * 64 / last["step_seconds"], rel=1e-6)
    assert last["cap"]["link"] == "node1-node2, 100GbE"
    assert {advice["exact"] for advice in told["advice"]} == {True, False}


def test_what_if():
    base = planned("--workload", "vgg16", "--gpu", "A100", "--network", "25GbE", "--nodes", "8")
    for words in (["--network", "HDR"], ["--network", "8 x RoCE 25Gb/s"], ["--batch", "256"]):
        changed = planned("--workload", "vgg16", "--gpu", "A100", "--network", "25GbE", "--nodes", "8", *words)
        assert changed["predictions"][0]["efficiency"] > base["predictions"][0]["efficiency"], words
    dgx = ["--workload", "vgg16", "-H", EXAMPLES / "dgx1-v100-edr.txt", "--nodes", "2"]
    on, off = planned(*dgx), planned(*dgx, "--gpudirect", "off")
    assert off["predictions"][0]["step_seconds"] > on["predictions"][0]["step_seconds"]
    assert planned(*dgx, "--gpu", "H100")["workload"]["device"] == "H100-SXM5-80GB"


@pytest.fixture
def measured_hosts(tmp_path):
    """Return a topology file of two CPU hosts whose 1 GbE was measured at half rate, and a profile for it."""
    pairs = [
        {"source": a, "target": b, "way": "tcp", "load": "alone", "bandwidth_bytes_per_second": 60e6, "variation": 0.01}
        for a, b in (("n1", "n2"), ("n2", "n1"))
    ]
    told = {
        "nodes": [{"hosts": "n[1-2]", "nics": [{"name": "eth0", "rate": "1 GbE"}]}],
        "measured": {"when": "2026-01-01T00:00:00Z", "software": {}, "hosts": ["n1", "n2"], "pairs": pairs},
    }
    (tmp_path / "t.yaml").write_text(json.dumps(told))
    write_workload(
        tmp_path / "p.json", msgspec.structs.replace(catalog_workload("ViT-B", "V100"), origin="measured", device="cpu")
    )
    return ["--topology", tmp_path / "t.yaml", "--workload", tmp_path / "p.json"]


def test_of_several_ethernet_cards_a_job_uses_one():
    one, eight = (
        planned("--workload", "vgg16", "--gpu", "A100", "--network", cards, "--nodes", "8")["predictions"][0]
        for cards in ("25GbE", "8 x 25GbE")
    )
    assert eight["efficiency"] == one["efficiency"]
    assert eight["cap"]["link"].endswith("one of 8 x 25GbE")


def test_another_network_is_as_oversubscribed_as_the_one_there_is(tmp_path):
    text = "nodes:\n  - {hosts: 'n[1-8]', gpus: {kind: A100, count: 1}, nics: [{name: ib0, rate: EDR}]}\nswitches:\n"
    text += "  - {name: a, hosts: 'n[1-4]', uplink: 25Gb/s}\n  - {name: b, hosts: 'n[5-8]', oversubscription: 16:1}\n"
    (tmp_path / "racks.yaml").write_text(text)
    racks = ("--topology", tmp_path / "racks.yaml", "--workload", "vgg16", "--nodes", "8")
    own, same, other = (
        planned(*racks, *words)["predictions"][0] for words in ([], ["--network", "EDR"], ["--network", "NDR"])
    )
    assert "uplink of" in own["cap"]["link"] and "uplink of" in other["cap"]["link"]
    assert same["step_seconds"] == pytest.approx(own["step_seconds"])
    needs = [each["cap"]["bandwidth_bytes_per_second"] for each in (same, other)]
    assert needs[1] == pytest.approx(4 * needs[0], rel=0.05)


def test_one_host_that_its_own_links_hold_is_not_said_to_need_nothing():
    said = plan("--workload", "vgg16", "--gpu", "T4", "--network", "HDR", "--nodes", "1", "--efficiency", "99%").stdout
    assert (
        "99% efficiency on 1 host: no network between hosts is needed, but it reaches " in said
        and "limited by " in said
    )


def test_gpudirect_leaves_alone_what_it_is_not_about(measured_hosts):
    before = planned(*measured_hosts)
    assert before["predictions"][-1]["cap"]["bandwidth_bytes_per_second"] == 60e6
    assert planned(*measured_hosts, "--gpudirect", "off") == before
    done = plan(*measured_hosts, "--gpudirect", "on")
    assert done.returncode == 2 and "InfiniBand or RoCE NIC" in done.stderr


def test_ranks_of_a_cpu_host_share_its_processors(measured_hosts, tmp_path):
    work = read_workload(tmp_path / "p.json")
    write_workload(tmp_path / "p.json", msgspec.structs.replace(work, processors=4, processor_share=1.0))
    before = planned(*measured_hosts, "--ranks-per-node", 4)["predictions"][0]  # the number of ranks is unknown
    described = (tmp_path / "t.yaml").read_text().replace('"nics"', '"cores": 8, "nics"')
    (tmp_path / "t.yaml").write_text(described)
    for ranks, times in ((2, 1), (4, 2), (8, 4)):
        told = planned(*measured_hosts, "--ranks-per-node", ranks)["predictions"][0]
        assert told["compute_seconds"] == pytest.approx(times * before["compute_seconds"])
        said = [note for note in told["notes"] if note.startswith("profiled with 4 CPUs, each rank has ")]
        assert len(said) == (times > 1)
    script = tmp_path / "train.py"
    script.write_text("")
    words = ["-np", "2", "-x", "OMP_NUM_THREADS=1", "--workload", tmp_path / "p.json", "--dry-run", "--json", script]
    done = call(launch.main, *words)
    (note,) = [note for note in json.loads(done.stdout)["notes"] if "profiled" in note]
    assert note == "profiled with 4 CPUs, each rank has 1: a step alone takes 4 times as long"


def test_the_bandwidth_that_is_needed_is_enough():
    words = ["--workload", "ResNet-50", "--gpu", "V100", "--nodes", "8", "--network"]
    needed = planned(*words, "10GbE", "--efficiency", "80%")["needed_bytes_per_second"]
    assert 1.14e9 < needed < 12.5e9
    # One NIC slightly above and one below the expected rate; the catalogue expects 92 % of such a RoCE rate.
    for factor, enough in ((1.02, True), (0.9, False)):
        rate = f"RoCE {needed * 8 / 0.92 * factor / 1e9:.2f}Gb/s"
        assert (planned(*words, rate)["predictions"][0]["efficiency"] >= 0.8) is enough, rate


def test_no_compared_network_exceeds_the_fastest():
    words = [
        "--workload",
        "BERT-large",
        "--gpu",
        "A100",
        "--nodes",
        "64",
        "--compare",
        "8 x NDR",
        "--network",
        "100GbE",
    ]
    told = planned(*words)
    (compared,) = told["compared"]
    assert told["needed_network"]["network"] == "8 ports of InfiniBand"
    assert told["predictions"][0]["efficiency"] < 0.2 and compared["predictions"][0]["efficiency"] > 0.9
    told = planned(*words, "--efficiency", "95%")
    assert 0.9 < compared["predictions"][0]["efficiency"] <= told["limit"]["efficiency"] < 0.95


def test_networks_are_ranked_by_cost_per_sample_with_the_hosts():
    words = ["--workload", "ResNet-50", "--gpu", "V100", "--nodes", "2,8", "--compare", "10GbE=200,HDR=1500"]
    # The slow network costs a seventh of the fast one, and the GPUs ten times as much as both.
    compared = planned(*words, "--gpu-hour", "2.5")["compared"]
    assert [each["network"] for each in compared] == ["HDR", "10GbE"]
    for each in compared:
        last, rate = each["estimates"][-1], each["predictions"][-1]["samples_per_second"]
        per_hour = 64 * 2.5 + 8 * each["network_price"]["amount"] / (4 * 8760)
        assert last["cost_per_million_samples"]["value"] == pytest.approx(per_hour / 3600 / rate * 1e6)
    said = plan(*words, "--gpu-hour", "2.5").stdout
    assert "cheapest first" in said and "4 years" in said and "network 10GbE (the first of --compare)" in said
    # Prices of purchases and of hours give the same ranking.
    hosts = planned(*words, "--host-price", "250000")["compared"]
    assert [each["network"] for each in hosts] == ["HDR", "10GbE"]
    hourly = planned(
        "--workload",
        "ResNet-50",
        "--gpu",
        "V100",
        "--nodes",
        "8",
        "--compare",
        "10GbE=2/h,HDR=900/h",
        "--host-price",
        "1/h",
    )
    assert [each["network"] for each in hourly["compared"]] == ["10GbE", "HDR"]


def test_networks_without_the_price_of_hosts_are_not_ranked():
    words = ["--workload", "ResNet-50", "--gpu", "V100", "--nodes", "8", "--compare", "HDR=1500,10GbE=200"]
    assert [each["network"] for each in planned(*words)["compared"]] == ["HDR", "10GbE"]
    assert "add --gpu-hour or --host-price" in plan(*words).stdout


def test_time_and_cost_of_a_training():
    words = [
        "--workload",
        "BERT-large",
        "--gpu",
        "A100",
        "--network",
        "HDR",
        "--nodes",
        "4",
        "--tokens",
        "300B",
        "--gpu-hour",
        "2",
    ]
    (answer,) = planned(*words)["estimates"]
    assert answer["tokens_per_second"]["value"] == pytest.approx(512 * answer["samples_per_second"]["value"])
    assert answer["training_seconds"]["value"] == pytest.approx(300e9 / answer["tokens_per_second"]["value"])
    assert answer["gpu_hours"]["value"] == pytest.approx(32 * answer["training_seconds"]["value"] / 3600)
    assert answer["total_cost"]["value"] == pytest.approx(2 * answer["gpu_hours"]["value"])
    assert 0.1 < answer["model_flop_utilization"]["value"] < 0.5
    said = plan(*words).stdout
    assert "tokens/s" in said and "MFU" in said and "GPU-hours" in said and "per million tokens" in said
    assert len(said.splitlines()) <= 26


def test_samples_are_counted_where_they_are_no_sequences():
    words = ["--workload", "ResNet-50", "--gpu", "A100", "--network", "HDR", "--nodes", "4"]
    assert planned(*words)["estimates"][0]["tokens_per_second"] is None
    done = plan(*words, "--tokens", "1B")
    assert done.returncode == 2 and "no known number of tokens; give --samples" in done.stderr
    assert "90M samples on 4 hosts: " in plan(*words, "--samples", "90M").stdout


@pytest.mark.parametrize(
    ("network", "says"),
    [
        ("HDR", "network HDR: 1 NIC a host, RDMA, GPUDirect RDMA assumed on"),
        ("8 x NDR", "network 8 x NDR: 8 NICs a host"),
        ("EFA v2", "network EFA v2: 32 NICs a host, RDMA"),
        ("4 x Slingshot", "network 4 x Slingshot: 4 NICs a host, RDMA"),
        ("100GbE", "network 100GbE: 1 NIC a host, of which TCP carries 42 Gb/s; for RDMA write such as 'RoCE 100Gb/s'"),
    ],
)
def test_assumptions_about_the_network_are_stated(network, says):
    words = ["--workload", "ResNet-50", "--gpu", "A100", "--nodes", "4", "--network", network]
    assert says in plan(*words).stdout


def test_a_rack_of_72_gpus_is_planned_as_one_host():
    words = ["--workload", "BERT-large", "--gpu", "GB200 NVL72", "--network", "8 x NDR", "--nodes", "2"]
    assert "a host is a rack of 72 GPUs" in plan(*words).stdout
    assert planned(*words)["estimates"][0]["ranks"] == 144


def test_the_table_shows_the_described_network_beside_compared_ones():
    said = plan("--workload", "ResNet-50", "-H", LAB, "--compare", "HDR,NDR").stdout
    assert "network 10 GbE of " in said and "none of --compare: 1 NIC a host, of which TCP" in " ".join(said.split())


def test_4096_ranks_of_a_host_are_planned():
    for gpu in ("A100", "L4"):
        words = ["--workload", "ResNet-50", "--gpu", gpu, "--network", "HDR", "--nodes", "4", "--ranks-per-node", 4096]
        assert planned(*words)["estimates"][0]["ranks"] == 16384


def test_pictures(tmp_path):
    done = plan(
        "--workload", "BERT-large", "--gpu", "V100", "--network", "25GbE", "--nodes", "1..4", "--plot", "scaling.svg", "--plot",
        "timeline.svg",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    texts = {}
    for name in ("scaling", "timeline"):
        root = ElementTree.parse(tmp_path / f"{name}.svg").getroot()
        texts[name] = [node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"25GbE", "ranks", "100%", "efficiency relative to one rank"} <= set(texts["scaling"])
    assert {"8", "16", "32"} <= set(texts["scaling"])
    assert {"compute", "network"} <= set(texts["timeline"])
    pale = [
        node for node in root.iter("{http://www.w3.org/2000/svg}text") if node.text in ("backward", "wait for the wire")
    ]
    assert pale and not any("fill: #ffffff" in node.get("style") for node in pale)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--workload", "ResNet-5", "--gpu", "V100"], "did you mean ResNet-50"),
        (["--workload", "ResNet-50", "--nodes", "2"], "the GPU is unknown"),
        (["--workload", "ResNet-50", "--gpu", "T4", "--nodes", "2"], "the network is unknown"),
        (["--workload", "ResNet-50", "--gpu", "W100", "--network", "HDR"], "--gpu W100: not in the catalogue"),
        (["--workload", "ResNet-50", "--gpu", "V100", "--network", "HDX"], "--network HDX: "),
        (["--workload", "ResNet-50", "--gpu", "V100", "--network", "FOO"], "known are FDR, EDR, HDR100, "),
        (["--workload", "ResNet-50", "--gpu", "V100", "--network", "efa"], "did you mean EFA v1, EFA v2, EFA v3, EFA v4?"),
        (["--workload", "llama", "--gpu", "V100"], "did you mean Llama-3-8B, Llama-3-70B"),
        (["--workload", "ResNet-50", "--gpu", "V100", "--gpu-hour", "2.5$"], "'2.5$' is not a price above 0; write such as 2.5"),
        (["--workload", "ResNet-50", "--gpu", "V100", "--network", "8 x NDR SHARP"], "(SHARP) are not modelled"),
        (["--workload", "ResNet-50", "--gpu", "V100", "--network", "65 x HDR"], "65 NICs of a host, expected 1 to 64"),
        (["--workload", "ResNet-50", "--gpu", "V100", "--network", "HDR", "--gpu-hour", "0"], "--gpu-hour: '0' is not a price"),
        (["--workload", "ResNet-50", "--gpu", "V100", "--network", "HDR", "--samples", "0"], "not a number above 0"),
        (["--workload", "ResNet-50", "--gpu", "V100", "--compare", "HDR=nan"], "nan is not a price"),
        (["--workload", "ResNet-50", "--gpu", "V100", "--compare", "HDR=$900"], "$900 is not a price"),
        (["--workload", "ResNet-50", "--gpu", "V100", "--compare", "HDR=1,000"], "write prices without any: HDR=1000"),
        (["--workload", "ResNet-50", "--gpu", "V100", "--compare", ","], "--compare ,: no network; write such as 100GbE,HDR"),
        (["--workload", "ResNet-50", "--gpu", "V100", "--network", "HDR=5"], "--network HDR=5: a price belongs to --compare"),
        (["--workload", "ResNet-50", "--gpu", "V100", "--network", ""], "--network: it is empty"),
        (["--workload", "ResNet-50", "--gpu", "", "--network", "HDR"], "--gpu: it is empty"),
        (["--workload", "ResNet-50", "--gpu", "V100", "--network", "100"], "'100' is ambiguous; write such as 25GbE"),
        (["--workload", "ResNet-50", "--gpu", "V100", "--network", "100Gb/s"], "is ambiguous; write such as 25GbE"),
        (["--workload", "ResNet-50", "--gpu", "V100", "--network", "RoCE"], "--network RoCE: the rate is missing; write"),
        (["--workload", "ResNet-50", "--gpu", "V100", "--network", "10GbE", "--gpudirect", "on"], "needs InfiniBand or RoCE"),
        (["--workload", "ResNet-50", "--gpu", "V100", "--network", "HDR", "--ranks-per-node", "1000000"], "expected 4096 at most"),
        (["--workload", "ResNet-50", "--gpu", "V100", "--network", "HDR", "-H", "a:5000"], "a:5000: 5000 ranks on a host"),
        (["--workload", "none.json"], "cannot read none.json: No such file"),
        (["--workload", "ResNet-50", "--gpu", "V100", "--network", "HDR", "--plot", "x.bmp"], "unsupported file type"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(tmp_path, words, says):
    done = plan(*words, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and says in done.stderr, done.stderr
    assert done.stderr.startswith("distrib-topo: error: ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--batch", "1000000000"],
            "--batch: '1000000000' is not a valid number of samples; give 1 or more, of at",
        ),
        (["--efficiency", "0"], "--efficiency: '0' needs no network; give more than 0%"),
        (
            ["--nodes", "64..1"],
            "--nodes: '64..1' is not a valid number of hosts; write such as 16, 1..64 or 1,2,4",
        ),
        (["--nodes", "1..999999999"], "--nodes: '1..999999999' is more than 50,000 hosts"),
        (["-H", "a:2", "-H", "b:2"], "-H is given twice, a:2 and b:2; name all hosts in one list or file: a:2,b:2"),
    ],
)
def test_options_that_cannot_be_are_named_in_one_line(words, says):
    done = plan("--workload", "ResNet-50", "--gpu", "V100", "--network", "HDR", *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith(f"distrib-topo: error: {says}"), done.stderr


@pytest.mark.parametrize(
    ("said", "same"),
    [
        ("InfiniBand 200Gb/s", "HDR"),
        ("Ethernet 100Gb/s", "100GbE"),
        ("RoCE 100", "RoCE 100Gb/s"),
        ("100gbe", "100GbE"),
        ("2 x IB NDR", "2 x NDR"),
        ("2x400G InfiniBand", "2 x NDR"),
        ("100 Gb/s RoCE", "RoCE 100Gb/s"),
    ],
)
def test_networks_by_kind_and_rate(said, same):
    words = ["--workload", "BERT-large", "--gpu", "V100", "--nodes", "4", "--network"]
    one, other = (planned(*words, network)["predictions"][0]["step_seconds"] for network in (said, same))
    assert one == pytest.approx(other)


def test_a_cluster_without_nics_is_asked_for_a_network(tmp_path):
    (tmp_path / "t.yaml").write_text("nodes: [{hosts: 'a[1-2]', gpus: {kind: V100, count: 8}}]")
    words = ["--workload", "ResNet-50", "--topology", tmp_path / "t.yaml"]
    assert "t.yaml describes no network; describe the NICs there" in plan(*words).stderr
    assert [each["network"] for each in planned(*words, "--compare", "HDR,NDR")["compared"]] == ["HDR", "NDR"]


def test_the_efficiency_that_is_wanted_is_shown_as_it_was_given():
    words = ["--workload", "ResNet-50", "--gpu", "V100", "--network", "HDR", "--nodes", "2", "--efficiency", "99.99"]
    assert "99.99% efficiency on 2 hosts" in plan(*words).stdout


@pytest.mark.parametrize("nodes", ["0", "4..2", "x", "1..", "-1", "1e3"])
def test_counts_that_are_none(nodes):
    done = plan("--workload", "ResNet-50", "--gpu", "V100", "--network", "HDR", "--nodes", nodes)
    assert done.returncode == 2 and "is not a valid number of hosts" in done.stderr


def test_a_hundred_thousand_gpus_are_planned():
    for nodes, ranks in (("1..50000", 2), ("1..12500", 8)):
        begin = time.monotonic()
        told = planned(
            "--workload", "ResNet-50", "--gpu", "V100", "--network", "HDR", "--nodes", nodes, "--ranks-per-node", ranks
        )
        assert told["predictions"][-1]["hosts"] * ranks == 100_000
        assert not any("are known" in note for note in told["notes"])  # the command names no hosts
        assert time.monotonic() - begin < 30  # bounds a hang only; benchmarks measure the speed


# -- before a launch ----------------------------------------------------------------------------------------------


def dry(*words: object) -> subprocess.CompletedProcess[str]:
    return call(launch.main, "-H", LAB, *words, "--dry-run", SCRIPTS / "where.py")


def warning_in(text: str) -> str:
    """Return the only warning, with its indented lines."""
    (warning,) = re.findall(r"^warning: .*(?:\n  .*)*", text, re.MULTILINE)
    return warning


@pytest.mark.processes
def test_a_job_that_the_network_will_limit_is_warned_of():
    warning = warning_in(dry("--workload", "ResNet-50").stdout)
    assert "on 4 hosts x 2 ranks" in warning
    assert "link node1-node2, 10 GbE, 9.1 Gb/s; 90% needs " in warning and "\n  --gradients" in warning
    for quiet in (dry(), dry("--workload", "ResNet-50", "--warn-below", "0"), dry("--workload", "none")):
        assert quiet.returncode == 0 and "warning" not in quiet.stdout
    assert dry("--workload", "ResNet-50", "--warn-below", "x").returncode == 2
    assert "did you mean ResNet-50" in dry("--workload", "resnet5").stderr
    blind = [LAUNCH, "-H", "n1,n2", "--workload", "ResNet-50", "--dry-run", SCRIPTS / "where.py"]
    said = subprocess.run(blind, capture_output=True, text=True, timeout=200).stderr
    assert (
        "the GPU is unknown; describe the hosts' GPUs in a topology file (--topology), or profile" in said
        and "--gpu" not in said
    )


def test_hosts_that_would_be_faster_without_the_others_are_named():
    """A host is faster alone than with 10 GbE. The mixed cluster's A100s wait for 25 GbE and older GPUs."""
    warning = warning_in(dry("--workload", "BERT-large").stdout)
    assert re.search(r"\n  --include node1: [0-9.]+ samples/s instead of [0-9.]+", warning)
    mixed = " ".join(plan("--workload", "BERT-large", "-H", ROOT / "hostfiles/mixed-gpus.txt").stdout.split())
    assert re.search(
        r"2 of the hosts \(new1, new2\) would be faster, [\d.]+k tokens/s .*: distrib-launch --include new\[1-2\]",
        mixed,
    )
    for network, faster in (("HDR", False), ("1GbE", True)):
        found = planned("--workload", "ResNet-50", "--gpu", "A100", "--nodes", "8", "--network", network)
        assert (found["fewer"] is not None) == faster
        if faster:
            assert found["fewer"]["prediction"]["samples_per_second"] > found["predictions"][-1]["samples_per_second"]


def test_what_else_is_known_comes_with_the_warning():
    said = dry("--workload", "ResNet-50").stdout
    assert "node1-node2, 10 GbE" in said and "not measured: rates from the catalogue" in said
    assert "not measured" not in dry("--workload", "ResNet-50", "--warn-below", "0").stdout
    small = (launch.main, "-H", ROOT / "hostfiles/mixed-gpus.txt", "--workload", "GPT-2-XL", "--dry-run")
    assert "may need more memory than" in call(*small, SCRIPTS / "where.py").stdout


def cpu_profile(tmp_path: Path, variation: float = 0.0) -> Path:
    """Return the profile of a step of 0.3 s on one CPU, with 20 MB of gradients."""
    gradients = tuple(
        Gradient(name=f"w{n}", elements=250_000, size_bytes=1_000_000, ready_seconds=0.01 * (n + 1)) for n in range(20)
    )
    found = msgspec.structs.replace(
        catalog_workload("VGG-16", "RTX A6000"), origin="measured", device="cpu", gradients=gradients, forward_seconds=0.1,
        backward_seconds=0.2, processors=1, processor_share=1.0, variation=variation,
    )  # fmt: skip
    write_workload(tmp_path / "cpu.profile.json", found)
    return tmp_path / "cpu.profile.json"


def test_parameter_servers_are_no_ranks_of_what_is_predicted(tmp_path):
    topology = tmp_path / "two.yaml"
    topology.write_text("nodes:\n  - {hosts: 'n[1-3]', cores: 2, nics: [{name: eth0, rate: 1 GbE}]}\n")

    def predicted(hosts: str, *words: str) -> dict:
        about = ["--topology", topology, "--workload", cpu_profile(tmp_path), "--warn-below", "100%"]
        done = call(launch.main, "-H", hosts, *about, *words, "--dry-run", "--json", SCRIPTS / "where.py")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["forecast"]

    beside = predicted("n1:2,n2:2", "--mode", "async")
    assert (beside["predicted"]["hosts"], beside["predicted"]["ranks"]) == (2, 4)
    assert "2 hosts x 2 ranks" in beside["warning"]
    as_many = predicted("n1:2,n2:2", "--mode", "async", "--servers", "2")
    assert as_many["predicted"]["step_seconds"] == beside["predicted"]["step_seconds"]
    hostfile = tmp_path / "apart.txt"
    hostfile.write_text("n1 slots=2\nn2 slots=2\nn3 role=server\n")
    apart = predicted(str(hostfile), "--mode", "async")
    assert (apart["predicted"]["hosts"], apart["predicted"]["ranks"]) == (2, 4)
    # One server takes both hosts' gradients: twice the traffic of one server per host.
    assert apart["predicted"]["communication_seconds"] == pytest.approx(
        2 * beside["predicted"]["communication_seconds"], rel=0.1
    )
    # The server stays on its host for any number of hosts, and the command has no --servers.
    assert "--include" not in apart["warning"] and "--servers" not in apart["warning"]
    local = predicted("n1:2,n2:2", "--mode", "local")
    assert "averaged every 500 steps" in local["warning"]


def test_the_warning_names_what_costs_most(tmp_path):
    topology = tmp_path / "fast.yaml"
    topology.write_text("nodes:\n  - {hosts: 'n[1-4]', cores: 1, nics: [{name: eth0, rate: 10 GbE}]}\n")
    words = ["-H", "n1,n2,n3,n4", "--topology", topology, "--workload", cpu_profile(tmp_path, variation=0.5)]
    done = call(launch.main, *words, "--dry-run", SCRIPTS / "where.py")
    assert "the slowest of 4 ranks, whose steps vary by 50.0%" in warning_in(done.stdout)


def test_a_slow_loader_is_told_of(tmp_path):
    topology = tmp_path / "one.yaml"
    topology.write_text(
        "nodes:\n  - {hosts: 'n[1-2]', cores: 16, gpus: {kind: A100, count: 8}, nics: [{name: ib0, rate: HDR}]}\n"
    )
    found = msgspec.structs.replace(catalog_workload("ResNet-50", "A100"), origin="measured")
    starved = msgspec.structs.replace(found, loading_processor_seconds=4 * found.compute_seconds)
    write_workload(tmp_path / "starved.json", starved)
    write_workload(tmp_path / "waits.json", msgspec.structs.replace(found, loader_seconds=found.compute_seconds))
    for name in ("starved", "waits"):
        table = plan("--workload", tmp_path / f"{name}.json", "--topology", topology, "--nodes", "2").stdout
        (row,) = [line for line in table.splitlines() if line.split()[:2] == ["2", "16"]]
        assert "  loading data" in row
    words = ["-H", "n1,n2", "--topology", topology, "--dry-run", "--workload"]

    def said(name: str) -> str:
        return call(launch.main, *words, tmp_path / f"{name}.json", SCRIPTS / "where.py").stdout

    starving = "loading data: the ranks of a host share its CPUs"
    assert "efficiency 50%" in said("starved") and starving in said("starved")
    topology.write_text(topology.read_text().replace("HDR", "40GbE"))  # costs as much, but a faster link would not help
    assert f"{starving}; no network brings more than 50%" in said("starved")
    topology.write_text(topology.read_text().replace("40GbE", "HDR"))
    assert "warning" not in said("waits") and "each step alone waits 50% of its time for data" in said("waits")


def test_what_is_advised_comes_on_top_of_what_was_chosen():
    def advised(*words: str) -> str:
        return warning_in(dry("--workload", "VGG-16", "--warn-below", "99%", *words).stdout)

    assert "--accumulate" not in advised()
    assert "--accumulate 3" in advised("--accumulate", "3") and "--gradients" in advised("--accumulate", "3")
    shorter = advised("--gradients", "fp16")
    assert "--gradients" in shorter and "fp16" not in shorter and "--accumulate" not in shorter


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (("--mode", "local", "--inner-steps", "1"), "--inner-steps"),
        (("--mode", "async", "--staleness", "0", "--servers", "1"), "--servers --staleness"),
    ],
)
def test_options_that_the_advised_mode_refuses_are_named(words, refused):
    said = dry("--workload", "ResNet-50", *words).stdout
    assert f"--mode auto without {refused}: " in warning_in(said)
    assert dry("--workload", "ResNet-50", "--mode", "auto", *words[2:]).returncode == 2  # invalid there


def test_a_profile_beside_the_script_is_found(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    found = msgspec.structs.replace(catalog_workload("VGG-16", "RTX A6000"), origin="measured")
    words = ["-H", LAB, "--dry-run", script]
    write_workload(tmp_path / "train.profile.json", found)
    assert "on 4 hosts x 2 ranks, limited by " in call(launch.main, *words).stdout
    write_workload(tmp_path / "train.profile.json", msgspec.structs.replace(found, device="cpu"))
    said = call(launch.main, *words).stdout
    assert "no performance forecast: " in said and "is of cpu, the ranks run on GPUs" in said
    (tmp_path / "train.profile.json").write_text("{}")
    done = call(launch.main, *words)
    assert done.returncode == 0 and "note: no performance forecast: " in done.stdout
    assert "the default" not in done.stdout
    done = call(launch.main, "--mode", "auto", *words)
    assert done.returncode == 0 and "; mode auto uses the default\n" in done.stdout


def test_mode_auto_takes_the_best_exact_strategy_and_says_why(tmp_path):
    # 240 MB become ready evenly: the last bucket of 25 MiB would be sent after all computation.
    gradients = tuple(
        Gradient(name=f"layer{n}", elements=1_000_000, size_bytes=4_000_000, ready_seconds=0.5 * (n + 1) / 60)
        for n in range(60)
    )
    even = msgspec.structs.replace(
        catalog_workload("VGG-16", "RTX A6000"), gradients=gradients, forward_seconds=0.2, backward_seconds=0.5
    )
    write_workload(tmp_path / "even.json", even)
    chosen = json.loads(dry("--workload", tmp_path / "even.json", "--mode", "auto", "--json").stdout)
    assert 1 << 20 <= chosen["strategy"]["bucket_bytes"] < 25 << 20 and chosen["mode"] == "sync"
    (note,) = [note for note in chosen["notes"] if note.startswith("mode auto: ")]
    assert "--bucket" in note and "instead of" in note and "identical arithmetic" in note
    told = json.loads(chosen["ranks"][0]["environment"]["DISTRIB_STRATEGY"])
    assert told["bucket_bytes"] == chosen["strategy"]["bucket_bytes"]
    assert told.get("gradients", {}).get("format", "fp32") == "fp32"
    blind = json.loads(dry("--mode", "auto", "--json").stdout)
    assert "bucket_bytes" not in blind["strategy"]
    assert any("needs to know the workload" in note for note in blind["notes"])


def test_on_gpus_the_hierarchy_is_left_to_nccl():
    chosen = json.loads(dry("--workload", "VGG-16", "--mode", "auto", "--json").stdout)
    assert "all_reduce" not in chosen["strategy"]
    assert "hierarchical" not in plan("--topology", LAB.with_suffix(".yaml"), "--workload", "VGG-16").stdout


def test_what_the_user_chose_himself_stays():
    chosen = json.loads(dry("--workload", "VGG-16", "--mode", "auto", "--all-reduce", "flat", "--json").stdout)
    assert chosen["strategy"]["all_reduce"] == "flat"


def test_who_asked_for_json_gets_it_of_a_mistake_too():
    done = plan("--workload", "nosuch", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["status"], told["exit_code"]) == (2, "failed", 2)
    assert done.stderr == f"distrib-topo: error: {told['error']}\n"


def test_a_sharded_transformer_on_a_thousand_gpus():
    done = plan("--workload", "llama-3-70b", "--gpu", "H100", "--nodes", "128", "--shard", "auto")
    out = " ".join(done.stdout.split())
    assert done.returncode == 0 and "tokens/s" in out and "it fits" in out, done.stderr
    assert "--shard auto: all (FSDP" in out and "none, grads and host do not fit" in out
    assert "its shard of the optimizer" in out  # efficiency is relative to the step in this line
    assert "network 8 x NDR: " in out and "no --network: " in out
    told = planned("--workload", "llama-3-70b", "--gpu", "H100", "--nodes", "16,128", "--shard", "auto")
    assert [each["strategy"]["shard"] for each in told["predictions"]] == ["all", "all"]
    last = told["predictions"][-1]
    assert last["tokens_per_second"] == pytest.approx(8192 * last["samples_per_second"])
    assert told["memory"]["gathered_bytes"] > 0 and told["memory"]["peak_bytes"] < 80e9


def test_a_hundred_thousand_gpus():
    told = planned("--workload", "llama-3-8b", "--gpu", "H100", "--nodes", "12500", "--shard", "host")
    assert told["predictions"][0]["ranks"] == 100_000


def test_a_transformer_by_its_size_and_a_measured_step():
    size = ["--params", "7B", "--layers", "32", "--hidden", "4096", "--seq", "4096"]
    told = planned(*size, "--batch", "2", "--gpu", "A100", "--nodes", "2", "--checkpointing", "full")
    assert told["workload"]["gradient_bytes"] == pytest.approx(28e9, rel=0.01) and told["workload"]["batch"] == 2
    step = ["--step", "97ms", "--backward", "0.6", "--gpu", "A100", "--nodes", "4", "--network", "25GbE"]
    whole, half = (planned(*step, "--gradients", each) for each in ("498MB", "498MB,bf16"))
    assert whole["workload"]["compute_seconds"] == pytest.approx(0.097)
    assert whole["workload"]["gradient_bytes"] == half["workload"]["gradient_bytes"] == 498_000_000
    assert half["predictions"][0]["step_seconds"] < whole["predictions"][0]["step_seconds"]


def test_advice_compares_with_the_chosen_options():
    words = ["--workload", "GPT-2", "--gpu", "A100", "--network", "100GbE", "--nodes", "2"]
    local = plan(*words, "--mode", "local").stdout
    assert "batches of 32 in the script" in local and "--mode local" not in local
    # bf16 alone is no change; the gain of others is relative to it.
    half = plan(*words, "--gradients", "bf16").stdout
    assert "--gradients bf16 --accumulate 16" in half and not re.search(r"^--gradients bf16 +x", half, re.MULTILINE)
    assert re.search(
        r"^--mode sync +x 1\.\d+  same as synchronous SGD$", plan(*words, "--mode", "async").stdout, re.MULTILINE
    )


def test_a_model_that_does_not_fit_is_named_before_its_speed():
    words = ["--workload", "qwen2.5-7b", "--gpu", "A100", "--network", "100GbE", "--nodes", "4"]
    out = plan(*words).stdout
    assert out.index("it does not fit") < out.index("--shard auto") < out.index("hosts  ranks")
    assert "faster on" not in out and "1 host alone would be faster" in out and "tokens/s instead of" in out
    assert "node1" not in out  # the user named no hosts
    sharded = plan(*words, "--shard", "auto").stdout
    assert sharded.index("--shard auto: ") < sharded.index("hosts  ranks") < sharded.index("it fits")


def test_options_of_a_launch_change_the_step():
    words = ["--workload", "ResNet-50", "--gpu", "A100", "--network", "25GbE", "--nodes", "4"]
    base = planned(*words)["predictions"][0]
    for more in (["--gradients", "bf16"], ["--accumulate", "4"], ["--mode", "local"], ["--bucket", "100MiB"]):
        told = planned(*words, *more)["predictions"][0]
        assert told["efficiency"] != base["efficiency"] and told["strategy"] != base["strategy"], more
    assert planned(*words, "--mode", "auto")["predictions"][0]["efficiency"] >= base["efficiency"]
    assert planned(*words, "--backend", "horovod")["predictions"][0]["strategy"]["backend"] == "horovod"
    exact = planned(*words, "--precision", "fp32")["predictions"][0]
    assert exact["compute_seconds"] > base["compute_seconds"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "no workload is given"),
        (["--params", "7B", "--gpu", "A100"], "--params without --layers, --hidden, --seq"),
        (["--workload", "GPT-2", "--params", "7B"], "--workload and --params contradict"),
        (["--workload", "GPT-2", "--step", "1s"], "--workload and --step contradict"),
        (["--params", "7X"], "'7X' is not a number"),
        (["--params", "7B", "--layers", "32", "--hidden", "4096", "--seq", "1024"], "the GPU is unknown"),
        (["--step", "5ms"], "--step 5 ms without --gradients"),
        (["--step", "0s", "--gradients", "1MB"], "not the time of a step"),
        (["--step", "5ms", "--gradients", "1MB", "--seq", "9"], "do not apply"),
        (["--step", "5ms", "--gradients", "1MB,2MB"], "one size and one format"),
        (["--workload", "GPT-2", "--gpu", "A100", "--gradients", "1MB"], "1MB without --step"),
        (["--workload", "GPT-2", "--gpu", "A100", "--backward", "0.5"], "--backward without --step"),
        (["--workload", "GPT-2", "--gpu", "A100", "--shard", "auto", "--bucket", "1MiB"], "--bucket does not apply"),
        (["--workload", "GPT-2", "--gpu", "A100", "--shard", "host", "--mode", "async"], "--shard does not apply"),
    ],
)  # fmt: skip
def test_descriptions_that_miss_or_contradict_something(words, says):
    done = plan(*words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and says in done.stderr, done.stderr
