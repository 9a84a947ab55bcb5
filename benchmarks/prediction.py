"""Accuracy of the bandwidth model: predictions from a probe and a one-rank profile against measured steps.

    python benchmarks/prediction.py measure [SHAPE ...] [--results FILE]    every case of these shapes; all in 2.5 hours
    python benchmarks/prediction.py again [SHAPE ...] [--results FILE]      once more in new jobs, added to the results
    python benchmarks/prediction.py table [--half tune|held-out] [--each]   from the results so far

Communication is real, over the virtual cluster (root, iproute2, sshd). Compute is emulated by sleeps (labelled
`sleep`), or real on the CPU (`cpu`). All virtual hosts share this machine's cores, so the machine must be idle.

The last measurements are kept in results/. An interrupted shape is measured again from the start. Half of the cases,
chosen by a hash of their names before the model existed, is never used to tune it (`held-out`).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import msgspec

from distrib.bandwidth_model.prediction import Prediction
from distrib.bandwidth_model.scaling import predict_step
from distrib.bandwidth_model.workload import Workload
from distrib.cluster.topology import parse_topology
from distrib_launch.arguments import training_options
from distrib_launch.cli import launch
from tests.virtual_cluster import Cluster
from tests.virtual_cluster.virtual import parse_rate

BIN = Path(sys.executable).parent
STEPS = Path(__file__).parent / "scripts" / "steps.py"
RESULTS = Path(__file__).parent / "results" / "prediction.json.gz"
SEED = 20261129
THRESHOLD = 0.8
CARRIED = 0.5
"""Busy part of this machine's CPUs up to which they carry all hosts of a case. Beyond it, threads of one host often
wait for those of another, which separate hosts would not.
"""
LONGEST_SECONDS = 1.0
"""Limit of communication time at the network rate; longer cases are not drawn."""

REAL_FLOP_PER_SECOND = 5e10
"""Approximate matrix-multiplication rate of a core."""

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
}
"""Hosts x slots, and the rates of their links."""

KINDS: dict[str, list[str]] = {
    "default": [],
    "flat": ["--all-reduce", "flat"],
    "bf16": ["--gradients", "bf16"],
    "async": ["--mode", "async", "--no-host-reduction"],
}
REAL_KINDS = ("default", "bf16")
"""Kinds with an additional case that computes on the CPU, for two ranks: this machine has one core for each."""
PASSES, STEPS_OF_A_PASS = 2, 5
STEPS_TO_CUT, STEPS_TO_REBUILD, STEPS_TO_DRIFT = 30, 5, 10
"""Warm-up steps until distrib has compared bucket boundaries (3 steps, and 6 for each of up to four), DDP has rebuilt
its buckets, and asynchronous ranks are no longer synchronized by their common start.
"""
ENDING_STEPS = 3
"""Extra steps of each asynchronous rank, so that the first rank does not finish while the last is timed."""


def cases_of(shape: str, rate: str, seed: int) -> list[dict[str, Any]]:
    """Draw one case of each kind. The same seed and names give the same cases."""
    hosts, slots = map(int, shape.split("x"))
    kinds = [(kind, False) for kind in KINDS] + [(kind, True) for kind in REAL_KINDS if hosts * slots == 2]
    return [_draw(shape, rate, kind, real, seed) for kind, real in kinds]


def _draw(shape: str, rate: str, kind: str, real: bool, seed: int) -> dict[str, Any]:
    hosts, slots = map(int, shape.split("x"))
    name = f"{shape}@{rate} {kind}" + (" cpu" if real else "")
    draw = random.Random(f"{seed} {name}")
    streams = slots if kind == "async" else 1
    while True:
        megabytes = 10 ** draw.uniform(0, 2)
        if streams * 2 * (hosts - 1) / hosts * megabytes * 1e6 / (parse_rate(rate) / 8) <= LONGEST_SECONDS:
            break
    tensors = draw.randint(4, 60)
    backward = 0.02 * 25 ** draw.random()
    if real:  # square layers, and enough samples to fill the time
        tensors = max(4, min(tensors, 12))
    if real or draw.random() < 0.5:  # equal sizes, as in transformers
        sizes = [megabytes * 1e6 / 4 / tensors] * tensors
    else:  # a few large sizes, as in convolutional networks
        weights = [draw.expovariate(1.0) ** 2 + 0.01 for _ in range(tensors)]
        sizes = [megabytes * 1e6 / 4 * weight / sum(weights) for weight in weights]
    settling = STEPS_TO_CUT if kind in ("flat", "bf16") or (kind == "default" and slots > 1) else STEPS_TO_REBUILD
    alone = kind == "async"
    return {
        "name": name, "kind": kind, "real": real, "steps": STEPS_OF_A_PASS * (2 if alone else 1),
        "settling": STEPS_TO_DRIFT if alone else settling, "ending": ENDING_STEPS if alone else 0,
        "batch": max(1, round(1.5 * backward * REAL_FLOP_PER_SECOND / (6 * sum(sizes)))),
        "elements": [max(1, round(size)) for size in sizes],
        "forward_seconds": round(backward / 2, 4), "backward_seconds": round(backward, 4),
    }  # fmt: skip


def half_of(name: str, seed: int) -> str:
    """Return the half of a case by a hash of its name only."""
    return "tune" if hashlib.sha256(f"{seed} {name}".encode()).digest()[0] % 2 else "held-out"


# Measurement


class Waiting:
    """A job on the cluster that runs the requested cases."""

    def __init__(self, cluster: Cluster, *options: object) -> None:
        self._folder = Path(tempfile.mkdtemp(dir=cluster.directory))
        self._log = (self._folder / "log").open("w+")
        command = [BIN / "distrib-launch", "-H", cluster.hostfile, "--run-dir", self._folder / "run", "--no-preflight"]
        words = [str(word) for word in [*command, *options, STEPS, self._folder]]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._job = subprocess.Popen(
            cluster.enter("n1", words), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=environ
        )
        self._asked = 0

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        self._order([])
        try:
            self._job.wait(60)
        finally:
            self._job.kill()
            self._log.close()

    def ask(self, cases: list[dict[str, Any]]) -> dict[str, Any]:
        """Run cases and return the job's results by case name."""
        answer = self._folder / f"answer-{self._asked}.json"
        self._order(cases)
        while not answer.exists():
            if self._job.poll() is not None:
                self._log.seek(0)
                sys.exit(f"the job ended with {self._job.returncode}: {self._log.read()[-3000:]}")
            time.sleep(0.1)
        found: dict[str, Any] = json.loads(answer.read_text())
        return found

    def _order(self, cases: list[dict[str, Any]]) -> None:
        part = self._folder / "order.part"
        part.write_text(json.dumps(cases))
        part.rename(self._folder / f"order-{self._asked}.json")
        self._asked += bool(cases)


