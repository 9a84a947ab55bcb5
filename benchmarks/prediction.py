"""How right the bandwidth model is: foretold from a probe and a one-rank profile, against what then was measured.

    python benchmarks/prediction.py all                 every shape, one after another (an hour), then the table
    python benchmarks/prediction.py up 4x2              builds hosts x slots and starts the job, which waits
    python benchmarks/prediction.py probe 4x2 1gbit     probes, with the links at this rate
    python benchmarks/prediction.py profile 4x2         profiles each case of the shape with one rank
    python benchmarks/prediction.py measure 4x2 1gbit   has the waiting job carry the cases out (--half tune|held-out)
    python benchmarks/prediction.py down 4x2
    python benchmarks/prediction.py table               from what has been measured so far (--half, --each)

Real communication over the virtual cluster (root, iproute2, sshd); compute is emulated by sleeps (labelled `sleep`), or real
on the CPU (`cpu`). All virtual hosts share this machine's cores, so it must be quiet while anything is measured: the
parts are short for that. Half of the cases, chosen by a hash of their names before there was a model, is
never used to tune it (`held-out`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from distrib_launch import cli, training

from distrib.bandwidth.scaling import foretell
from distrib.bandwidth.workload import Gradient, Workload
from distrib.cluster.topology import parse_topology
from tests.cluster import Cluster
from tests.cluster.virtual import names, parse_rate

BIN = Path(sys.executable).parent
STEPS = Path(__file__).parent / "scripts" / "steps.py"
RESULTS = Path("distrib-runs/prediction.json")
SEED = 20250
THRESHOLD = 0.8
LONGEST_SECONDS = 1.5
"""By the ring's limit; cases that would communicate for longer are not drawn."""

REAL_FLOP_PER_SECOND = 5e10
"""About what a core multiplies matrices with."""

SHAPES: dict[str, tuple[str, ...]] = {
    "2x1": ("200mbit", "500mbit", "1gbit", "2gbit"),
    "2x4": ("500mbit", "1gbit"),
    "3x1": ("500mbit", "2gbit"),
    "3x2": ("200mbit", "1gbit"),
    "4x1": ("200mbit", "1gbit", "2gbit"),
    "4x2": ("500mbit", "1gbit"),
    "4x4": ("200mbit", "1gbit"),
    "6x1": ("200mbit", "1gbit"),
    "6x2": ("500mbit",),
    "8x1": ("200mbit", "500mbit", "1gbit"),
    "8x2": ("200mbit", "500mbit"),
}
"""Hosts x slots, and the rates of their links."""

KINDS: dict[str, list[str]] = {
    "default": [],
    "flat": ["--all-reduce", "flat"],
    "bf16": ["--gradients", "bf16"],
    "async": ["--mode", "async"],
}
CASES = 4
"""Of each shape and rate. With two ranks, one for each core here, the last of them computes in earnest."""
PASSES, STEPS_OF_A_PASS = 2, 4


def cases_of(shape: str, rate: str) -> list[dict[str, Any]]:
    """Drawn by the seed and the names: always the same."""
    hosts, slots = map(int, shape.split("x"))
    ranks = hosts * slots
    found = []
    for number in range(CASES):
        draw = random.Random(f"{SEED} {shape} {rate} {number}")
        real = ranks == 2 and number == CASES - 1
        while True:
            megabytes = 10 ** draw.uniform(0, 2)
            if 2 * (ranks - 1) / ranks * megabytes * 1e6 / (parse_rate(rate) / 8) <= LONGEST_SECONDS:
                break
        tensors = draw.randint(4, 60)
        backward = 0.02 * 25 ** draw.random()
        if draw.random() < 0.5:  # as in transformers: all alike
            sizes = [megabytes * 1e6 / 4 / tensors] * tensors
        else:  # as in convolutional networks: a few large ones
            weights = [draw.expovariate(1.0) ** 2 + 0.01 for _ in range(tensors)]
            sizes = [megabytes * 1e6 / 4 * weight / sum(weights) for weight in weights]
        batch = 1
        if real:  # square layers, and as many samples as fill the time
            tensors = max(4, min(tensors, 12))
            sizes = [megabytes * 1e6 / 4 / tensors] * tensors
            batch = max(1, round(1.5 * backward * REAL_FLOP_PER_SECOND / (6 * sum(sizes))))
        name = f"{shape}@{rate}/{number}"
        found.append(
            {
                "name": name, "real": real, "batch": batch, "steps": STEPS_OF_A_PASS,
                "elements": [max(1, round(size)) for size in sizes],
                "forward_seconds": round(backward / 2, 4), "backward_seconds": round(backward, 4),
            }
        )  # fmt: skip
    return found


