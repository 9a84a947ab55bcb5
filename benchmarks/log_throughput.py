"""Lines per second from the ranks to the terminal and the logs: distrib-launch against mpirun.

    python benchmarks/log_throughput.py [--ranks 8] [--lines 100000]

Every rank prints its lines as fast as it can. The result counts the lines at the launcher's standard output, a file.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
SCRIPT = """
import os, sys
rank = os.environ.get("RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
lines = int(sys.argv[1])
for start in range(0, lines, 100):
    sys.stdout.write("".join(f"line {n} of rank {rank} {'x' * 40}\\n" for n in range(start, start + 100)))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--lines", type=int, default=100_000, help="lines of each rank")
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    total = options.ranks * options.lines
    print(f"{options.ranks} ranks x {options.lines} lines of 60 bytes, {options.repeat} turns each")
    print(f"{'':36}{'seconds':>9}{'lines/s':>11}{'lines lost':>12}{'torn or mixed':>15}")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "print_lines.py"
        script.write_text(SCRIPT)
        python = [str(BIN / "python"), str(script), str(options.lines)]
        launch = [str(BIN / "distrib-launch"), "-np", str(options.ranks), "--run-dir", f"{folder}/run"]
        mpirun = [str(BIN / "mpirun"), "--allow-run-as-root", "--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none",
                  "-np", str(options.ranks), "--output", "tag"]  # fmt: skip
        contenders = {
            "distrib-launch": [*launch, *python[1:]],
            "distrib-launch --no-dedup": [*launch, "--no-dedup", *python[1:]],
            "mpirun --output tag": [*mpirun, *python],
        }
        for name, command in contenders.items():
            taken = []
            for _ in range(options.repeat):
                out = Path(folder) / "out"
                begun = time.monotonic()
                with out.open("wb") as file:
                    code = subprocess.run(command, stdout=file, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
                taken.append(time.monotonic() - begun)
                if code.returncode:
                    sys.exit(f"{name}: {code}")
            seen = [line for line in out.read_text().splitlines() if line]
            expected = {f"line {n} of rank {r} {'x' * 40}" for r in range(options.ranks) for n in range(options.lines)}
            whole = {line.partition("line ")[1] + line.partition("line ")[2] for line in seen} & expected
            seconds = sorted(taken)[len(taken) // 2]
            print(
                f"{name:36}{seconds:>9.2f}{total / seconds:>11,.0f}{total - len(whole):>12,}{len(seen) - len(whole):>15,}"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
