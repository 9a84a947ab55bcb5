"""Rendezvous of the ranks, and the barrier at their end: a store on rank 0, then torch's process group.

If MPI started the ranks, rank 0 listens on a free port of the address by which other ranks reach it, and MPI broadcasts both. So
ports cannot collide, and the store, which requires no password, listens on that address only. Otherwise MASTER_ADDR and
MASTER_PORT give the address of the store.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from distrib.environment import DISTRIB_ADDRESS, DISTRIB_SHARE_GPUS, MASTER_ADDR, MASTER_PORT
from distrib.errors import TrainingError
from distrib.training import compat
from distrib.training.gradients.host_shared_memory import kernel_identity
from distrib.training.world import World
from distrib.utils.log import PLAIN, get_logger
from distrib.utils.netif import LOOPBACK, interface_of, reachable_address, resolve, source_addresses

log = get_logger("training")


STORE_TAKES_SOCKET = torch.__version__ >= "2.8"
"""True if the libuv store accepts a listening socket (pytorch pull request 150215); the older store does."""


def join(world: World, device: torch.device, timeout: timedelta) -> World:
    """Create torch's default process group of all ranks; a single rank needs none. Collective.

    GPU tensors go through NCCL, CPU tensors through Gloo. All go through Gloo if ranks share GPUs, which NCCL refuses.

    Args:
        world: The ranks of the job.
        device: The device of this rank.
        timeout: Longest wait for other ranks, here and in collectives.

    Returns:
        The world, with the ranks of this host counted if their number was unknown.

    Raises:
        TrainingError: On every rank, if rank 0 has no address to listen on, or only some ranks have GPUs.
    """
    if world.size == 1:
        return world
    if dist.is_initialized():
        raise TrainingError(
            "torch.distributed is initialized already", hint="call distrib.init() instead of init_process_group()"
        )
    by_nccl = device.type == "cuda" and dist.is_nccl_available() and DISTRIB_SHARE_GPUS not in os.environ
    backend = "cpu:gloo,cuda:nccl" if by_nccl else "gloo"
    store, address = _connect_by_variables(world, timeout) if world.comm is None else _connect_by_mpi(world, timeout)
    hosts = _exchange_hosts(store, world.rank, world.size, backend)
    if not world.local_size:
        world = dataclasses.replace(world, local_size=hosts.count(hosts[world.rank]))
    _choose_interface(world.on_one_host, address)
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout,
        device_id=device if "nccl" in backend else None,
    )  # fmt: skip
    compat.unbind_device()
    return world


def _exchange_hosts(store: Store, rank: int, size: int, backend: str) -> list[str]:
    """Exchange host and backend of every rank. Collective.

    Returns an identity of each host. Raises if backends differ: the ranks would wait for each other until the timeout.
    """
    keys = [f"distrib/join/{each}" for each in range(size)]
    store.set(keys[rank], f"{backend} {kernel_identity()}")
    received = [word.decode().split(" ", 1) for word in store.multi_get(keys)]
    without = [str(each) for each, (other, _) in enumerate(received) if "nccl" not in other]
    if 0 < len(without) < size:
        read = [f"{key}/read" for key in keys]
        with contextlib.suppress(RuntimeError):  # a rank has exited
            store.set(read[rank], "")
            if rank == 0:  # the store ends with this rank, so the others must have read the reason
                store.wait(read, timedelta(seconds=10))
        raise TrainingError(
            f"rank{'s' * (len(without) > 1)} {', '.join(without)} see no GPU, but other ranks do",
            hint="run distrib-topo check on those hosts, or hide all GPUs: -x CUDA_VISIBLE_DEVICES=",
            code="gpu-unavailable",
        )
    return [host for _, host in received]


def wait_for_all_ranks(world: World, *, report: bool) -> None:
    """Wait until every rank is at the end of its script. Collective.

    It uses messages: a collective would pair with one of a rank that is not at its end yet.

    Args:
        world: The ranks of the job.
        report: True to log a note after one minute, for jobs without a launcher.

    Raises:
        RuntimeError: Another rank has exited, or the timeout expired; raised by torch.
    """
    if world.size == 1:
        return
    note = threading.Timer(60.0, _report_waiting, (world.rank,))
    note.daemon = True
    if report:
        note.start()
    message = torch.zeros(1, dtype=torch.uint8, device="cpu")
    end_tag = 0x656E64  # collectives have other tags
    try:
        if world.rank:
            dist.send(message, 0, tag=end_tag)
            dist.recv(message, 0, tag=end_tag)
        else:
            others = range(1, world.size)
            for work in [dist.irecv(torch.zeros_like(message), other, tag=end_tag) for other in others]:
                work.wait()  # type: ignore[union-attr]
            for work in [dist.isend(message, other, tag=end_tag) for other in others]:
                work.wait()  # type: ignore[union-attr]
    finally:
        note.cancel()


def _report_waiting(rank: int) -> None:
    log.info(f"rank {rank} waits at the end of its script for other ranks", extra=PLAIN)


def collective_timeout() -> timedelta:
    """Return the timeout of the job's collectives, which new groups do not inherit."""
    timeout: timedelta = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout  # type: ignore[union-attr]
    return timeout