def half_of(name: str) -> str:
    """Which half a case belongs to: by a hash of its name, nothing else."""
    return "tune" if hashlib.sha256(f"{SEED} {name}".encode()).digest()[0] % 2 else "held-out"


# Carrying out


def cluster_name(shape: str, kind: str) -> str:
    return f"foretell-{shape}-{kind}"


def up(shape: str, kind: str) -> None:
    hosts, slots = map(int, shape.split("x"))
    cluster = Cluster(hosts, slots=slots, name=cluster_name(shape, kind))
    cluster.up()
    cases = cluster.directory / "job"
    cases.mkdir()
    start(cluster, cases, kind)


def start(cluster: Cluster, folder: Path, kind: str, *words: str) -> None:
    """Start the job that waits for orders; it goes on when this process ends."""
    log = (folder / "log").open("w")
    command = [BIN / "distrib-launch", "-H", cluster.hostfile, "--run-dir", folder / "run", "--no-check", *words]
    command += [*options_of(kind), STEPS, folder]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.Popen(
        cluster.enter("n1", [str(word) for word in command]), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ,
        start_new_session=True,
    )  # fmt: skip
    ask(folder, [dict(cases_of("2x1", "1gbit")[0], steps=1, name="warm")], seconds=300)


def ask(folder: Path, cases: list[dict[str, Any]], seconds: float = 600) -> dict[str, Any]:
    """What the waiting job answers to an order."""
    order(folder, cases)
    return await_answer(folder, seconds)


def order(folder: Path, cases: list[dict[str, Any]]) -> None:
    """Have the waiting job carry cases out; none: have it end."""
    part = folder / "order.part"
    part.write_text(json.dumps(cases))
    part.rename(folder / "order.json")


def await_answer(folder: Path, seconds: float = 600) -> dict[str, Any]:
    answer, deadline = folder / "answer.json", time.monotonic() + seconds
    while not answer.exists():
        if time.monotonic() > deadline:
            sys.exit(f"no answer after {seconds} s: {(folder / 'log').read_text()[-2000:]}")
        time.sleep(0.2)
    found: dict[str, Any] = json.loads(answer.read_text())
    answer.unlink()
    return found


def options_of(kind: str) -> list[str]:
    """Those of distrib-launch."""
    return KINDS[kind]


