"""Many ranks on one machine that print a line and end: distrib-launch against raw mpirun.

    python benchmarks/many_ranks.py [--ranks 100] [--idle 0 3000] [--turns 5] [--other PATH/distrib-launch]

The launchers alternate. `--idle` processes sleep beside the job; `--other` adds the distrib-launch of another version.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
IDLE = "import os, signal\nfor _ in range({count}):\n    if not os.fork():\n        signal.pause()\nprint(flush=True)\nsignal.pause()\n"


def idle_processes(count: int) -> subprocess.Popen[bytes]:
    """Start a process with `count` children that sleep, in a session of their own."""
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", IDLE.format(count=count)], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout
    process.stdout.readline()
    return process


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=100)
    parser.add_argument("--idle", type=int, nargs="+", default=[0, 3000], help="numbers of idle processes")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--other", type=Path, help="distrib-launch of another version")
    options = parser.parse_args()
    print(f"{options.ranks} ranks that print a line, {options.turns} turns each")
    print(f"{'idle processes':>14}  {'launcher':30}{'succeeded':>10}{'median s':>10}{'max s':>8}{'of mpirun':>11}")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "hello.py"
        script.write_text("print('hello')\n")
        launch = ["-H", f"localhost:{options.ranks}", "--run-dir", f"{folder}/run", str(script)]
        commands = {
            "mpirun": [str(BIN / "mpirun"), "--allow-run-as-root", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none",
                       "-np", str(options.ranks), str(BIN / "python"), str(script)],
            "distrib-launch": [str(BIN / "distrib-launch"), "--oversubscribe", *launch],
        }  # fmt: skip
        if options.other:
            commands["other distrib-launch"] = [str(options.other), *launch]
        for count in options.idle:
            idle = idle_processes(count)
            seconds: dict[str, list[float]] = {name: [] for name in commands}
            succeeded = dict.fromkeys(commands, 0)
            try:
                for _ in range(options.turns):
                    for name, command in commands.items():
                        begun = time.monotonic()
                        done = subprocess.run(
                            command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300
                        )
                        seconds[name].append(time.monotonic() - begun)
                        succeeded[name] += done.returncode == 0 and "hello" in done.stdout
            finally:
                os.killpg(idle.pid, signal.SIGKILL)
                idle.wait()
            base = statistics.median(seconds["mpirun"])
            for name, taken in seconds.items():
                median = statistics.median(taken)
                failed += options.turns - succeeded[name]
                print(
                    f"{count:>14}  {name:30}{succeeded[name]:>10}{median:>10.2f}{max(taken):>8.2f}{median / base:>11.2f}",
                    flush=True,
                )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