def _choose_interface(on_one_host: bool, first: str) -> None:
    """Set the network interface of Gloo and NCCL to that of DISTRIB_ADDRESS, unless the user has set one.

    Without that address, ranks of one host use the loopback interface. On several hosts Gloo resolves the host name. If it resolves to
    loopback, as on Debian, Gloo gets the interface of the route to rank 0's host, whose address is `first`.
    """
    address = os.environ.get(DISTRIB_ADDRESS) or ("127.0.0.1" if on_one_host else "")
    if address:
        name = interface_of(address)
        if name is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # '=': exactly this name, not a prefix
        return
    named = resolve(socket.gethostname())
    if not named or named[0].startswith(LOOPBACK):
        own = next(iter(source_addresses([first])), None) or reachable_address()
        name = interface_of(own) if own else None
        if name is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _connect_by_variables(world: World, timeout: timedelta) -> tuple[Store, str]:
    """Connect to the store at MASTER_ADDR and MASTER_PORT; return it and its host."""
    missing = [name for name in (MASTER_ADDR, MASTER_PORT) if name not in os.environ]
    if missing:
        raise TrainingError(
            f"{' and '.join(missing)} not set for a job of {world.size} ranks",
            hint="start the script with distrib-launch or torchrun",
            code="rendezvous-failed",
        )
    store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timeout))
    store.set_timeout(timeout)
    return store, os.environ[MASTER_ADDR]


def _connect_by_mpi(world: World, timeout: timedelta) -> tuple[Store, str]:
    """Create the store on rank 0 and broadcast its address through MPI; an error of rank 0 is raised on every rank."""
    store: TCPStore | None = None
    address, port, problem = "", 0, ""
    if world.rank == 0:
        try:
            address = _own_address(world.on_one_host)
            family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
            listener = socket.create_server((address, 0), family=family, backlog=4096)
            port = listener.getsockname()[1]
            store = TCPStore(
                address,
                port,
                world.size,
                True,
                timeout=timeout,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
                use_libuv=STORE_TAKES_SOCKET,
            )
        except (OSError, RuntimeError, TrainingError) as error:
            problem = f"rank 0 cannot listen for the others on {address or socket.gethostname()}: {error}"
    address, port, problem = world.comm.bcast((address, port, problem), root=0)
    if problem:
        raise TrainingError(
            problem,
            hint="set DISTRIB_ADDRESS to an address of rank 0's host that the others reach",
            code="rendezvous-failed",
        )
    return store or TCPStore(address, port, world.size, False, timeout=timeout, wait_for_workers=False), address


def _own_address(on_one_host: bool) -> str:
    """Return DISTRIB_ADDRESS, or the address by which other ranks reach this host; raise TrainingError if it has only loopback ones."""
    if address := os.environ.get(DISTRIB_ADDRESS):
        return address
    if on_one_host:
        return "127.0.0.1"
    if address := reachable_address():
        return address
    raise TrainingError(
        f"{socket.gethostname()} has no address but loopback",
        hint="bring a network up, or set DISTRIB_ADDRESS to one that the other hosts reach",
        code="rendezvous-failed",
    )
