"""Parameter server throughput against MPI and torch.distributed.rpc; stragglers, faults and convergence.

    python benchmarks/parameter_server.py goodput [--size 10x161] [--servers 0,1,2,4] [--peers]
    python benchmarks/parameter_server.py memory|unlimited [--size 100x161] [--turns 5]
    python benchmarks/parameter_server.py straggler|convergence|equality|idle
    python benchmarks/parameter_server.py kill-worker|kill-server|cut [--times 20]

Runs on the virtual cluster (root, iproute2, sshd, iperf3). All hosts share this machine's cores, so the machine must
be idle. Steps of `goodput` compute nothing; limits come from the best of three rates that iperf3 measures at the start.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.virtual_cluster import Cluster

ROOT = Path(__file__).parent.parent
LAUNCH = Path(sys.executable).parent / "distrib-launch"
PUSH_PULL = ROOT / "benchmarks/scripts/push_pull.py"
PEERS = ROOT / "benchmarks/scripts/push_pull_peers.py"
LESSONS = ROOT / "tests/scripts/asynchronous.py"
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
GOAL = 0.92

WAYS: dict[str, list[str]] = {
    "sync": [],
    "async": ["--mode", "async"],
    "S=4": ["--mode", "async", "--staleness", "4"],
    "uncorrected": ["--mode", "async", "--no-momentum-correction"],
    "no-stale-rate": ["--mode", "async", "--no-stale-rate"],
    "compensated": ["--mode", "async", "--delay-compensation", "0.04"],
}
"""Options of the convergence runs; the first is the reference."""


def wire(cluster: Cluster, seconds: int = 3, streams: int = 1) -> float:
    """Return payload bytes per second from n1 to n2, measured by iperf3."""
    with cluster.popen("n2", ["iperf3", "-s", "-1"]) as server:
        time.sleep(0.3)
        words = ["iperf3", "-c", "n2", "-t", str(seconds), "-O", "1", "-P", str(streams), "-J"]
        told = json.loads(cluster.run("n1", words).stdout)
        server.wait(10)
    return float(told["end"]["sum_received"]["bits_per_second"]) / 8


def run(cluster: Cluster, hosts: str, *words: object) -> tuple[dict[int, list[dict[str, Any]]], str]:
    """Launch on n1. Return the JSON lines of every rank, and the launcher's messages."""
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder, "hosts.txt")
        listed.write_text(hosts)
        command = [str(LAUNCH), "--no-preflight", "--run-dir", f"{folder}/run", "-H", str(listed), *map(str, words)]
        done = cluster.run("n1", command, env=ENVIRONMENT, timeout=80)
        lines = {
            int(path.stem): [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
            for path in Path(folder, "run/ranks").glob("*.out")
        }
    return lines, done.stderr


def goodput(size: str, servers: list[int], peers: bool, seconds: float, workers: int) -> bool:
    """Compare steps that only push and pull with the network limits of BytePS (OSDI 2020)."""
    megabytes, tensors = size.split("x")
    good = True
    with Cluster(workers + max(servers), rate="1gbit") as cluster:
        rate = max(wire(cluster) for _ in range(3))
        print(f"{size} (MB x tensors), {workers} workers, wire {rate * 8e-6:.0f} Mb/s")
        print(f"{'':24}{'servers':>9}{'step ms':>9}{'limit ms':>10}{'goodput':>9}")
        for count in servers:
            total = float(megabytes) * 1e6
            limit = max(total, workers * total / count) / rate if count else 2 * (workers - 1) * total / workers / rate
            names = cluster.hosts
            lines = [f"{name} slots=1\n" for name in names[:workers]]
            apart = [f"{name} slots=1 role=server\n" for name in names[workers : workers + count]]
            cases: list[tuple[str, str, list[object]]] = [
                ("distrib", "".join(lines + apart), ["--mode", "async", PUSH_PULL, megabytes, tensors, seconds])
            ]
            if peers:
                every = "".join(f"{name} slots=1\n" for name in names[: workers + count])
                cases += [(way, every, [PEERS, way, workers, count, megabytes, seconds]) for way in ("mpi", "rpc")]
            for name, hosts, words in cases:
                told, said = run(cluster, hosts, *words)
                steps = [told[rank][-1]["step_seconds"] for rank in range(workers) if told.get(rank)]
                if len(steps) < workers:
                    print(f"{name:24}{count or 'beside':>9}   did not run: {_last_error(said)}")
                    good &= name != "distrib"
                    continue
                step = statistics.mean(steps)
                if name == "distrib":
                    good &= limit / step >= GOAL
                print(
                    f"{name:24}{count or 'beside':>9}{step * 1e3:9.1f}{limit * 1e3:10.1f}{limit / step:9.1%}",
                    flush=True,
                )
    return good


def _last_error(said: str) -> str:
    lines = [line for line in said.splitlines() if "error" in line.lower()]
    return lines[0][:150] if lines else said.strip()[-150:]


def memory(size: str, seconds: float, turns: int) -> bool:
    """Compare one worker and one server on one host with the rate of a memory copy, in alternating turns."""
    megabytes, tensors = size.split("x")
    copies, ours = [], []
    for _ in range(turns):
        copies.append(_copy_rate(float(megabytes)))
        with tempfile.TemporaryDirectory() as folder:
            command = [str(LAUNCH), "-np", "1", "--run-dir", f"{folder}/run", "--mode", "async", str(PUSH_PULL)]
            done = subprocess.run(
                [*command, megabytes, tensors, str(seconds)], env={**os.environ, **ENVIRONMENT}, capture_output=True,
                text=True,
            )  # fmt: skip
        step = json.loads(re.sub(r"^\[.*?\] ", "", done.stdout.strip().splitlines()[-1]))["step_seconds"]
        ours.append(2 * float(megabytes) * 1e6 / step)
    return _print_share(size, ours, "a memory copy", copies, 0.3 if float(megabytes) >= 100 else 0.2)


def _copy_rate(megabytes: float) -> float:
    """Return the bytes per second that one thread copies from tensor to tensor."""
    import torch

    torch.set_num_threads(1)
    source = torch.ones(int(megabytes * 1e6) // 4)
    target = torch.empty_like(source)
    target.copy_(source)
    begun, copies = time.perf_counter(), 0
    while time.perf_counter() - begun < 1:
        target.copy_(source)
        copies += 1
    return copies * source.numel() * 4 / (time.perf_counter() - begun)


def _print_share(size: str, ours: list[float], name: str, theirs: list[float], goal: float) -> bool:
    share = statistics.median(ours) / statistics.median(theirs)
    print(
        f"{size}: pushed and pulled {statistics.median(ours) * 1e-9:.2f} GB/s ({min(ours) * 1e-9:.2f} to "
        f"{max(ours) * 1e-9:.2f}), {name} {statistics.median(theirs) * 1e-9:.2f} GB/s ({min(theirs) * 1e-9:.2f} to "
        f"{max(theirs) * 1e-9:.2f}): {share:.0%} of medians, at least {goal:.0%} expected",
        flush=True,
    )
    return share >= goal


def unlimited(size: str, seconds: float, turns: int) -> bool:
    """Compare a worker and a server on two hosts without a rate limit with iperf3, with 1 and 4 streams."""
    megabytes, tensors = size.split("x")
    rates: dict[int, list[float]] = {1: [], 4: []}
    ours = []
    with Cluster(2) as cluster:
        for _ in range(turns):
            for streams, seen in rates.items():
                seen.append(wire(cluster, streams=streams))
            words = ["--mode", "async", PUSH_PULL, megabytes, tensors, seconds]
            told, said = run(cluster, "n1 slots=1\nn2 slots=1 role=server\n", *words)
            if not told.get(0):
                print(_last_error(said))
                return False
            ours.append(2 * float(megabytes) * 1e6 / told[0][-1]["step_seconds"])
    best = max(rates, key=lambda streams: statistics.median(rates[streams]))
    for streams, seen in rates.items():
        print(f"iperf3, {streams} streams: {statistics.median(seen) * 1e-9:.2f} GB/s")
    return _print_share(size, ours, f"iperf3 with {best} streams", rates[best], 0.6)


def launch_on(cluster: Cluster, folder: str) -> list[str]:
    """Return the command of an asynchronous job on all hosts with full updates, without its own options."""
    hosts = ["-H", str(cluster.hostfile)]
    return [str(LAUNCH), "--no-preflight", "--run-dir", f"{folder}/run", *hosts, "--mode", "async", "--no-stale-rate"]


def idle(seconds: float) -> bool:
    """Measure the CPU time of a server while its workers compute."""
    with Cluster(2, rate="1gbit") as cluster, tempfile.TemporaryDirectory() as folder:
        command = launch_on(cluster, folder)
        job = cluster.popen("n1", [*command, str(LESSONS), "counting", folder, "2", str(seconds)], env=ENVIRONMENT)
        while not Path(folder, "acknowledged.0").exists() and job.poll() is None:
            time.sleep(0.1)
        server = _process(cluster, "n1", "server")
        time.sleep(1.0)
        before, begun = _cpu_seconds(server), time.monotonic()
        time.sleep(seconds - 2)
        share = (_cpu_seconds(server) - before) / (time.monotonic() - begun)
        job.communicate(timeout=60)
    print(f"an idle server uses {share:.2%} of a core")
    return share < 0.02


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def straggler(workers: int, seconds: float) -> bool:
    """Slow one worker by 2 and by 10; steps of emulated accelerators sleep."""
    good = True
    compute = 0.1
    hosts = "".join(f"n{n} slots=1\n" for n in range(1, workers + 1))
    with Cluster(workers, rate="1gbit") as cluster:
        alone = 0.0
        for slow in (1, 2, 10):
            for bound in ("unbounded", "4") if slow > 1 else ("unbounded",):
                words = ["--mode", "async", "--staleness", bound, LESSONS, "pace", compute, slow, seconds]
                told, said = run(cluster, hosts, *words)
                if len(told) < workers or not all(told[rank] for rank in range(workers)):
                    print(_last_error(said))
                    return False
                steps = {rank: told[rank][-1]["times"] for rank in range(workers)}
                speed = statistics.mean(
                    (len(times) - 1) / (times[-1] - times[0]) for rank, times in steps.items() if rank != workers - 1
                )
                alone = alone or speed
                ahead = _furthest_ahead(list(steps.values()))
                kept = speed / alone
                right = kept >= 0.97 if bound == "unbounded" else ahead <= 4
                good &= right
                print(f"{workers} workers, one {slow:2} x slower, staleness {bound:9}: the others at {kept:6.1%} of their speed, "
                      f"at most {ahead} steps ahead{'' if right else '  NOT as it should be'}", flush=True)  # fmt: skip
    return good


def _furthest_ahead(begins: list[list[float]]) -> int:
    """Return the maximum number of steps that a worker was ahead of the slowest; `begins` are start times.

    All hosts are one machine and share its clock. A worker begins a step after its previous push counted.
    """
    most = 0
    until = min(times[-1] for times in begins)
    for times in begins:
        for step, at in enumerate(times):
            if at < until:
                slowest = min(sum(other <= at for other in others) for others in begins)
                most = max(most, step - (slowest - 1) - 1)
    return max(0, most)


def convergence(ways: list[str], seeds: range, epochs: int) -> bool:
    """Compare validation accuracy of examples/train_cnn.py on 4 workers at equal samples, sync and async."""
    seen: dict[str, list[float]] = {}
    for name in ways:
        words = WAYS[name]
        for seed in seeds:
            with tempfile.TemporaryDirectory() as folder:
                command = [
                    str(LAUNCH),
                    "-np",
                    "4",
                    "--run-dir",
                    f"{folder}/run",
                    *words,
                    str(ROOT / "examples/train_cnn.py"),
                ]
                done = subprocess.run(
                    [*command, "--seed", str(seed), "--epochs", str(epochs)], env={**os.environ, **ENVIRONMENT},
                    capture_output=True, text=True,
                )  # fmt: skip
            found = re.search(r"validation accuracy ([0-9.]+) %", done.stdout)
            if not found:
                sys.exit(f"{name}: {done.stdout[-500:]}{done.stderr[-1500:]}")
            seen.setdefault(name, []).append(float(found[1]))
        told = " ".join(f"{value:.1f}" for value in seen[name])
        error = statistics.stdev(seen[name]) / len(seen[name]) ** 0.5 if len(seen[name]) > 1 else 0.0
        print(f"{name:12} mean {statistics.mean(seen[name]):.2f} % +- {error:.2f}: {told}", flush=True)
    base = statistics.mean(seen[ways[0]])
    return all(statistics.mean(found) >= base - 0.3 for found in seen.values())


def equality() -> bool:
    """Compare parameters after 50 steps on 3 ranks: DDP against servers with staleness 0."""
    import torch

    good = True
    for optimizer in ("sgd", "adamw"):
        states = []
        with tempfile.TemporaryDirectory() as folder:
            for mode in ([], ["--mode", "async", "--staleness", "0", "--servers", "2"]):
                path = f"{folder}/{len(states)}.pt"
                command = [
                    str(LAUNCH),
                    "-np",
                    "3",
                    "--run-dir",
                    f"{folder}/run",
                    *mode,
                    str(LESSONS),
                    "fifty",
                    optimizer,
                    path,
                ]
                subprocess.run(command, env={**os.environ, **ENVIRONMENT}, capture_output=True, check=True)
                states.append(torch.load(path, weights_only=True)["states"]["model"])
        names = [name for name in states[0] if "running" not in name and "num_batches" not in name]
        apart = max((states[0][name] - states[1][name]).abs().max().item() for name in names)
        good &= apart < 1e-5
        print(f"{optimizer}: parameters after 50 steps are {apart:.1e} apart")
    return good


# -- faults -----------------------------------------------------------------------------------------------------------


def faults(kind: str, times: int, seed: int) -> bool:
    """Kill or disconnect at random, and check the servers' final values: each worker counts its own elements."""
    chance = random.Random(seed)
    good, taken = 0, []
    with Cluster(3, rate="1gbit") as cluster:
        for turn in range(times):
            host = chance.choice(cluster.hosts[1:] if kind == "cut" else cluster.hosts)
            problem, seconds = _fault(cluster, kind, host, chance.uniform(0.1, 3.0))
            good += not problem
            taken.append(seconds)
            print(
                f"{kind} {turn + 1}/{times} on {host}: {problem or 'as it should be'}, goes on after {seconds:.1f} s",
                flush=True,
            )
    print(f"{kind}: {good} of {times} as it should be; everybody goes on after {statistics.median(taken):.1f} s (median), "
          f"{max(taken):.1f} s at most")  # fmt: skip
    return good == times


def _fault(cluster: Cluster, kind: str, host: str, moment: float) -> tuple[str, float]:
    """Return the error, and the seconds from the fault until every live worker took another two steps."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--replicas", "1"] if kind == "kill-server" else []
        command = launch_on(cluster, folder)
        job = cluster.popen("n1", [*command, *words, str(LESSONS), "counting", folder, "100", "0.05"], env=ENVIRONMENT)
        workers = range(len(cluster.hosts))
        while len(_acknowledged(folder)) < len(workers) and job.poll() is None:
            time.sleep(0.05)
        time.sleep(moment)
        begun = time.monotonic()
        dead = cluster.hosts.index(host) if kind == "kill-worker" else None
        if kind == "cut":
            cluster.cut(host)
        else:
            os.kill(_process(cluster, host, kind.removeprefix("kill-")), signal.SIGKILL)
        before = _acknowledged(folder)
        if kind == "cut":
            time.sleep(10)
            cluster.restore(host)
        while job.poll() is None:
            now = _acknowledged(folder)
            if all(now[w] >= min(before[w] + 2, 100) for w in workers if w != dead):
                break
            if time.monotonic() - begun > 90:
                job.terminate()
                _, said = job.communicate(timeout=30)
                return f"nobody goes on: {before} {now}; {said[-1000:]}", 90.0
            time.sleep(0.02)
        seconds = time.monotonic() - begun
        try:
            _, said = job.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            job.kill()
            return "the job does not end", seconds
        result = json.loads(Path(folder, "run/result.json").read_text())
        if result["status"] != "succeeded":
            return f"{result['status']}: {_last_error(said)}", seconds
        return _miscounted(folder, len(workers)), seconds


def _acknowledged(folder: str) -> dict[int, int]:
    return {int(path.suffix[1:]): int(path.read_text() or 0) for path in Path(folder).glob("acknowledged.*")}


def _miscounted(folder: str, workers: int) -> str:
    """Return an error if an element holds another number of updates than its worker's acknowledged steps.

    A finished worker has recorded all its steps. Any other incarnation may have missed one record. A restarted worker
    may train while the values are fetched, so its records are read before and after.
    """
    import torch

    finished = [int(path.suffix[1:]) for path in Path(folder).glob("noted.*")]
    lives = {int(path.suffix[1:]): len(path.read_text()) for path in Path(folder).glob("lives.*")}
    for rank in finished:
        before, after = json.loads(Path(folder, f"noted.{rank}").read_text())
        for values in torch.load(Path(folder, f"held.{rank}.pt"), weights_only=True).values():
            for worker in range(workers):
                low, high = values[worker::workers].min().item(), values[worker::workers].max().item()
                steps = before.get(str(worker), 0)
                most = after.get(str(worker), 0) + lives.get(worker, 0) - (worker in finished)
                if not steps <= low <= high <= most:
                    return f"worker {worker} had {steps} steps acknowledged, the servers hold {low:g} to {high:g}"
    return "" if finished else "no worker reached the end"


def _process(cluster: Cluster, host: str, what: str) -> int:
    """Return the process ID of a host's worker or server."""
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:  # `ip netns pids` may miss a process while other processes start and exit
        for pid, command in cluster.processes(host).items():
            _, is_rank, program = command.partition("run_script.py ")
            if is_rank and program.startswith("-m distrib.training.parameter_server") == (what == "server"):
                return pid
        time.sleep(0.05)
    raise RuntimeError(f"no {what} on {host}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = ["goodput", "memory", "unlimited", "idle", "straggler", "convergence", "equality"]
    parser.add_argument("part", choices=[*kinds, "kill-worker", "kill-server", "cut"])
    parser.add_argument("--size", default="10x161", help="megabytes x tensors")
    parser.add_argument("--servers", default="0,1,2,4", help="dedicated servers; 0: one beside every worker")
    parser.add_argument("--workers", type=int, help="of goodput (4) or straggler (8)")
    parser.add_argument("--peers", action="store_true", help="measure MPI and torch.distributed.rpc too")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    parser.add_argument("--turns", type=int, default=5, help="of memory and unlimited")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=5, help="how many, from --seed on")
    parser.add_argument("--ways", default="sync,async,S=4", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()
    servers = [int(part) for part in options.servers.split(",")]
    good = {
        "goodput": lambda: goodput(options.size, servers, options.peers, options.seconds, options.workers or 4),
        "memory": lambda: memory(options.size, options.seconds, options.turns),
        "unlimited": lambda: unlimited(options.size, options.seconds, options.turns),
        "idle": lambda: idle(max(10.0, options.seconds)),
        "straggler": lambda: straggler(options.workers or 8, options.seconds),
        "equality": equality,
        "convergence": lambda: convergence(
            options.ways.split(","), range(options.seed, options.seed + options.seeds), options.epochs
        ),
    }.get(options.part, lambda: faults(options.part, options.times, options.seed))()
    print("as it should be" if good else "NOT as it should be")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
