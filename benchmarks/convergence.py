"""Time to 97 % accuracy on the digits over a slow network: each strategy against torch's DistributedDataParallel.

    python benchmarks/convergence.py run ddp local --seeds 0 1 [--results FILE]     some contenders; results are kept
    python benchmarks/convergence.py table [--results FILE]

The cluster has 4 virtual hosts with one rank each at 100 Mb/s (root, iproute2, sshd). Model, data, batches of 16,
schedule and number of epochs are the same for all. Seconds and bytes exclude evaluation. Each epoch ends with the
accuracy on 1,000 validation images. A run takes up to a minute. Ranks compute on this machine's cores, and traffic
crosses shaped links.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.virtual_cluster import Cluster

LAUNCH = Path(sys.executable).parent / "distrib-launch"
SCRIPT = Path(__file__).parent / "scripts" / "digits_epochs.py"
GOAL = 0.97
FIRST = "ddp"

CONTENDERS: dict[str, tuple[str, list[str], list[str]]] = {
    "ddp": ("torch's DDP as it comes", [], ["--plain"]),
    "sync": ("--mode sync", [], []),
    "accumulate": ("--accumulate 4", ["--accumulate", "4"], []),
    "bf16": ("--gradients bf16", ["--gradients", "bf16"], []),
    "int8": ("--gradients int8", ["--gradients", "int8"], []),
    "powersgd": ("--gradients powersgd:4", ["--gradients", "powersgd:4"], []),
    "topk": ("--gradients topk:0.01", ["--gradients", "topk:0.01"], []),
    "average": ("--mode local --inner-steps 16 --outer average", ["--mode", "local", "--inner-steps", "16", "--outer", "average"], []),
    "diloco": ("--mode local --inner-steps 16", ["--mode", "local", "--inner-steps", "16"], []),
    "streaming": ("the same, --fragments 4 --overlap-steps 4", ["--mode", "local", "--inner-steps", "16", "--fragments", "4", "--overlap-steps", "4"], []),
}  # fmt: skip


def run(cluster: Cluster, name: str, seed: int, epochs: int, extra: list[str]) -> list[dict[str, Any]]:
    """Run one training and return its epochs."""
    _, options, arguments = CONTENDERS[name]
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            LAUNCH,
            "-H",
            cluster.hostfile,
            "--run-dir",
            f"{scratch}/run",
            "--no-preflight",
            *options,
            SCRIPT,
            *arguments,
        ]
        command += ["--seed", str(seed), "--epochs", str(epochs), *extra]
        done = cluster.run("n1", command, env={"OMP_NUM_THREADS": "1"}, timeout=300)
        if done.returncode:
            sys.exit(f"{name}, seed {seed}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if '"epoch"' in line]


def goal_seconds(epochs: list[dict[str, Any]]) -> float | None:
    """Return the seconds of training until the accuracy was reached, or None."""
    return next((epoch["seconds"] for epoch in epochs if epoch["accuracy"] >= GOAL), None)


def table(results: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    print(f"4 hosts x 1 at 100 Mb/s; medians over seeds, final accuracy as mean; goal {GOAL:.0%}")
    print(f"{'':50}{'seeds':>6}{'KB/step':>9}{'ms/step':>9}{'s to goal':>11}{'spread':>15}{'of DDP':>8}{'final %':>9}")
    base = None
    for name, (title, _, _) in CONTENDERS.items():
        if not (runs := list(results.get(name, {}).values())):
            continue
        last = [epochs[-1] for epochs in runs]
        goals = [goal_seconds(epochs) for epochs in runs]
        reached = [seconds for seconds in goals if seconds is not None]
        median = statistics.median(reached) if len(reached) == len(runs) else None
        base = median if name == FIRST else base
        print(
            f"{title:50}{len(runs):>6}{statistics.median(e['sent_bytes'] / e['steps'] for e in last) / 1e3:>9.0f}"
            f"{1e3 * statistics.median(e['seconds'] / e['steps'] for e in last):>9.1f}"
            + (f"{median:>11.2f}" if median else f"{f'{len(reached)} of {len(runs)}':>11}")
            + (f"{f'{min(reached):.2f} - {max(reached):.2f}' if reached else '':>15}")
            + (f"{median / base:>8.2f}" if median and base else f"{'':>8}")
            + f"{100 * statistics.mean(e['accuracy'] for e in last):>9.2f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("names", nargs="*", choices=[[], *CONTENDERS], metavar="STRATEGY", help=", ".join(CONTENDERS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--lr", type=float, help="another learning rate than the script's")
    parser.add_argument("--results", type=Path, default=Path("convergence.json"))
    options = parser.parse_args()
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    if options.what == "run":
        extra = ["--lr", str(options.lr)] if options.lr else []
        with Cluster(4, slots=1, rate=options.rate) as cluster:
            for seed in options.seeds:
                for name in options.names or CONTENDERS:
                    epochs = run(cluster, name, seed, options.epochs, extra)
                    results.setdefault(name, {})[str(seed)] = epochs
                    options.results.write_text(json.dumps(results))
                    print(f"{name}, seed {seed}: {epochs[-1]}", flush=True)
    table(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
