"""Fifteen kinds of fault in a job on 4 hosts x 2 ranks: exit code, named rank or host, time to the message, leftovers.

    python benchmarks/faults.py [--turns 10] [--busy 2] [--kind segfault]

Runs on the virtual cluster (root, iproute2, sshd). `--busy` processes compute beside the job. The failing rank changes
with the turn; it is not on the launcher's host. A fault counts from the moment at which the rank causes it, or this script does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from distrib.utils import signals
from tests.virtual_cluster import Cluster

BIN = Path(sys.executable).parent
SCRIPT = Path(__file__).parent / "scripts" / "faulty.py"
HOSTS, SLOTS = 4, 2
PROMPT_SECONDS, LEFT_SECONDS = 3.0, 10.0


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of fault."""

    name: str
    exit_code: int
    inflict: Callable[[Cluster, int], None] | None = None
    """Inflicts the fault from outside, on the host of a rank; None: the rank does it."""
    options: tuple[str, ...] = ()
    names_host: bool = False
    """True if the host is to be named, as all its ranks fail together."""
    slow: bool = False
    """True if the launcher must wait before it can know, such as for a host that is silent."""


def _kill(cluster: Cluster, rank: int, word: str) -> None:
    host = cluster.hosts[rank // SLOTS]
    number = min(pid for pid, command in cluster.processes(host).items() if word in command)
    os.kill(number, signal.SIGKILL)


KINDS = (
    Kind("exception", 1),
    Kind("import", 1),
    Kind("exit", 7),
    Kind("os-exit", 9),
    Kind("sigkill", 137),
    Kind("segfault", 139),
    Kind("abort", 134),
    Kind("sigterm", 143),
    Kind("thread-exit", 5),
    Kind("loader", 1),
    Kind("nan", 1),
    Kind("hang", 1, options=("--hang-timeout", "8"), slow=True),
    Kind("agent-killed", 1, lambda cluster, rank: _kill(cluster, rank, "distrib_launch.rank_agent"), names_host=True),
    Kind("host-lost", 1, lambda cluster, rank: cluster.lose(cluster.hosts[rank // SLOTS]), names_host=True, slow=True),
    Kind("network-cut", 1, lambda cluster, rank: cluster.cut(cluster.hosts[rank // SLOTS]), names_host=True, slow=True),
)


@dataclasses.dataclass
class Outcome:
    """What one launch with a fault did."""

    code_right: bool
    culprit_right: bool
    seconds: float
    left: int
    report: str


def run(kind: Kind, rank: int, folder: Path) -> Outcome:
    """Launch a job, wait for its fault and for its end."""
    run_dir, moment = folder / "run", folder / "moment"
    moment.unlink(missing_ok=True)
    with Cluster(HOSTS, slots=SLOTS, rate="1gbit") as cluster:
        command = [BIN / "distrib-launch", "-H", cluster.hostfile, "--run-dir", run_dir, *kind.options, SCRIPT, kind.name,
                   str(rank), moment]  # fmt: skip
        process = cluster.popen("n1", command, env={"OMP_NUM_THREADS": "1"})
        lines: list[tuple[float, str]] = []
        reader = threading.Thread(target=lambda: lines.extend((time.time(), line) for line in process.stderr or ()))
        reader.start()
        drain = threading.Thread(target=lambda: process.stdout and process.stdout.read())
        drain.start()
        deadline = time.time() + 120
        while kind.inflict and process.poll() is None and time.time() < deadline and not moment.exists():
            time.sleep(0.05)
        if kind.inflict and moment.exists():
            begun = time.time()
            kind.inflict(cluster, rank)
        try:
            code = process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            code = -1
        reader.join()
        drain.join()
        if not kind.inflict:
            begun = float(moment.read_text()) if moment.exists() else time.time()
        skipped = {cluster.hosts[rank // SLOTS]} if kind.names_host else set()  # sshd's session waits for its link
        left = cluster.left_over(within_seconds=LEFT_SECONDS)
        found = run_dir / "result.json"
        failure = json.loads(found.read_text())["first_failure"] or {} if found.exists() else {}
    host = cluster.hosts[rank // SLOTS]
    message = re.compile(rf"distrib-launch: .*\b{host}\b")
    said = next((when for when, line in lines if when > begun and message.match(line)), lines[-1][0])
    culprit = failure.get("host") == host and (kind.names_host or failure.get("rank") == rank)
    return Outcome(
        code == kind.exit_code, culprit, said - begun, sum(len(p) for h, p in left.items() if h not in skipped),
        f"rank {rank}, exit code {code}: " + failure.get("message", "no failure"),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--busy", type=int, default=2, help="processes that compute beside the job (default: 2)")
    parser.add_argument("--kind", choices=[kind.name for kind in KINDS], action="append")
    options = parser.parse_args()
    signals.raise_on_termination()  # SIGTERM, too, ends the hosts and busy processes
    folder = Path(tempfile.mkdtemp())
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.busy)]
    wrong = 0
    print(f"{HOSTS} hosts x {SLOTS} ranks, {options.turns} turns, {options.busy} busy processes", flush=True)
    print(f"{'fault':14}{'exit code':>11}{'culprit':>9}{'median s':>10}{'max s':>8}{'left':>6}")
    try:
        for kind in (kind for kind in KINDS if not options.kind or kind.name in options.kind):
            seen = [run(kind, SLOTS + turn % (SLOTS * (HOSTS - 1)), folder) for turn in range(options.turns)]
            codes, culprits = sum(one.code_right for one in seen), sum(one.culprit_right for one in seen)
            times, left = [one.seconds for one in seen], sum(one.left for one in seen)
            late = not options.busy and not kind.slow and statistics.median(times) > PROMPT_SECONDS
            print(
                f"{kind.name:14}{f'{codes}/{len(seen)}':>11}{f'{culprits}/{len(seen)}':>9}{statistics.median(times):>10.2f}"
                f"{max(times):>8.2f}{left:>6}{'  late' if late else ''}",
                flush=True,
            )
            bad = [one for one in seen if not (one.code_right and one.culprit_right) or one.left]
            wrong += len(bad) + late
            for one in bad:
                print(f"    {one.report[:160]}", flush=True)
    finally:
        for process in busy:
            process.kill()
        shutil.rmtree(folder)
    print("as it should be" if not wrong else f"NOT as it should be: {wrong}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
