"""Loss against time and samples: synchronous, asynchronous and bounded staleness, on good and bad hosts and networks.

    python benchmarks/comparison.py run [--seconds 20] [--seeds 3] [--results FILE]    results are kept
    python benchmarks/comparison.py plot FILE.svg [--results FILE]

The cluster has 4 virtual hosts with one worker each (root, iproute2, sshd). They train the examples' CNN on the
digits with batches of 16. A step computes and then pauses for 50 ms, as if it were larger. The pauses keep four
workers from competing for this machine's cores. `job.scale_lr` scales the learning rate by the number of ranks. An
asynchronous update uses its share of that rate.
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
SCRIPT = Path(__file__).parent / "scripts" / "digits_loss.py"
WORKERS, BATCH = 4, 16

PLACES: dict[str, tuple[str, str, list[str]]] = {
    "equal": ("equal hosts, 1 Gb/s", "1gbit", []),
    "slow host": ("one host 3 times slower, 1 Gb/s", "1gbit", ["--slow", "3", "3"]),
    "slow wire": ("equal hosts, 100 Mb/s", "100mbit", []),
}
MODES: dict[str, tuple[list[str], list[str]]] = {
    "synchronous": ([], ["--lockstep"]),
    "asynchronous": (["--mode", "async"], []),
    "at most 4 steps ahead": (["--mode", "async", "--staleness", "4"], []),
}
WINDOW = 25
"""Number of steps of all workers in the moving average of the loss."""


def run(cluster: Cluster, options: list[str], arguments: list[str]) -> list[tuple[float, float]]:
    """Return seconds since the first step began, and loss, of every step of every worker, by time."""
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
        done = cluster.run("n1", [str(word) for word in command], env={"OMP_NUM_THREADS": "1"}, timeout=300)
        if done.returncode:
            sys.exit(f"{options}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
        told = [
            json.loads(line)
            for path in Path(scratch, "run/ranks").glob("*.out")
            for line in path.read_text().splitlines()
            if line.startswith('{"begun"')
        ]
    begun = min(worker["begun"] for worker in told)
    return sorted((at - begun, loss) for worker in told for at, loss in worker["steps"])


def smooth(steps: list[tuple[float, float]]) -> tuple[list[float], list[int], list[float]]:
    """Return seconds, samples and mean loss of the last steps, at each step."""
    losses = [loss for _, loss in steps]
    means = [statistics.fmean(losses[max(0, n - WINDOW) : n]) for n in range(1, len(losses) + 1)]
    return [at for at, _ in steps], [BATCH * n for n in range(1, len(steps) + 1)], means


def when(steps: list[tuple[float, float]], goal: float) -> tuple[float, int] | None:
    """Return the seconds and samples after which the loss was below the goal."""
    for at, samples, loss in zip(*smooth(steps), strict=True):
        if samples > BATCH * WINDOW and loss < goal:
            return at, samples
    return None


def plot(results: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    axes = figure.subplots(2, len(PLACES), sharey=True, squeeze=False)
    for column, (place, (title, _, _)) in enumerate(PLACES.items()):
        for mode in MODES:
            # The median seed, by the number of its samples.
            runs = sorted(results[place][mode].values(), key=len)
            seconds, samples, losses = smooth(runs[len(runs) // 2])
            axes[0][column].plot(seconds, losses, label=mode, linewidth=1)
            axes[1][column].plot(samples, losses, label=mode, linewidth=1)
        axes[0][column].set(title=title, xlabel="seconds", yscale="log")
        axes[1][column].set(xlabel="samples of all workers", yscale="log")
    for row in axes:
        row[0].set_ylabel("training loss")
    axes[0][0].legend()
    figure.savefig(path)


def table(results: dict[str, Any]) -> None:
    """Print steps per second and time to low loss for each place and mode; medians over seeds."""
    goal = 0.3
    print(f"{'':34}{'mode':>24}{'samples/s':>11}{f's to loss {goal}':>16}{'samples to it':>15}{'seeds':>7}")
    for place, (title, _, _) in PLACES.items():
        for mode in MODES:
            if not (runs := list(results.get(place, {}).get(mode, {}).values())):
                continue
            speed = statistics.median(BATCH * len(steps) / steps[-1][0] for steps in runs)
            reached = [found for steps in runs if (found := when(steps, goal))]
            whole = len(reached) == len(runs)
            print(
                f"{title:34}{mode:>24}{speed:11.0f}"
                + (f"{statistics.median(at for at, _ in reached):16.1f}" if whole else f"{'never':>16}")
                + (f"{statistics.median(samples for _, samples in reached):15.0f}" if whole else f"{'':15}")
                + f"{len(runs):7}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "plot"])
    parser.add_argument("picture", nargs="?", type=Path)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=Path("distrib-runs/comparison.json"))
    options = parser.parse_args()
    results: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {}
    if options.what == "run":
        for place, (title, rate, extra) in PLACES.items():
            with Cluster(WORKERS, rate=rate) as cluster:
                for seed in range(options.seeds):
                    for mode, (words, own) in MODES.items():
                        arguments = [*own, *extra, "--seconds", str(options.seconds), "--seed", str(seed)]
                        steps = run(cluster, words, arguments)
                        results.setdefault(place, {}).setdefault(mode, {})[str(seed)] = steps
                        options.results.parent.mkdir(parents=True, exist_ok=True)
                        options.results.write_text(json.dumps(results))
                        print(f"{title}, {mode}, seed {seed}: {len(steps)} steps", file=sys.stderr, flush=True)
    elif options.picture is None:
        parser.error("plot where? give a file such as comparison.svg")
    else:
        plot(results, options.picture)
    table(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
