"""Warnings of slow jobs on 4 hosts: a slow link, a late rank, a slow loader, busy CPUs, and healthy runs.

    python benchmarks/slowdown_warnings.py [--turns 5] [--healthy 10] [--kind link]

Runs on the virtual cluster (root, iproute2, sshd). Ranks sleep where a GPU would compute; with `cpus`, two ranks
compute. The slow host changes with the turn. Run nothing else meanwhile. Exit code 1 if a cause was not named, or a healthy run was not silent.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from distrib.utils import signals
from tests.virtual_cluster import Cluster

ROOT = Path(__file__).parent.parent
LAUNCH = Path(sys.executable).parent / "distrib-launch"
SCRIPT = ROOT / "tests/scripts/steps.py"
HOSTS = 4
STEPS, COMPUTE_SECONDS, ELEMENTS = 30, 0.16, 400_000
"""Per step, 160 ms of computing and 1.6 MB of gradients, which need 19 ms at 1 Gb/s."""
BUSY_PER_CORE = 2

CAUSES = {
    "link": ("network-bound", "n{host}"),
    "rank": ("straggler", "rank {rank} on n{host}"),
    "loader": ("for data", "rank {rank}"),
    "cpus": ("busy CPUs", "for a CPU"),
    "healthy": (),
    "healthy-cpus": (),
}
"""Fragments of the warning that each kind must cause."""


def warnings_of(kind: str, turn: int, folder: Path) -> list[str]:
    """Run a job and return its warnings."""
    host = 2 + turn % (HOSTS - 1)
    script = [SCRIPT, STEPS, COMPUTE_SECONDS, ELEMENTS]
    if kind == "rank":
        script.append(f"late:0.16:{host - 1}")
    elif kind == "loader":
        script.append("far:0.08:1")  # a batch of 4 takes two steps
    elif kind.endswith("cpus"):  # ranks that compute, a core each
        script.append("cpu")
    rates = {f"n{host}": "100mbit"} if kind == "link" else {}
    busy = BUSY_PER_CORE * (os.cpu_count() or 1) if kind == "cpus" else 0
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        with Cluster(2 if kind.endswith("cpus") else HOSTS, rate="1gbit", rates=rates) as cluster:
            words = [LAUNCH, "-H", cluster.hostfile, "--run-dir", folder / "run", *script]
            cluster.run("n1", [str(word) for word in words], env={"OMP_NUM_THREADS": "1"}, check=True)
    finally:
        for process in others:
            process.kill()
            process.wait()
    found: list[str] = json.loads((folder / "run/result.json").read_text())["warnings"]
    return found


def is_right(kind: str, turn: int, found: list[str]) -> bool:
    """Return True if the cause and no other is named, or if a healthy run is silent."""
    host = 2 + turn % (HOSTS - 1)
    fragments = [text.format(host=host, rank=host - 1) for text in CAUSES[kind]]
    if kind == "loader":  # all ranks have the same loader
        fragments = fragments[:1]
    return len(found) == bool(fragments) and all(text in found[0] for text in fragments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="runs of each cause (default: 5)")
    parser.add_argument("--healthy", type=int, default=10, help="healthy runs (default: 10)")
    parser.add_argument("--kind", choices=sorted(CAUSES), action="append")
    options = parser.parse_args()
    signals.raise_on_termination()
    wrong = 0
    print("|kind|right|\n|-|-:|")
    for kind in options.kind or CAUSES:
        turns = options.healthy if kind.startswith("healthy") else options.turns
        with tempfile.TemporaryDirectory() as folder:
            found = [warnings_of(kind, turn, Path(folder)) for turn in range(turns)]
        bad = [texts for turn, texts in enumerate(found) if not is_right(kind, turn, texts)]
        wrong += len(bad)
        print(f"|{kind}|{turns - len(bad)} of {turns}|", flush=True)
        for texts in bad:
            print("    " + "\n    ".join(line for text in texts or ["no warning"] for line in text.splitlines()))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