def measure(shape: str, seed: int) -> dict[str, Any]:
    """Probe, profile and time every case of a shape."""
    hosts, slots = map(int, shape.split("x"))
    cases = {rate: cases_of(shape, rate, seed) for rate in SHAPES[shape]}
    found: dict[str, Any] = {"seed": seed, "topologies": {}, "profiles": {}, "measured": {}, "busy": {}}
    with Cluster(hosts, slots=slots) as cluster:
        for rate in cases:
            _shape_links(cluster, rate)
            found["topologies"][rate] = _probe(cluster, rate)
            print(f"{shape}@{rate} probed", flush=True)
        found["profiles"] = _profiles(cluster, [case for several in cases.values() for case in several])
        print(f"{shape} profiled", flush=True)
        for _ in range(PASSES):
            _time(cluster, shape, found)
    return found


def again(shape: str, found: dict[str, Any]) -> None:
    """Time every case of a measured shape once more."""
    hosts, slots = map(int, shape.split("x"))
    with Cluster(hosts, slots=slots) as cluster:
        _time(cluster, shape, found)


def _time(cluster: Cluster, shape: str, found: dict[str, Any]) -> None:
    """Time every case of a shape once, with one job per kind. Jobs differ more than steps of a job."""
    for kind, options in KINDS.items():
        with Waiting(cluster, *options) as job:
            for number, rate in enumerate(found["topologies"]):
                _shape_links(cluster, rate)
                asked = [case for case in cases_of(shape, rate, found["seed"]) if case["kind"] == kind]
                if not number:
                    job.ask([{**asked[0], "name": "warm", "steps": 1}])
                for name, result in job.ask(asked).items():
                    found["measured"].setdefault(name, []).append(result["seconds"])
                    found["busy"].setdefault(name, []).append(result["busy"])
        print(f"{shape} {kind} measured", flush=True)


