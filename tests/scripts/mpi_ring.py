"""Send a token round a ring with mpi4py, without distrib."""

from mpi4py import MPI

comm = MPI.COMM_WORLD
passed = comm.sendrecv(comm.rank, dest=(comm.rank + 1) % comm.size, source=(comm.rank - 1) % comm.size)
assert passed == (comm.rank - 1) % comm.size
print(f"rank {comm.rank} of {comm.size} on {MPI.Get_processor_name()}: {comm.allreduce(comm.rank)}")
