"""`python -m distrib.probe SPEC`: a rank of the probe; `distrib-topo probe` starts them.

The first rank of each host measures its links. Others, one for each further GPU or slot, take part in collectives only.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from distrib.cluster.node import name_hosts
from distrib.environment import DISTRIB_ADDRESS, DISTRIB_DEVICE, GROUP_RANK, LOCAL_RANK, WORLD_SIZE
from distrib.probe import host_facts, secondary_networks
from distrib.probe.bench import tcp
from distrib.probe.bench.polling import wait
from distrib.probe.coordinator import Coordinator
from distrib.probe.protocol import HELLO, REPLY, SETUP, TASK, Hello, Leave, Setup, Spec, Task
from distrib.probe.records import Record, decode, encode
from distrib.probe.worker import Worker

START_SECONDS = 60.0
"""So long rank 0 waits for each rank's first word. The others wait IDLE_SECONDS for rank 0, who can then say whom it misses."""

IDLE_SECONDS = 3600.0
"""A rank that hears nothing for so long ends; the launcher ends it sooner when rank 0 is gone."""


def main() -> int:
    """Take part in the probe to its end."""
    spec = msgspec.json.decode(sys.argv[1], type=Spec)
    comm = _start_mpi()
    if comm.size != (planned := int(os.environ[WORLD_SIZE])):
        return _say_alone(comm.size, planned)
    host = spec.present[int(os.environ[GROUP_RANK])]
    hello, listeners = Hello(on_gpu=os.environ.get(DISTRIB_DEVICE, "").startswith("cuda")), {}
    if os.environ[LOCAL_RANK] == "0":
        address = os.environ.get(DISTRIB_ADDRESS, "127.0.0.1")
        known = host_facts.own_facts(host, address)
        listeners = {each: tcp.Listener(each) for each in (address, *secondary_networks.own_addresses(known))}
        ports = {each: listener.port for each, listener in listeners.items()}
        hello = msgspec.structs.replace(hello, facts=known, ports=ports)
    worker = Worker(comm, host, listeners)
    if comm.rank == 0:
        hellos = _meet(comm, hello, spec.present)
        ports = {address: port for each in hellos for address, port in each.ports.items()}
        setup = Setup(token=secrets.token_bytes(tcp.TOKEN_BYTES), ports=ports)
        for rank in range(1, comm.size):
            comm.send(msgspec.msgpack.encode(setup), rank, SETUP)
        worker.setup = setup
        lines = sys.stdin.buffer if spec.resumed else ()
        before = [record for line in lines if (record := decode(line))]
        leader = Coordinator(comm, worker, spec, hellos, _print, before)
        leader.run()
        if leader.silent:
            # MPI's end would wait for that rank, and so would the launcher, but for a rank that fails: that ends the job.
            sys.stdout.flush()
            print(f"{leader.silent} does not answer any more; the probe ends without it", file=sys.stderr, flush=True)
            os._exit(1)
        at_once = leader.at_once
    else:
        comm.send(msgspec.msgpack.encode(hello), 0, HELLO)
        _await(comm, SETUP)
        worker.setup = msgspec.msgpack.decode(comm.recv(source=0, tag=SETUP), type=Setup)
        at_once = _serve(comm, worker)
    _leave(at_once)
    return 0


def _say_alone(started: int, planned: int) -> int:
    """MPI has started each rank as if it were alone; what one measures then would pass for the whole. Returns the exit code."""
    by_mpirun = "OMPI_COMM_WORLD_RANK" in os.environ
    how = "was it another MPI's mpirun?" if by_mpirun else "this Slurm has no PMIx: use --engine mpirun"
    print(f"MPI started {started} of {planned} ranks; {how}", file=sys.stderr, flush=True)
    return 1


def _start_mpi() -> Any:
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    MPI.Init_thread(MPI.THREAD_SERIALIZED)
    return MPI.COMM_WORLD


def _meet(comm: Any, own: Hello, hosts: Sequence[str]) -> list[Hello]:
    """What every rank says of itself, by rank."""
    found: dict[int, Hello] = {0: own}
    while len(found) < comm.size:
        heard = {hello.facts.host for hello in found.values() if hello.facts}
        silent = name_hosts(host for host in hosts if host not in heard) or "some ranks"
        what = (
            f"no message came from {silent} over MPI in {START_SECONDS:.0f} s, though their ranks have started: does a firewall let TCP "
            "connections through, both ways? distrib-topo check tries them"
        )
        wait(lambda: bool(comm.iprobe(tag=HELLO)), time.monotonic() + START_SECONDS, what, idle=True)
        from mpi4py import MPI

        status = MPI.Status()
        words = comm.recv(tag=HELLO, status=status)
        found[status.Get_source()] = msgspec.msgpack.decode(words, type=Hello)
    return [found[rank] for rank in range(comm.size)]


def _serve(comm: Any, worker: Worker) -> bool:
    """Do what rank 0 says until it says that this was all, and whether to end at once."""
    decoder = msgspec.msgpack.Decoder(Task)
    while True:
        _await(comm, TASK)
        task = decoder.decode(comm.recv(source=0, tag=TASK))
        if isinstance(task, Leave):
            return task.at_once
        comm.send(msgspec.msgpack.encode(worker.perform(task)), 0, REPLY)


def _await(comm: Any, tag: int) -> None:
    wait(lambda: bool(comm.iprobe(source=0, tag=tag)), time.monotonic() + IDLE_SECONDS, "rank 0", idle=True)


def _print(record: Record) -> None:
    print(encode(record), flush=True)


def _leave(at_once: bool) -> None:
    """End at once where torch was used: messages that were given up are still posted, and MPI and Gloo would wait for them."""
    sys.stdout.flush()
    sys.stderr.flush()
    if at_once or "torch" in sys.modules:
        os._exit(0)
    from mpi4py import MPI

    MPI.Finalize()


if __name__ == "__main__":
    sys.exit(main())
