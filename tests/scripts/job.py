"""Run a small job whose ranks follow their arguments: `job.py [--mpi] RANK:WHAT ...`. Other ranks wait or finish.

The script uses only the environment (and MPI with --mpi), and therefore starts fast.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

arguments = sys.argv[1:]
rank = int(os.environ["RANK"])
if "--mpi" in arguments:
    arguments.remove("--mpi")
    import mpi4py

    mpi4py.rc.finalize = False
    from mpi4py import MPI

    assert rank == MPI.COMM_WORLD.rank
    assert int(os.environ["WORLD_SIZE"]) == MPI.COMM_WORLD.allreduce(1)
orders = dict(item.split(":", 1) for item in arguments)
order = orders.get(str(rank), orders.get("*", "finish"))
ignoring = Path(os.environ.get("DISTRIB_RUN_DIR", "."), "ignoring")

if order == "raise-then":
    while not ignoring.exists():
        time.sleep(0.05)
if order.startswith("raise"):
    raise RuntimeError(f"boom in rank {rank}")
if order.startswith("exit="):
    sys.exit(int(order[5:]))
if order.startswith("signal="):
    os.kill(os.getpid(), int(order[7:]))
if order == "kill-parent":
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
if order == "environment":
    print(json.dumps({"argv": sys.argv, "env": dict(os.environ), "cwd": str(Path.cwd())}))
if order.startswith("sleep="):
    print(f"rank {rank} sleeps", flush=True)
    time.sleep(float(order[6:]))
if order == "ignore":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ignoring.touch()
    print(f"rank {rank} ignores", flush=True)
    time.sleep(60)
if order == "children":
    # One child in the session, one in its own session, and one with an empty environment in its own session.
    session = os.environ.get("TEST_SESSION_OF_DISTRIB", "0")
    subprocess.Popen(["sleep", f"61.{session}"])
    subprocess.Popen(["sleep", f"62.{session}"], start_new_session=True)
    subprocess.Popen(["sleep", f"63.{session}"], env={})
    print(f"rank {rank} has children", flush=True)
    time.sleep(60)
if order.startswith("lines="):
    for number in range(int(order[6:])):
        print(f"line {number} of rank {rank} " + "x" * 40)
if "--mpi" in sys.argv:
    MPI.Finalize()
print(f"rank {rank} done")