def _shape_links(cluster: Cluster, rate: str) -> None:
    for host in cluster.hosts:
        cluster.shape(host, rate)


def _probe(cluster: Cluster, rate: str) -> str:
    """Run a probe and return the topology file with its measurements."""
    topology = cluster.directory / f"{rate}.yaml"
    card = f"{{name: eth0, kind: Ethernet, rate: {parse_rate(rate) // 10**6}Mb/s}}"
    topology.write_text(f"nodes:\n  - hosts: n[1-{len(cluster.hosts)}]\n    nics:\n      - {card}\n")
    words: list[str | Path] = [BIN / "distrib-topo", "probe", "-H", cluster.hostfile, "-o", topology]
    words += ["--run-dir", cluster.directory / f"probe-{rate}"]
    done = cluster.run("n1", words, env={"OMP_NUM_THREADS": "1"}, timeout=300)
    if done.returncode not in (0, 1):
        sys.exit(f"probe: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return topology.read_text()


def _profiles(cluster: Cluster, cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Profile each case on one rank. Cases that compute run on every host at once, as the hosts share cores."""
    hosts = cluster.hosts if any(case["real"] for case in cases) else cluster.hosts[:1]
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        jobs = [stack.enter_context(Waiting(cluster, "-np", 1, "--include", host)) for host in hosts]
        first, *_ = threads.map(lambda job: job.ask(cases), jobs)
        return first


# Evaluation


def read(path: Path) -> dict[str, Any]:
    """Read the measurements, by shape."""
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def judge(results: dict[str, Any], half: str | None) -> list[dict[str, Any]]:
    """Return the predicted and measured times of every case."""
    rows = []
    for shape, found in results.items():
        hosts, slots = map(int, shape.split("x"))
        seed = found["seed"]
        topologies = {rate: parse_topology(text, f"{shape}@{rate}") for rate, text in found["topologies"].items()}
        for rate, topology in topologies.items():
            for case in cases_of(shape, rate, seed):
                if half in (None, half_of(case["name"], seed)):
                    workload = msgspec.convert(found["profiles"][case["name"]], Workload)
                    words = [*KINDS[case["kind"]], "x"]
                    strategy = training_options.strategy_of(launch.parser().parse_args(words))
                    told = predict_step(topology, workload, strategy, hosts=hosts, ranks_per_host=slots)
                    row = _row(case, workload, told, found["measured"][case["name"]])
                    busy = statistics.fmean(found["busy"][case["name"]])
                    rows.append({**row, "busy": busy, "half": half_of(case["name"], seed)})
    return rows


def _row(case: dict[str, Any], workload: Workload, told: Prediction, passes: list[list[float]]) -> dict[str, Any]:
    seconds = statistics.median(second for taken in passes for second in taken)
    medians = [statistics.median(taken) for taken in passes]
    efficiency = min(1.0, told.compute_seconds / seconds)
    return {
        "name": case["name"], "kind": case["kind"],
        "megabytes": workload.gradient_bytes / 1e6, "tensors": len(workload.gradients),
        "compute": "cpu" if case["real"] else "sleep",
        "backward": workload.backward_seconds, "predicted": told.step_seconds, "measured": seconds,
        "error": told.step_seconds / seconds - 1, "spread": (max(medians) - min(medians)) / 2 / seconds,
        "efficiency": efficiency, "efficiency predicted": told.efficiency,
        "right": (told.efficiency < THRESHOLD) == (efficiency < THRESHOLD),
    }  # fmt: skip


def table(rows: list[dict[str, Any]], each: bool) -> None:
    if each:
        head = f"{'case':28}{'half':>9}{'compute':>8}{'MB':>7}{'tensors':>8}{'backward':>9}"
        print(f"{head}{'predicted':>10}{'measured':>10}{'error':>8}{'spread':>8}{'busy':>6}{'efficiency':>16}")
        for row in sorted(rows, key=lambda row: -abs(row["error"])):
            print(
                f"{row['name']:28}{row['half']:>9}{row['compute']:>8}{row['megabytes']:7.1f}{row['tensors']:8}"
                f"{row['backward'] * 1e3:7.0f}ms{row['predicted']:9.4f}s{row['measured']:9.4f}s{row['error']:8.1%}"
                f"{row['spread']:8.1%}{row['busy']:6.0%}{row['efficiency predicted']:8.1%}{row['efficiency']:8.1%}"
                + ("" if row["right"] else "  WRONG")
            )  # fmt: skip
    groups = [("all", rows)] + [(kind, [row for row in rows if row["kind"] == kind]) for kind in KINDS]
    groups += [(compute, [row for row in rows if row["compute"] == compute]) for compute in ("sleep", "cpu")]
    carried = [row for row in rows if row["busy"] <= CARRIED]
    groups += [
        (f"CPUs up to {CARRIED:.0%} busy", carried),
        ("  of them exact", [row for row in carried if row["kind"] in ("default", "flat")]),
        ("  of them held out", [row for row in carried if row["half"] == "held-out"]),
        ("CPUs busier", [row for row in rows if row["busy"] > CARRIED]),
    ]
    groups += [(half, [row for row in rows if row["half"] == half]) for half in ("tune", "held-out")]
    print(
        f"{'':20}{'cases':>6}{'mean':>7}{'median':>8}{'spread':>8}{'p95':>7}{'worst':>7}{'efficiency':>12}{'verdicts':>10}{'wrong by':>10}"
    )
    for name, part in groups:
        if not part:
            continue
        errors = sorted(abs(row["error"]) for row in part)
        points = [abs(row["efficiency"] - row["efficiency predicted"]) for row in part]
        wrong = [abs(row["efficiency"] - THRESHOLD) for row in part if not row["right"]]
        print(
            f"{name:20}{len(part):6}{statistics.fmean(errors):7.1%}{statistics.median(errors):8.1%}"
            f"{statistics.fmean(row['spread'] for row in part):8.1%}"
            f"{errors[min(len(errors) - 1, int(0.95 * len(errors)))]:7.1%}{errors[-1]:7.1%}"
            f"{statistics.fmean(points) * 100:8.1f} pts{sum(row['right'] for row in part) / len(part):10.1%}"
            f"{max(wrong, default=0) * 100:6.1f} pts"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["measure", "again", "table"])
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help=f"of {', '.join(SHAPES)}; without: all")
    parser.add_argument("--half", choices=["tune", "held-out"])
    parser.add_argument("--each", action="store_true", help="print every case")
    parser.add_argument(
        "--seed",
        type=int,
        default=SEED,
        help="of what is measured; another one draws other cases (default: %(default)s)",
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if unknown := set(options.shapes) - set(SHAPES):
        parser.error(f"no such shape: {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    results = read(options.results) if options.results.exists() else {}
    if options.part != "table":
        for shape in options.shapes or SHAPES:
            if options.part == "measure":
                results[shape] = measure(shape, options.seed)
            else:
                again(shape, results[shape])
            options.results.parent.mkdir(parents=True, exist_ok=True)
            options.results.write_bytes(gzip.compress(json.dumps(results).encode(), mtime=0))
    else:
        table(judge(results, options.half), options.each)
    return 0


if __name__ == "__main__":
    sys.exit(main())
