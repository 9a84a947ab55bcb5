"""`distrib-topo show` from the command line: tree, JSON, picture, and errors for invalid files."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import distrib
from distrib.cluster.measurements import IntraNodeLinkMeasurement, LinkMeasurement, Measurements
from distrib.cluster.measurements_writer import write_measured
from distrib.cluster.topology import parse_topology, read_topology
from distrib.cluster.uplinks import uplink_rate
from distrib_launch.cli import topo
from tests.conftest import LAUNCH, ROOT, SCRIPTS, TOPO, call

EXAMPLES = ROOT / "hostfiles"


def show(*arguments: str | Path, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return call(topo.main, "show", *arguments, cwd=cwd, **environ)


def shown(*arguments: str | Path, cwd: Path | None = None) -> str:
    done = show(*arguments, cwd=cwd)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def as_json(*arguments: str | Path, cwd: Path | None = None) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(shown(*arguments, "--json", cwd=cwd))
    return loaded


def test_links_between_gpus_that_nobody_described_are_those_of_the_catalogue(tmp_path):
    (tmp_path / "t.yaml").write_text("nodes:\n  - {hosts: a1, gpus: {kind: A100, count: 4}, cores: 1}\n")
    text = shown("--topology", "t.yaml", cwd=tmp_path)
    assert "GPU to GPU: NVLink3 x12, 300 GB/s" in text
    assert "1 core" in text and "1 cores" not in text


def test_the_tree_of_a_dgx_pod():
    text = shown("-H", EXAMPLES / "dgx-a100-hdr.txt")
    for line in (
        "dgx[01-16], 16 hosts, 8 slots each",
        "8 x A100-SXM4-80GB, 80 GB at 2.04 TB/s, 312 TFLOPS bf16 dense",
        "GPU to GPU: NVLink3 x12 through NVSwitch, 300 GB/s, 276 GB/s usable, 600 ns",
        "NUMA node 3, CPUs 48-63, GPU 0-1",
        "mlx5_[0-1]: 2 x HDR InfiniBand, 200 Gb/s each, GPUDirect RDMA, near GPU 0-1, PCIe4 x16",
        "rack1: dgx[01-08], 2:1 oversubscribed",
        "2:1 oversubscribed: 760 Gb/s a host when all send",
        "ok   the NICs read GPU memory directly",
    ):
        assert line in text
    assert "\x1b" not in text


def test_the_tree_of_a_host_without_nvswitch_names_the_pairs():
    text = shown("-H", EXAMPLES / "dgx1-v100-edr.txt")
    assert "GPUs 0-3 0-4 1-2 1-5 2-3 4-7 5-6 6-7" in text.split("NVLink2 x2")[1].splitlines()[1]


def test_rules_that_are_not_kept_are_shown():
    assert "though they support PCIe4 x16" in shown("-H", EXAMPLES / "one-machine.txt")


def test_hosts_without_a_topology_are_listed():
    text = shown("-H", "n[1-3]:2,x")
    assert "n[1-3], 3 hosts, 2 slots each" in text and "note: no topology" in text


def test_a_topology_alone_is_shown():
    assert "7 hosts, 16 GPUs" in shown("--topology", EXAMPLES / "mixed-gpus.yaml")


def test_json():
    told = as_json("-H", EXAMPLES / "dgx-a100-hdr.txt")
    assert told["source"].endswith("dgx-a100-hdr.txt") and told["dialect"] == "openmpi"
    assert told["hosts"][0] == {"host": "dgx01", "slots": 8, "role": "worker", "gpus": 8, "gpu_kind": "A100-SXM4-80GB"}
    assert len(told["hosts"]) == 16
    (group,) = told["groups"]
    nvlink = next(link for link in group["inside"] if link["name"] == "GPU to GPU")
    assert nvlink["rate_bytes_per_second"] == 300e9 and nvlink["origin"] == "catalogued"
    assert {way["oversubscription"] for way in told["between"]} == {1.0, 2.0}
    assert all(rule["kept"] for rule in group["rules"])


def test_links_that_probe_has_measured_keep_the_names_that_were_given_to_them(tmp_path):
    """The probe detects an NVLink, but not the number of links."""
    for name in ("dgx1-v100-edr.txt", "dgx1-v100-edr.yaml"):
        (tmp_path / name).write_text((EXAMPLES / name).read_text())
    (tmp_path / "a.yaml").write_text(
        "nodes:\n  - hosts: a\n    gpus: {kind: A100 PCIe, count: 4}\n    links: {pcie: PCIe4 x16}\n"
    )

    def found(host: str, gpus: int, joined: Any) -> tuple[IntraNodeLinkMeasurement, ...]:
        return tuple(
            IntraNodeLinkMeasurement(host=host, source=f"gpu{a}", target=f"gpu{b}", path="NVLink" if joined(a, b) else "PCIe peer",
                       bandwidth_bytes_per_second=45e9 if joined(a, b) else 20e9, variation=0.01)
            for a in range(gpus) for b in range(gpus) if a != b
        )  # fmt: skip

    mesh = {(a, b) for a, b in ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3), (4, 7), (5, 6), (6, 7))}
    inside = found("dgx1-01", 8, lambda a, b: (min(a, b), max(a, b)) in mesh)
    write_measured(
        tmp_path / "dgx1-v100-edr.yaml", Measurements(when="2026", software={}, hosts=("dgx1-01",), inside=inside)
    )
    text = shown("-H", "dgx1-v100-edr.txt", "--plot", "picture.svg", cwd=tmp_path)
    assert "GPU to GPU: NVLink2 x2, 50 GB/s, 45 GB/s measured" in text
    assert "GPU to GPU: PCIe peer, 20 GB/s measured" in text
    bridged = found("a", 4, lambda a, b: a // 2 == b // 2)
    write_measured(tmp_path / "a.yaml", Measurements(when="2026", software={}, hosts=("a",), inside=bridged))
    text = shown("--topology", "a.yaml", "--plot", "picture.svg", cwd=tmp_path)
    assert "GPU to GPU: NVLink, 45 GB/s measured" in text  # no measurement of PCIe
    assert "GPU to GPU: PCIe peer, 31.5 GB/s, 20 GB/s measured" in text


HOSTS = ("n1", "n2", "n3", "n4")


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    (tmp_path / "lab.txt").write_text("n[1-4] slots=2\n")
    nodes = "nodes:\n  - hosts: n[1-4]\n    gpus: {kind: T4, count: 2}\n    nics: [{name: eth0, rate: 10 GbE}]\n"
    (tmp_path / "lab.yaml").write_text(nodes)
    pairs = tuple(
        LinkMeasurement(source=a, target=b, transport="mpi", load="alone", latency_seconds=2e-5, variation=0.01,
                 bandwidth_bytes_per_second=0.5e9 if (a, b) == ("n3", "n1") else 1.1e9)
        for a in HOSTS for b in HOSTS if a != b
    )  # fmt: skip
    inside = tuple(
        IntraNodeLinkMeasurement(
            host=host, source=a, target=b, bandwidth_bytes_per_second=12e9, variation=0.01, path="PCIe"
        )
        for host in HOSTS
        for a, b in (("memory", "gpu0"), ("gpu0", "memory"))
    )
    write_measured(
        tmp_path / "lab.yaml",
        Measurements(when="2026-11-20T05:00:00Z", software={}, hosts=HOSTS, pairs=pairs, inside=inside),
    )
    return tmp_path


def test_what_was_measured_is_shown_as_measured(lab):
    text = shown("-H", "lab.txt", cwd=lab)
    assert "among n[1-4]: 10 GbE, 8.8 Gb/s, 20 us measured (median of 11)\n" in text
    assert "n3 to n1: 10 GbE, 4 Gb/s, 20 us measured, SLOW\n" in text
    assert "GPU to memory: PCIe, 15.8 GB/s, 12 GB/s measured (median of 4)" in text
    assert "measured 2026-11-20T05:00:00Z, 4 hosts" in text
    ways = as_json("-H", "lab.txt", cwd=lab)["between"]
    assert [(way["origin"], way["bandwidth_bytes_per_second"], way["slow"]) for way in ways] == [
        ("measured", 1.1e9, False), ("measured", 0.5e9, True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("slow", "lines"),
    [
        (lambda a, b: "n3" in (a, b), ["among n[1-2,4]: ", "n3 and n[1-2,4]: "]),
        (lambda a, b: b == "n3", ["among n[1-4]: ", "n[1-2,4] to n3: "]),
        (lambda a, b: True, ["among n[1-4]: "]),
    ],
    ids=["a host", "into a host", "all"],
)
def test_links_are_shown_by_speed(lab, slow, lines):
    pairs = tuple(
        LinkMeasurement(source=a, target=b, transport="tcp", load="alone", latency_seconds=2e-5, variation=0.01,
                        bandwidth_bytes_per_second=0.5e9 if slow(a, b) else 1.1e9)
        for a in HOSTS for b in HOSTS if a != b
    )  # fmt: skip
    write_measured(lab / "lab.yaml", Measurements(when="2026", software={}, hosts=HOSTS, pairs=pairs))
    shown_lines = [
        line for line in shown("-H", "lab.txt", cwd=lab).splitlines() if "Gb/s" in line and "measured" in line
    ]
    assert [line.split("── ")[1].split("10 GbE")[0] for line in shown_lines] == lines
    assert [line.endswith("SLOW") for line in shown_lines] == [False, True][: len(lines)]


def test_hosts_that_only_one_of_the_files_knows(lab):
    (lab / "lab.txt").write_text("n1\nn9\n")
    done = show("-H", "lab.txt", cwd=lab)
    assert done.returncode == 2
    assert done.stderr == (
        "distrib-topo: error: lab.yaml:1: $.nodes: n9 is in the hostfile (lab.txt:2) but not in the topology; "
        "describe it in a group of `nodes`, or correct the name\n"
    )
    (lab / "lab.txt").write_text("n[1-3]\n")
    assert "note: lab.yaml:2: $.nodes[0].hosts: n4 is not in lab.txt" in shown("-H", "lab.txt", cwd=lab)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("nodes: [\n", "lab.yaml:2: is not valid YAML: "),
        ("nodes:\n  - hosts: n[1-4]\n    nics: [{name: e, rate: 10gb/s}]\n", "lab.yaml:3: $.nodes[0].nics[0].rate: '10gb/s'"),
        ("nodes:\n  - hosts: n[1-4]\nnodes: []\n", "lab.yaml:3: is not valid YAML: the key `nodes`"),
        ("\0", "lab.yaml:1: contains NUL bytes"),
    ],
)  # fmt: skip
def test_a_bad_topology_is_one_line_and_exit_code_2(lab, text, error):
    (lab / "lab.yaml").write_text(text)
    done = show("-H", "lab.txt", cwd=lab)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"distrib-topo: error: {error}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_is_drawn(path, tmp_path):
    picture = tmp_path / "cluster.svg"
    assert f"the picture is in {picture}" in shown("-H", path.with_suffix(".txt"), "--plot", picture)
    root = ElementTree.parse(picture).getroot()
    words = " ".join(node.text or "" for node in root.iter("{http://www.w3.org/2000/svg}text"))
    assert root.tag.endswith("svg") and "GPU" in words
    assert "Network" in words or "one-machine" in path.stem


def test_a_png_and_bad_pictures(lab):
    shown("-H", "lab.txt", "--plot", "cluster.png", cwd=lab)
    assert (lab / "cluster.png").read_bytes().startswith(b"\x89PNG")
    for name, what in [
        ("cluster.bmp", "unsupported file type"),
        ("none/cluster.svg", "there is no folder none"),
    ]:
        done = show("-H", "lab.txt", "--plot", name, cwd=lab)
        assert done.returncode == 2 and f"--plot {name}: {what}" in done.stderr


def test_the_version_is_that_of_the_other_command(capsys):
    with pytest.raises(SystemExit):
        topo.main(["--version"])
    assert capsys.readouterr().out == f"distrib {distrib.__version__}\n"


def test_a_mistyped_gpu_is_answered_with_the_one_that_may_be_meant(tmp_path):
    (tmp_path / "typo.yaml").write_text("nodes:\n  - hosts: a1\n    gpus: {count: 2, kind: RTX 4900}\n")
    assert "RTX 4900  not in the catalogue; did you mean RTX-4090" in shown("--topology", "typo.yaml", cwd=tmp_path)


@pytest.mark.processes
def test_a_link_carries_no_more_than_the_uplink_on_its_way(tmp_path):
    (tmp_path / "t.yaml").write_text(
        'nodes:\n  - {hosts: "n[1-3]", nics: [{name: eth0, rate: 10GbE}]}\nswitches:\n  - {name: sw, hosts: "n[1-2]", uplink: 1GbE}\n'
    )
    said = subprocess.run([TOPO, "show", "--topology", tmp_path / "t.yaml"], capture_output=True, text=True).stdout
    assert re.search(r"among n\[1-2\]: .* 9.1 Gb/s usable", said) and re.search(
        r"n\[1-2\] and n3: .* 9\d\d Mb/s usable", said
    ), said


def test_a_ratio_says_what_an_uplink_carries_to_show_and_to_plan(tmp_path):
    (tmp_path / "t.yaml").write_text(
        'nodes:\n  - {hosts: "n[1-4]", nics: [{name: eth0, rate: 10GbE}]}\nswitches:\n  - {name: sw, hosts: "n[1-2]", oversubscription: 4:1}\n'
    )
    topology = read_topology(tmp_path / "t.yaml")
    rate = uplink_rate(topology, topology.switches[0])
    assert 0.9 * 625e6 < rate < 625e6  # a quarter of the usable 2 x 10 Gb/s
    _, across, _ = as_json("--topology", "t.yaml", cwd=tmp_path)["between"]
    assert across["name"] == "n[1-2] and n[3-4]"
    assert across["bandwidth_bytes_per_second"] == pytest.approx(rate)
    wide = parse_topology((tmp_path / "t.yaml").read_text().replace("4:1", "1:1"), "t")
    assert uplink_rate(wide, wide.switches[0]) == math.inf


def test_names_are_no_formulas(tmp_path, capsys):
    (tmp_path / "t.yaml").write_text("name: a $100 lab for $5\nnodes:\n  - {hosts: n1, gpus: {count: 1, kind: T4}}\n")
    assert topo.main(["show", "--topology", str(tmp_path / "t.yaml"), "--plot", str(tmp_path / "t.svg")]) == 0
    assert "a $100 lab for $5" in (tmp_path / "t.svg").read_text() and "a $100 lab" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["show", "--jsn"], ["check", "--hots", "a"], ["plan"], ["probe", "--way", "pigeon"]])
def test_mistyped_options_are_told_in_json_too(words, capsys):
    assert topo.main([*words, "--json"]) == 2
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["status"], told["exit_code"]) == ("failed", 2) and err == f"distrib-topo: error: {told['error']}\n"
    assert topo.main(words) == 2
    assert capsys.readouterr().out == ""


def test_a_picture_of_what_fits_no_page(tmp_path):
    groups = "".join(f"  - hosts: g{n}-[1-40]\n    gpus: {{count: 72, kind: Unheard Of}}\n" for n in range(9))
    racks = "".join(f"  - {{name: r{n}, hosts: 'g{n}-[1-40]', uplink: 4 x HDR}}\n" for n in range(9))
    spine = f"  - {{name: spine, switches: [{', '.join(f'r{n}' for n in range(9))}]}}\n"
    (tmp_path / "big.yaml").write_text(f"nodes:\n{groups}switches:\n{racks}{spine}")
    text = shown("--topology", "big.yaml", "--plot", "big.png", cwd=tmp_path)
    assert "360 hosts, 25920 GPUs" in text
    assert "72 x Unheard Of  not in the catalogue; distrib/cluster/hardware_catalog.yaml lists the known ones" in text
    assert (tmp_path / "big.png").stat().st_size > 10_000


@pytest.mark.processes
def test_any_terminal_and_no_reader_will_do(lab):
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    words = [TOPO, "show", "-H", "lab.txt"]
    plain = subprocess.run(words, capture_output=True, text=True, cwd=lab, timeout=200, env=ascii_only)
    assert plain.returncode == 0 and "+-- " in plain.stdout and plain.stdout.isascii()
    command = f"{TOPO} show -H lab.txt --json | true; exit ${{PIPESTATUS[0]}}"
    gone = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=lab, timeout=200)
    assert gone.returncode == 0 and not gone.stderr


@pytest.mark.parametrize(
    "command",
    [
        [TOPO, "show", "-H", "lab.txt"],
        [TOPO, "check", "-H", "localhost"],
        [LAUNCH, "-H", "lab.txt", "--dry-run", SCRIPTS / "where.py"],
    ],
)
@pytest.mark.processes
def test_closed_outputs_are_nobody_s_failure(lab, command):
    words = " ".join(map(str, command))
    done = subprocess.run(["sh", "-c", f"{words} >&- 2>&-"], cwd=lab, timeout=200)
    assert done.returncode == 0
    done = subprocess.run(["sh", "-c", f"{words} >&-"], stderr=subprocess.PIPE, text=True, cwd=lab, timeout=200)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done


@pytest.mark.parametrize(
    "command",
    [
        [TOPO, "show", "-H", "lab.txt"],
        [TOPO, "show", "-H", "lab.txt", "--json"],
        [TOPO, "plan", "-H", "lab.txt", "--workload", "resnet50"],
        [LAUNCH, "-H", "lab.txt", "--dry-run", SCRIPTS / "where.py"],
    ],
)
@pytest.mark.processes
def test_a_full_disk_is_told_of(lab, command):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            list(map(str, command)), stdout=full, stderr=subprocess.PIPE, text=True, cwd=lab, timeout=200
        )
    assert done.returncode == 1 and done.stderr.endswith(
        f"{Path(command[0]).name}: error: standard output: No space left on device\n"
    ), done
