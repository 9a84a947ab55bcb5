"""Many launches of a job that does nothing: success, leftovers, and time against mpirun.

    python benchmarks/soak.py [--launches 200] [--ranks 4] [--job empty|mpi|torch]

Launches of distrib-launch and of raw mpirun alternate. Leftovers are counted on the whole machine: processes,
listening ports, entries of the temporary directory and of /dev/shm. Run nothing else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOBS = {
    "empty": "",
    "mpi": "from mpi4py import MPI\n",  # joins MPI and leaves it
    "torch": "import distrib\nwith distrib.init():\n    pass\n",  # joins a training job and leaves it
}
BIN = Path(sys.executable).parent


def traces(folder: str) -> dict[str, set[str]]:
    """Return processes, ports and files on the machine, by kind."""
    processes = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if words := (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                    processes.add(f"{entry.name} {words}")
            except OSError:
                continue
    ports = {
        line.split()[1]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        if line.split()[3] == "0A"
    }
    files = {str(p) for p in Path(tempfile.gettempdir()).iterdir() if p.name not in folder}
    return {"processes": processes, "listening ports": ports, "temporary files": files,
            "shared memory": set(os.listdir("/dev/shm"))}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--job", choices=sorted(JOBS), default="mpi", help="what the ranks do (default: mpi)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "noop.py"
        script.write_text(JOBS[options.job])
        run = Path(folder) / "run"
        launch = [str(BIN / "distrib-launch"), "-np", str(options.ranks), "--run-dir", str(run), str(script)]
        mpirun = [str(BIN / "mpirun"), "--allow-run-as-root", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none",
                  "-np", str(options.ranks), str(BIN / "python"), str(script)]  # fmt: skip
        seconds: dict[str, list[float]] = {"distrib-launch": [], "mpirun": []}
        succeeded = dict.fromkeys(seconds, 0)
        for command in (launch, mpirun):  # leftovers of the first launches (caches) are not leaks
            subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
        before = traces(folder)
        for _ in range(options.launches):
            for name, command in (("distrib-launch", launch), ("mpirun", mpirun)):
                begun = time.monotonic()
                try:
                    code = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL, timeout=20).returncode
                except subprocess.TimeoutExpired:
                    code = 1  # mpirun itself hangs at the end of very short jobs
                seconds[name].append(time.monotonic() - begun)
                if name == "distrib-launch":
                    result = json.loads((run / "result.json").read_text())
                    code = code or (result["status"] != "succeeded") or any(r["exit_code"] for r in result["ranks"])
                succeeded[name] += code == 0
        time.sleep(1)
        after = traces(folder)
        fds = len(os.listdir("/proc/self/fd"))
    base = statistics.median(seconds["mpirun"])
    print(f"{options.launches} launches each of a {options.ranks}-rank job ({options.job}) that does nothing")
    print(f"{'':16}{'succeeded':>11}{'median s':>10}{'max s':>8}{'of mpirun':>11}")
    for name, taken in seconds.items():
        median = statistics.median(taken)
        print(f"{name:16}{succeeded[name]:>11}{median:>10.3f}{max(taken):>8.2f}{median / base:>11.2f}")
    leaked = 0
    for kind, now in after.items():
        new = now - before[kind]
        leaked += len(new)
        print(f"left behind, {kind}: {len(new)}" + "".join(f"\n    {item[:150]}" for item in sorted(new)[:5]))
    print(f"file descriptors open in this process: {fds}")
    return 0 if succeeded["distrib-launch"] == options.launches and not leaked else 1


if __name__ == "__main__":
    sys.exit(main())
