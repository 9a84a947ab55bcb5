"""Step time against the network limit: distrib, DDP, DDP with a hand-tuned bucket, and Horovod.

    python benchmarks/synchronous.py [--shape 4x1@1gbit ...] [--workload tensors|resnet50|cnn|digits]
                                     [--contenders ddp,ddp:4,ours]

Runs on the virtual cluster (root, iproute2, sshd, iperf3). The machine must be idle: all hosts share its cores. The
contenders of a job alternate, so that noise affects all of them equally.

Workloads `tensors` and `resnet50` emulate an accelerator by sleeping for the time of its backward (--backward); `cnn`
and `digits` compute. Horovod polls constantly, and therefore runs in its own job on the same cluster, if it is
installed (scripts/build-horovod).

The limit of a step is the longer of two times: its compute, and 2(h-1)/h times its bytes at the iperf3 rate. The same
run measures that rate while every host sends to the next. No averaging within the step reaches this limit on a slow
network, as it has no data before the first gradient. The second percentage counts from the first gradient.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.virtual_cluster import Cluster

LAUNCH = Path(sys.executable).parent / "distrib-launch"
SCRIPT = Path(__file__).parent / "scripts" / "averaging_steps.py"
IPERF_SECONDS = 3
JOB_SECONDS = 1800
"""Timeout. At 200 Mb/s, three contenders with ResNet-50's gradients take 700 to 900 s."""


def wire(cluster: Cluster) -> float:
    """Measure the lowest bytes/s of a host's link while every host sends to the next."""
    count = len(cluster.hosts)
    servers = [cluster.popen(host, ["iperf3", "-s", "-1"]) for host in cluster.hosts]
    time.sleep(0.5)
    words = ["-t", str(IPERF_SECONDS), "-O", "1", "-J"]
    clients = [
        cluster.popen(host, ["iperf3", "-c", cluster.hosts[(place + 1) % count], *words])
        for place, host in enumerate(cluster.hosts)
    ]
    told = [json.loads(client.communicate(timeout=30)[0]) for client in clients]
    for server in servers:
        server.communicate(timeout=30)
    return float(min(one["end"]["sum_received"]["bits_per_second"] for one in told)) / 8


def steps(cluster: Cluster, contenders: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Run the job and return its results for its contenders."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(LAUNCH), "-H", str(cluster.hostfile), "--run-dir", f"{folder}/run", str(SCRIPT), options.workload,
                   "--contenders", ",".join(contenders), "--backward", str(options.backward),
                   "--turns", str(options.turns), "--steps", str(options.steps)]  # fmt: skip
        done = cluster.run("n1", command, env={"OMP_NUM_THREADS": "1"}, timeout=JOB_SECONDS)
    found = re.search(r"\{.*\}", done.stdout)
    if done.returncode or found is None:
        sys.exit(f"{contenders}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    told: dict[str, Any] = json.loads(found[0])
    return told


def table(shape: str, bytes_per_second: float, told: dict[str, Any], hosts: int, real: bool) -> None:
    """Print medians, quartiles and ratios of one shape."""
    network_seconds = 2 * (hosts - 1) / hosts * told["gradient_bytes"] / bytes_per_second
    limit = max(told["backward_seconds"], network_seconds)
    reachable = max(told["backward_seconds"], told["first_gradient_seconds"] + network_seconds)
    print(
        f"\n{shape}, {told['gradient_bytes'] / 2**20:.1f} MiB, "
        + ("real compute" if real else f"emulated backward of {told['backward_seconds']:g} s")
        + f", wire {bytes_per_second * 8e-6:.0f} Mb/s (iperf3)"
        + ("" if real else f": limit {limit:.4f} s, from the first gradient on {reachable:.4f} s")
    )
    print(
        f"{'':16}{'median s':>9}{'quartiles':>18}{'cpu s':>9}{'steps':>6}{'speed of DDP':>20}"
        + ("" if real else f"{'of limit':>10}{'from 1st':>10}")
    )
    base = told["seconds"]["ddp"] if "ddp" in told["seconds"] else next(iter(told["seconds"].values()))
    for name, seconds in told["seconds"].items():
        median = statistics.median(seconds)
        low, _, high = statistics.quantiles(seconds, n=4)
        ratio = statistics.median(base) / median
        # Spread of the ratio between steps of the same turn and position.
        pairs = [a / b for a, b in zip(base, seconds, strict=False)]
        least, _, most = statistics.quantiles(pairs, n=4)
        shares = "" if real else f"{limit / median:10.1%}{reachable / median:10.1%}"
        print(
            f"{name:16}{median:9.4f}{low:9.4f}{high:9.4f}{told['cpu_seconds'][name]:9.4f}{len(seconds):6}{ratio:8.3f} ({least:.3f}-{most:.3f}){shares}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", action="append", metavar="HxR@RATE", help="hosts, ranks of each, rate (several times)"
    )
    parser.add_argument("--workload", choices=["tensors", "resnet50", "cnn", "digits"], default="tensors")
    parser.add_argument("--contenders", default="ddp,ddp:4,ours", help="see scripts/averaging_steps.py")
    parser.add_argument("--backward", type=float, default=0.2, metavar="SECONDS", help="what is emulated")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7, help="timed steps of a turn")
    options = parser.parse_args()
    contenders = options.contenders.split(",")
    for shape in options.shape or ["4x1@1gbit", "4x2@1gbit", "2x4@1gbit"]:
        match = re.fullmatch(r"(\d+)x(\d+)@(\w+)", shape)
        if match is None:
            parser.error(f"--shape {shape}: give such as 4x1@1gbit")
        hosts = int(match[1])
        with Cluster(hosts, slots=int(match[2]), rate=match[3]) as cluster:
            measured = wire(cluster)
            told = steps(cluster, [name for name in contenders if name != "horovod"], options)
            if "horovod" in contenders and find_spec("horovod"):
                others = steps(cluster, ["horovod"], options)
                for key in ("seconds", "cpu_seconds"):
                    told[key].update(others[key])
            elif "horovod" in contenders:
                print("horovod is not installed: scripts/build-horovod")
        table(f"{shape} {options.workload}", measured, told, hosts, options.workload in ("cnn", "digits"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