def probe(shape: str, rate: str, kind: str, results: dict[str, Any]) -> None:
    cluster = Cluster.load(cluster_name(shape, kind))
    shape_links(cluster, rate)
    topology = cluster.directory / f"{rate}.yaml"
    topology.write_text(
        f"nodes:\n  - hosts: n[1-{len(cluster.hosts)}]\n    nics:\n      - {{name: eth0, kind: Ethernet, rate: {parse_rate(rate) // 10**6}Mb/s}}\n"
    )
    words = [BIN / "distrib-topo", "probe", "-H", cluster.hostfile, "-o", topology]
    words += ["--run-dir", cluster.directory / f"probe-{rate}"]
    done = cluster.run("n1", words, env={"OMP_NUM_THREADS": "1"}, timeout=300)
    if done.returncode not in (0, 1):
        sys.exit(f"probe: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    results["topologies"][f"{shape}@{rate}"] = topology.read_text()


def shape_links(cluster: Cluster, rate: str) -> None:
    for host in cluster.hosts:
        cluster.shape(host, rate)


def profile(shape: str, kind: str, results: dict[str, Any]) -> None:
    """Each case of a shape with one rank; where some compute in earnest, every host profiles at once, as they share cores."""
    cluster = Cluster.load(cluster_name(shape, kind))
    cases = [case for rate in SHAPES[shape] for case in cases_of(shape, rate)]
    hosts = cluster.hosts if any(case["real"] for case in cases) else cluster.hosts[:1]
    folders = [cluster.directory / f"alone-{host}" for host in hosts]
    for host, folder in zip(hosts, folders, strict=True):
        folder.mkdir()
        start(cluster, folder, "default", "-np", "1", "--include", host)
    for folder in folders[1:]:
        order(folder, cases)
    results["profiles"] |= ask(folders[0], cases)
    for folder in folders[1:]:
        await_answer(folder)
    for folder in folders:
        order(folder, [])


def measure(shape: str, rate: str, kind: str, half: str | None, results: dict[str, Any]) -> None:
    cluster = Cluster.load(cluster_name(shape, kind))
    shape_links(cluster, rate)
    cases = [case for case in cases_of(shape, rate) if half in (None, half_of(case["name"]))]
    passes: list[dict[str, Any]] = [ask(cluster.directory / "job", cases) for _ in range(PASSES)]
    for case in cases:
        results["measured"][f"{case['name']} {kind}"] = [found[case["name"]] for found in passes]


def down(shape: str, kind: str) -> None:
    if cluster_name(shape, kind) not in names():
        return
    cluster = Cluster.load(cluster_name(shape, kind))
    order(cluster.directory / "job", [])
    time.sleep(1)
    cluster.down()


# Judging


def workload_of(case: dict[str, Any], seen: dict[str, Any]) -> Workload:
    gradients = tuple(Gradient(**gradient) for gradient in seen["gradients"])
    return Workload(
        name=case["name"], origin="measured", device="cpu", batch=1, forward_seconds=seen["forward_seconds"],
        backward_seconds=seen["backward_seconds"], optimizer_seconds=seen["optimizer_seconds"], gradients=gradients,
        parameter_bytes=sum(gradient.size_bytes for gradient in gradients), variation=seen["variation"],
    )  # fmt: skip


def judge(results: dict[str, Any], half: str | None) -> list[dict[str, Any]]:
    """Foretold and measured of every case."""
    topologies = {key: parse_topology(text, key) for key, text in results["topologies"].items()}
    rows = []
    for key, passes in results["measured"].items():
        name, kind = key.split(" ")
        place = name.partition("/")[0]
        if place not in topologies or name not in results["profiles"] or half not in (None, half_of(name)):
            continue
        shape, rate = place.split("@")
        hosts, slots = map(int, shape.split("x"))
        case = next(case for case in cases_of(shape, rate) if case["name"] == name)
        workload = workload_of(case, results["profiles"][name])
        told = foretell(
            topologies[place],
            workload,
            training.strategy_of(cli.parser().parse_args([*KINDS[kind], "x"])),
            hosts=hosts,
            ranks_per_host=slots,
        )
        seconds = statistics.median(second for taken in passes for second in taken)
        medians = [statistics.median(taken) for taken in passes]
        efficiency = min(1.0, told.compute_seconds / seconds)
        rows.append(
            {
                "name": key, "half": half_of(name), "compute": "cpu" if case["real"] else "sleep",
                "megabytes": workload.gradient_bytes / 1e6, "tensors": len(workload.gradients),
                "backward": workload.backward_seconds, "foretold": told.step_seconds, "measured": seconds,
                "error": told.step_seconds / seconds - 1, "spread": (max(medians) - min(medians)) / 2 / seconds,
                "efficiency": efficiency, "efficiency foretold": told.efficiency,
                "right": (told.efficiency < THRESHOLD) == (efficiency < THRESHOLD),
            }
        )  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]], each: bool) -> None:
    if each:
        head = f"{'case':28}{'half':>9}{'compute':>8}{'MB':>7}{'tensors':>8}{'backward':>9}"
        print(f"{head}{'foretold':>10}{'measured':>10}{'error':>8}{'spread':>8}{'efficiency':>16}")
        for row in sorted(rows, key=lambda row: -abs(row["error"])):
            print(
                f"{row['name']:28}{row['half']:>9}{row['compute']:>8}{row['megabytes']:7.1f}{row['tensors']:8}"
                f"{row['backward'] * 1e3:7.0f}ms{row['foretold']:9.4f}s{row['measured']:9.4f}s{row['error']:8.1%}"
                f"{row['spread']:8.1%}{row['efficiency foretold']:8.1%}{row['efficiency']:8.1%}"
                + ("" if row["right"] else "  WRONG")
            )  # fmt: skip
    kinds = sorted({row["name"].split(" ")[1] for row in rows})
    groups = [("all", rows)] + [(kind, [row for row in rows if row["name"].endswith(f" {kind}")]) for kind in kinds]
    groups += [(half, [row for row in rows if row["half"] == half]) for half in ("tune", "held-out")]
    print(
        f"{'':20}{'cases':>6}{'MAE':>7}{'spread':>8}{'p95':>7}{'worst':>7}{'efficiency':>12}{'verdicts':>10}{'wrong by':>10}"
    )
    for name, part in groups:
        if not part:
            continue
        errors = sorted(abs(row["error"]) for row in part)
        points = [abs(row["efficiency"] - row["efficiency foretold"]) for row in part]
        wrong = [abs(row["efficiency"] - THRESHOLD) for row in part if not row["right"]]
        print(
            f"{name:20}{len(part):6}{statistics.fmean(errors):7.1%}{statistics.fmean(row['spread'] for row in part):8.1%}"
            f"{errors[min(len(errors) - 1, int(0.95 * len(errors)))]:7.1%}{errors[-1]:7.1%}"
            f"{statistics.fmean(points) * 100:8.1f} pts{sum(row['right'] for row in part) / len(part):10.1%}"
            f"{max(wrong, default=0) * 100:6.1f} pts"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["all", "up", "probe", "profile", "measure", "down", "table"])
    parser.add_argument("shape", nargs="?", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("rate", nargs="?", help="of the links")
    parser.add_argument("--kind", choices=list(KINDS), default="default", help="how the ranks train together")
    parser.add_argument("--half", choices=["tune", "held-out"])
    parser.add_argument("--each", action="store_true", help="print every case")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    results: dict[str, Any] = {"topologies": {}, "profiles": {}, "measured": {}}
    if options.results.exists():
        results = json.loads(options.results.read_text())
    if options.part not in ("all", "table") and options.shape not in SHAPES:
        parser.error(f"which shape? one of {', '.join(SHAPES)}")
    if options.part in ("probe", "measure") and options.rate not in SHAPES[options.shape]:
        parser.error(f"which rate? one of {', '.join(SHAPES[options.shape])}")
    if options.part == "table":
        table(judge(results, options.half), options.each)
        return 0
    shapes = list(SHAPES) if options.part == "all" else [options.shape]
    for shape in shapes:
        run(options, shape, results)
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(results))
    if options.part == "all":
        table(judge(results, options.half), options.each)
    return 0


def run(options: argparse.Namespace, shape: str, results: dict[str, Any]) -> None:
    """One part, or all of them, of a shape."""
    whole = options.part == "all"
    rates = SHAPES[shape] if whole else (options.rate,)
    if whole or options.part == "up":
        down(shape, options.kind)
        up(shape, options.kind)
    if whole or options.part == "profile":
        profile(shape, options.kind, results)
    for rate in rates:
        if whole or options.part == "probe":
            probe(shape, rate, options.kind, results)
        if whole or options.part == "measure":
            measure(shape, rate, options.kind, options.half, results)
    if whole or options.part == "down":
        down(shape, options.kind)


if __name__ == "__main__":
    sys.exit(main())
