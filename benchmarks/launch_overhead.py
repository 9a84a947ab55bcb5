"""Time from the command to the first all-reduce: distrib-launch against raw mpirun and torchrun.

    python benchmarks/launch_overhead.py [--hosts 4] [--slots 2] [--repeat 5]

Runs on the virtual cluster (root, iproute2, sshd). The launchers alternate, so that noise affects all of them
equally.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.virtual_cluster import Cluster

BIN = Path(sys.executable).parent
SCRIPT = Path(__file__).parent / "scripts" / "first_all_reduce.py"


def commands(cluster: Cluster, scratch: Path) -> dict[str, list[str]]:
    """Return each contender's command line for n1."""
    python, slots, hosts = str(BIN / "python"), str(cluster.slots), cluster.hosts
    mpirun = [str(BIN / "mpirun"), "--allow-run-as-root", "--prefix", str(BIN.parent), "--hostfile",
              str(cluster.hostfile), "--map-by", "slot", "--bind-to", "none", "--mca", "mpi_yield_when_idle", "1",
              "-x", "OMP_NUM_THREADS", "-np", str(len(hosts) * cluster.slots)]  # fmt: skip
    launch = [str(BIN / "distrib-launch"), "-H", str(cluster.hostfile), "--run-dir", str(scratch / "run")]
    agents = [
        f"ssh {host} OMP_NUM_THREADS=1 {BIN}/torchrun --nnodes {len(hosts)} --nproc-per-node {slots} --node-rank {i} "
        f"--master-addr n1 --master-port 29500 {SCRIPT} env &"
        for i, host in enumerate(hosts)
    ]
    return {
        "mpirun, script with mpi4py": [*mpirun, python, str(SCRIPT), "mpi"],
        "distrib-launch, the same script": [*launch, str(SCRIPT), "mpi"],
        "distrib-launch, distrib.init()": [*launch, str(SCRIPT), "distrib"],
        "torchrun on every host over ssh": ["sh", "-c", " ".join(agents) + " wait"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    scratch = Path(tempfile.mkdtemp())
    try:
        with Cluster(options.hosts, slots=options.slots, rate="1gbit") as cluster:
            contenders = commands(cluster, scratch)
            seconds: dict[str, list[float]] = {name: [] for name in contenders}
            for turn in range(options.repeat + 1):
                for name, command in contenders.items():
                    begun = time.time()
                    done = cluster.run("n1", command, env={"OMP_NUM_THREADS": "1"}, timeout=120)
                    line = next((part for part in done.stdout.splitlines() if "first all-reduce at" in part), None)
                    if done.returncode or line is None:
                        sys.exit(f"{name}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
                    if turn:  # the first turn warms the caches
                        seconds[name].append(float(line.split()[-1]) - begun)
    finally:
        shutil.rmtree(scratch)
    base = statistics.median(next(iter(seconds.values())))
    print(
        f"{options.hosts} hosts x {options.slots} ranks, from command to first all-reduce, {options.repeat} turns each"
    )
    print(f"{'':34}{'median s':>10}{'min':>8}{'max':>8}{'over mpirun':>14}")
    for name, taken in seconds.items():
        median = statistics.median(taken)
        print(f"{name:34}{median:>10.2f}{min(taken):>8.2f}{max(taken):>8.2f}{median - base:>+13.2f}s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
