"""Failure rate of MPI_Init under Slurm, for each kind of SLURM_PMIX_FENCE; the kinds alternate.

    python benchmarks/slurm_starts.py [--seconds 300] [--kinds default,tree,ring]

Runs on the virtual cluster with Debian's Slurm (see tests/virtual_cluster/slurm.py). The failures occur on busy machines: run
several instances at once.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.virtual_cluster.slurm import SlurmCluster

RANKS = """\
import ctypes
mpi = ctypes.CDLL("libmpi.so.40", mode=ctypes.RTLD_GLOBAL)
there, all_there = ctypes.c_int(1), ctypes.c_int()
names = ("ompi_mpi_int", "ompi_mpi_op_sum", "ompi_mpi_comm_world")
int_, sum_, world = (ctypes.addressof(ctypes.c_char.in_dll(mpi, name)) for name in names)
mpi.MPI_Init_thread(None, None, 3, ctypes.byref(ctypes.c_int()))
mpi.MPI_Allreduce(ctypes.byref(there), ctypes.byref(all_there), 1, *map(ctypes.c_void_p, (int_, sum_, world)))
mpi.MPI_Finalize()
assert all_there.value == 6
"""
LIMIT_SECONDS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--kinds", default="default,tree,ring")
    options = parser.parse_args()
    starts = dict.fromkeys(options.kinds.split(","), 0)
    failed = dict(starts)
    cluster = SlurmCluster(3, slots=2)
    prefix = Path(sys.executable).parent.parent
    common = {
        "LD_LIBRARY_PATH": f"{prefix}/lib", "OPAL_PREFIX": str(prefix), "OMPI_MCA_mpi_yield_when_idle": "1",
        "OMPI_MCA_btl_tcp_if_include": "198.18.0.0/16",
    }  # fmt: skip
    srun = ["srun", "--overlap", "--overcommit", "-N3", "-n6", "--mpi=pmix", "--cpu-bind=none", "--kill-on-bad-exit=0"]
    try:
        cluster.up()
        allocation = cluster.popen("n1", ["salloc", "-N3", "--ntasks-per-node=2", "sleep", "86400"])
        while not (jobs := cluster.jobs()) or not jobs[0].endswith("RUNNING"):
            time.sleep(0.2)
        step = [
            "timeout",
            str(LIMIT_SECONDS),
            *srun,
            f"--jobid={jobs[0].split()[0]}",
            sys.executable,
            "-S",
            "-c",
            RANKS,
        ]
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            for kind in starts:
                fence = {} if kind == "default" else {"SLURM_PMIX_FENCE": kind}
                starts[kind] += 1
                failed[kind] += cluster.run("n1", step, env={**common, **fence}).returncode != 0
        allocation.terminate()
    finally:
        cluster.down()
    print(f"{'SLURM_PMIX_FENCE':18}{'starts':>8}{'failed':>8}")
    for kind in starts:
        print(f"{kind:18}{starts[kind]:8}{failed[kind]:8}")


if __name__ == "__main__":
    main()
