"""Accuracy of distrib-topo probe: rates against iperf3, detection of injected faults, and run time.

    python benchmarks/probe_accuracy.py [bandwidth] [faults] [clean] [time]    (default: all)

Runs on the virtual cluster (root, iproute2, sshd, iperf3). The machine must be idle: all hosts share its cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.virtual_cluster import Cluster

TOPO = Path(sys.executable).parent / "distrib-topo"
RATES = ("200mbit", "1gbit", "2gbit")
PAIRS = (("n1", "n2"), ("n3", "n4"), ("n4", "n1"))
IPERF_SECONDS = 4
LARGE_BYTES = 8 << 20
PARTS = ("bandwidth", "faults", "clean", "time")


def probe(cluster: Cluster, *words: str) -> tuple[dict[str, Any], float]:
    """Run a probe and return its JSON output and the command's seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(TOPO), "probe", "-H", str(cluster.hostfile), "--run-dir", folder, "--json", *words]
        begun = time.monotonic()
        done = cluster.run("n1", command, env={"OMP_NUM_THREADS": "1"}, timeout=600)
        seconds = time.monotonic() - begun
    if done.returncode not in (0, 1) or not done.stdout:
        sys.exit(f"probe: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    output: dict[str, Any] = json.loads(done.stdout)
    return output, seconds


def iperf(cluster: Cluster, source: str, target: str) -> float:
    """Return payload bytes per second of iperf3's receiver, without the first second."""
    with cluster.popen(target, ["iperf3", "-s", "-1"]) as server:
        time.sleep(0.3)
        words = ["iperf3", "-c", target, "-t", str(IPERF_SECONDS), "-O", "1", "-J"]
        told = json.loads(cluster.run(source, words).stdout)
        server.wait(10)
    return float(told["end"]["sum_received"]["bits_per_second"]) / 8


def bandwidth(rates_: Sequence[str], repeat: int) -> bool:
    """Compare rates for messages of 8 MiB and more, and over TCP, with iperf3; medians over alternating turns.

    CoV is the coefficient of variation of the probe's repetitions, `turns` that of the medians of whole probes.
    """
    good = True
    print(
        f"{'rate':8} {'pair':9} {'way':14} {'iperf3 Mb/s':>12} {'probe Mb/s':>11} {'ratio':>7} {'CoV':>7} {'turns':>7}"
    )
    for rate in rates_:
        seen: dict[tuple[str, str, str], list[float]] = {}
        within: dict[tuple[str, str, str], list[float]] = {}
        peer: dict[tuple[str, str], list[float]] = {}
        with Cluster(4, rate=rate) as cluster:
            for _ in range(repeat):
                for pair in PAIRS:
                    peer.setdefault(pair, []).append(iperf(cluster, *pair))
                output, _ = probe(cluster, "--full")
                for link in output["measured"]["pairs"]:
                    pair = link["source"], link["target"]
                    if pair not in PAIRS or link.get("both_ways"):
                        continue
                    for size, seconds, variation in link.get("curve", []):
                        if size >= LARGE_BYTES:
                            key = (*pair, f"mpi {size >> 20} MiB")
                            seen.setdefault(key, []).append(size / seconds)
                            within.setdefault(key, []).append(variation)
                    if link["way"] == "tcp" and link["load"] == "alone":
                        key = (*pair, "tcp")
                        seen.setdefault(key, []).append(link["bandwidth_bytes_per_second"])
                        within.setdefault(key, []).append(link["variation"])
        for (source, target, way), rates in sorted(seen.items()):
            theirs, ours = statistics.median(peer[source, target]), statistics.median(rates)
            spread = statistics.median(within[source, target, way])
            between = statistics.stdev(rates) / statistics.mean(rates) if len(rates) > 1 else 0.0
            good &= abs(ours / theirs - 1) <= 0.02 and (rate != "1gbit" or spread <= 0.01)
            print(
                f"{rate:8} {source}-{target:6} {way:14} {theirs * 8e-6:12.1f} {ours * 8e-6:11.1f} {ours / theirs:7.4f} "
                f"{spread:7.2%} {between:7.2%}", flush=True,
            )  # fmt: skip
    return good


def faults(mode: str) -> bool:
    """Slow a host by 10 % and by 50 %, and put two racks behind an uplink of half their rate."""
    good = True
    racks = [["n1", "n2", "n3", "n4"], ["n5", "n6", "n7", "n8"]]
    cases: list[tuple[str, str, float, dict[str, Any]]] = [
        ("n6 at 90 %", "slow_host", 0.9, {"rates": {"n6": "900mbit"}}),
        ("n6 at 50 %", "slow_host", 0.5, {"rates": {"n6": "500mbit"}}),
        ("two racks, uplink 2:1", "oversubscribed_uplink", 2.0, {"racks": racks, "trunk_rate": "2gbit"}),
    ]
    for name, kind, ratio, options in cases:
        with Cluster(8, rate="1gbit", **options) as cluster:
            output, seconds = probe(cluster, *([f"--{mode}"] if mode != "default" else []))
        found = output["findings"]
        right = len(found) == 1 and found[0]["kind"] == kind and abs(found[0]["ratio"] / ratio - 1) < 0.05
        good &= right
        print(
            f"{'found' if right else 'WRONG':6} {name} ({mode}, {seconds:.1f} s): "
            + "; ".join(f["what"] for f in found),
            flush=True,
        )
    return good


def clean(runs: int) -> bool:
    """Probe a cluster without faults; expect no findings."""
    told = []
    with Cluster(8, rate="1gbit") as cluster:
        for turn in range(runs):
            output, _ = probe(cluster, *(["--quick"] if turn % 4 else []))
            told += [finding["what"] for finding in output["findings"]]
    print(f"{runs} probes of 8 clean hosts (every fourth is no --quick): {len(told)} finding(s) {told}", flush=True)
    return not told


def durations() -> bool:
    good = True
    for hosts, mode, limit in ((8, "quick", 10.0), (8, "full", 60.0), (32, "quick", 40.0)):
        with Cluster(hosts, rate="1gbit") as cluster:
            output, seconds = probe(cluster, f"--{mode}")
        good &= seconds < limit
        told = [finding["what"] for finding in output["findings"]]
        print(
            f"{hosts} hosts, {mode}: {seconds:.1f} s (limit {limit:.0f} s), {len(told)} finding(s) {told}", flush=True
        )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--repeat", type=int, default=3, help="turns of the bandwidth part")
    parser.add_argument("--rate", action="append", help=f"of the bandwidth part (default: {', '.join(RATES)})")
    parser.add_argument("--runs", type=int, default=20, help="clean probes")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    parts = options.parts or PARTS
    good = True
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
    if "time" in parts:
        good &= durations()
    if "faults" in parts:
        good &= faults("quick")
        good &= faults("default")
    if "clean" in parts:
        good &= clean(options.runs)
    if "bandwidth" in parts:
        good &= bandwidth(options.rate or RATES, options.repeat)
    print("all as it should be" if good else "NOT all as it should be")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
