"""Rank of a probe: `python -m distrib.probe SPEC`, started by `distrib-topo probe`.

The first rank of each host measures its links. Further ranks, one for each further GPU or slot, take part in collectives only.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Any

import mpi4py  # does not load MPI
import msgspec

from distrib.cluster.node import name_hosts
from distrib.probe import host_facts
from distrib.probe.bench import tcp
from distrib.probe.bench.polling import wait
from distrib.probe.coordinator import Coordinator
from distrib.probe.protocol import (
    MessageTag,
    ProbeSpec,
    RankHello,
    RankSetup,
    RankTask,
    ShutdownTask,
)
from distrib.probe.records import Record, decode_record, encode_record
from distrib.probe.secondary_networks import secondary_addresses
from distrib.probe.settings import TIMEOUTS
from distrib.probe.worker import Worker
from distrib.utils.json_text import decode_json
from distrib.utils.mpi_env import OMPI_RANK


def main() -> int:
    """Run a rank until the probe ends. Returns the exit code."""
    spec = decode_json(sys.argv[1], ProbeSpec)
    mpi = init_mpi()
    comm = mpi.COMM_WORLD
    if comm.size != (planned := int(os.environ["WORLD_SIZE"])):
        return _report_wrong_size(comm.size, planned)
    host = spec.present[int(os.environ["GROUP_RANK"])]
    hello, listeners = RankHello(rank=comm.rank, on_gpu=os.environ.get("DISTRIB_DEVICE", "").startswith("cuda")), {}
    if os.environ["LOCAL_RANK"] == "0":
        address = os.environ.get("DISTRIB_ADDRESS", "127.0.0.1")
        facts = host_facts.own_facts(host, address)
        listeners = {each: tcp.ProbeListener(each) for each in (address, *secondary_addresses(facts))}
        ports = {each: listener.port for each, listener in listeners.items()}
        hello = msgspec.structs.replace(hello, facts=facts, ports=ports)
    worker = Worker(comm, host, listeners)
    if comm.rank == 0:
        skip_finalize = _coordinate(comm, worker, spec, hello)
    else:
        comm.send(msgspec.msgpack.encode(hello), 0, MessageTag.HELLO)
        _wait_for_rank_0(comm, MessageTag.SETUP)
        worker.setup = msgspec.msgpack.decode(comm.recv(source=0, tag=MessageTag.SETUP), type=RankSetup)
        skip_finalize = _serve_tasks(comm, worker)
    exit_process(mpi, skip_finalize)
    return 0


def _coordinate(comm: Any, worker: Worker, spec: ProbeSpec, hello: RankHello) -> bool:
    """Run the probe on rank 0. Returns True to exit without MPI_Finalize."""
    hellos = _gather_hellos(comm, hello, spec.present)
    ports = {address: port for each in hellos for address, port in each.ports.items()}
    worker.setup = RankSetup(token=secrets.token_bytes(tcp.TOKEN_BYTES), ports=ports)
    for rank in range(1, comm.size):
        comm.send(msgspec.msgpack.encode(worker.setup), rank, MessageTag.SETUP)
    lines = sys.stdin.buffer if spec.resumed else ()
    before = [record for line in lines if (record := decode_record(line))]
    coordinator = Coordinator(comm, worker.perform, spec, hellos, _print_record, before)
    coordinator.run()
    if silent := coordinator.silent_hosts:
        # MPI_Finalize would wait for these ranks, and so would the launcher, unless a rank fails.
        sys.stdout.flush()
        print(f"{silent} does not reply any more; the probe ends without it", file=sys.stderr, flush=True)
        os._exit(1)
    return coordinator.skip_finalize


def _report_wrong_size(started: int, planned: int) -> int:
    """Report that MPI started each rank as a world of its own. Returns the exit code."""
    by_mpirun = OMPI_RANK in os.environ
    hint = "is this another MPI's mpirun?" if by_mpirun else "this Slurm has no PMIx: use --engine mpirun"
    print(f"MPI started {started} of {planned} ranks; {hint}", file=sys.stderr, flush=True)
    return 1


def init_mpi() -> Any:
    """Initialize MPI. Returns the module. A failed rank must not finalize MPI, as it would wait for the other ranks."""
    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    from mpi4py import MPI  # reads mpi4py.rc

    MPI.Init_thread(MPI.THREAD_SERIALIZED)
    return MPI


def _gather_hellos(comm: Any, own: RankHello, hosts: Sequence[str]) -> list[RankHello]:
    """Receive the first message of every rank. Raises ProbeTimeout with the hosts that sent none."""
    found: dict[int, RankHello] = {0: own}
    while len(found) < comm.size:
        known = {hello.facts.host for hello in found.values() if hello.facts}
        silent = name_hosts(host for host in hosts if host not in known) or "some ranks"
        what = (
            f"no message from {silent} over MPI in {TIMEOUTS.hello_seconds:.0f} s, though their ranks started: does a firewall "
            "block TCP connections in one direction? Run distrib-topo check to test them"
        )
        deadline = time.monotonic() + TIMEOUTS.hello_seconds
        wait(lambda: bool(comm.iprobe(tag=MessageTag.HELLO)), deadline, what, idle=True)
        hello = msgspec.msgpack.decode(comm.recv(tag=MessageTag.HELLO), type=RankHello)
        found[hello.rank] = hello
    return [found[rank] for rank in range(comm.size)]


def _serve_tasks(comm: Any, worker: Worker) -> bool:
    """Do rank 0's tasks until it shuts this rank down. Returns True to exit without MPI_Finalize."""
    decoder = msgspec.msgpack.Decoder(RankTask)
    while True:
        _wait_for_rank_0(comm, MessageTag.TASK)
        task = decoder.decode(comm.recv(source=0, tag=MessageTag.TASK))
        if isinstance(task, ShutdownTask):
            return task.skip_finalize
        comm.send(msgspec.msgpack.encode(worker.perform(task)), 0, MessageTag.REPLY)


def _wait_for_rank_0(comm: Any, tag: MessageTag) -> None:
    deadline = time.monotonic() + TIMEOUTS.idle_seconds
    wait(lambda: bool(comm.iprobe(source=0, tag=tag)), deadline, "no message from rank 0", idle=True)


def _print_record(record: Record) -> None:
    print(encode_record(record), flush=True)


def exit_process(mpi: Any, skip_finalize: bool) -> None:
    """Exit without MPI_Finalize if torch was used: MPI and Gloo would wait for messages of failed exchanges.

    Args:
        mpi: The module `mpi4py.MPI`.
        skip_finalize: True after a failed exchange.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if skip_finalize or "torch" in sys.modules:
        os._exit(0)
    mpi.Finalize()


if __name__ == "__main__":
    sys.exit(main())
