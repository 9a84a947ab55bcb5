"""How the ranks find each other, and part: a store on rank 0, then torch's process group.

Where MPI has started the ranks, rank 0 listens on a free port of the address by which the others reach it, and MPI broadcasts both:
nothing collides, and the store (which asks for no password) listens on that one address only. Else MASTER_ADDR and MASTER_PORT tell
where the store is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from distrib.environment import DISTRIB_ADDRESS, MASTER_ADDR, MASTER_PORT
from distrib.errors import TrainingError
from distrib.training.gradients.host_shared_memory import kernel_identity
from distrib.training.world import World
from distrib.utils.netif import LOOPBACK, interface_of, reachable_address, resolve, source_addresses

NOTICE_SECONDS = 60.0
"""How long ranks at their end wait for the others before they say so."""

END_TAG = 0x656E64
"""Of the messages by which ranks part; collectives have tags of their own."""

PARTING_SECONDS = 10.0
"""How long the rank that has the store waits for those who are to read there why all end."""

TAKES_SOCKETS = torch.__version__ >= "2.8"
"""Whether the store that torch prefers takes a socket that listens already (pytorch pull request 150215); its older one does."""


def join(world: World, device: torch.device, timeout: timedelta) -> World:
    """Makes torch's default process group of all ranks of `world`; a rank that is alone needs none.

    Returns `world`, with the ranks of this host counted where nobody has told how many they are.
    On GPUs tensors travel by NCCL, and what lies in host memory by Gloo; on CPU hosts all travels by Gloo.
    Raises TrainingError, on every rank, when rank 0 has no address to listen on, or only some have GPUs.
    """
    if world.size == 1:
        return world
    if dist.is_initialized():
        raise TrainingError(
            "torch.distributed is initialized already", hint="call distrib.init() instead of init_process_group()"
        )
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    store, address = _meet_by_variables(world, timeout) if world.comm is None else _meet(world, timeout)
    hosts = compare(store, world.rank, world.size, backend)
    if not world.local_size:
        world = dataclasses.replace(world, local_size=hosts.count(hosts[world.rank]))
    choose_interface(world.on_one_host, address)
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.size, timeout=timeout,
        device_id=device if "nccl" in backend else None,
    )  # fmt: skip
    _unbind()
    return world


def compare(store: Store, rank: int, size: int, backend: str) -> list[str]:
    """The host of every rank, in words. Every rank.

    Raises TrainingError where they would connect by different backends: the one would wait for the other until its time is up.
    """
    keys = [f"distrib/join/{each}" for each in range(size)]
    store.set(keys[rank], f"{backend} {kernel_identity()}")
    told = [word.decode().split(" ", 1) for word in store.multi_get(keys)]
    without = [str(each) for each, (other, _) in enumerate(told) if "nccl" not in other]
    if 0 < len(without) < size:
        heard = [f"{key}/heard" for key in keys]
        with contextlib.suppress(RuntimeError):  # some are gone, with what they were to be told
            store.set(heard[rank], "")
            if rank == 0:  # the store may be its own, and ends with it
                store.wait(heard, timedelta(seconds=PARTING_SECONDS))
        raise TrainingError(
            f"rank{'s' * (len(without) > 1)} {', '.join(without)} see no GPU, the others do",
            hint="use hosts that are alike, see to the drivers there (distrib-topo check), or hide all GPUs: -x CUDA_VISIBLE_DEVICES=",
        )
    return [host for _, host in told]


def _unbind() -> None:
    """The device was named for NCCL to connect now. Bound to it for good, a later group of some ranks would be split from all of
    them, also one of Gloo's, of whose ranks none takes part (pytorch issue 145376): the others would wait for good."""
    dist.group.WORLD.bound_device_id = None  # type: ignore[union-attr]


def wait_for_all_ranks(world: World, *, report: bool) -> None:
    """Waits until every rank is at its end. Raises what torch raises when one is gone, or does not come in time.

    They send each other messages: a collective would answer that of a rank which is not at its end yet. `tell`: says that
    others are waited for, where no launcher does.
    """
    if world.size == 1:
        return
    note = threading.Timer(NOTICE_SECONDS, _say_who_waits, (world.rank,))
    note.daemon = True
    if report:
        note.start()
    message = torch.zeros(1, dtype=torch.uint8, device="cpu")
    try:
        if world.rank:
            dist.send(message, 0, tag=END_TAG)
            dist.recv(message, 0, tag=END_TAG)
        else:
            others = range(1, world.size)
            for work in [dist.irecv(torch.zeros_like(message), other, tag=END_TAG) for other in others]:
                work.wait()  # type: ignore[union-attr]
            for work in [dist.isend(message, other, tag=END_TAG) for other in others]:
                work.wait()  # type: ignore[union-attr]
    finally:
        note.cancel()


def _say_who_waits(rank: int) -> None:
    print(f"distrib: note: rank {rank} is at the end of its script, and others are not", file=sys.stderr, flush=True)


def timeout_of_job() -> timedelta:
    """How long collectives of the job may take, which groups that are made later do not take over by themselves."""
    timeout: timedelta = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout  # type: ignore[union-attr]
    return timeout


def choose_interface(on_one_host: bool, first: str) -> None:
    """Names to Gloo and NCCL the network interface that has DISTRIB_ADDRESS, unless the user named one.

    Ranks of one host without that address talk over the loopback interface, whatever the host's name resolves to. On several
    hosts Gloo takes what the host's name stands for; where that is loopback, as on Debian, it is named the interface that leads
    to `first`, the address of rank 0's host.
    """
    address = os.environ.get(DISTRIB_ADDRESS) or ("127.0.0.1" if on_one_host else "")
    if address:
        name = interface_of(address)
        if name is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # '=': this name, not every one that begins so
        return
    named = resolve(socket.gethostname())
    if not named or named[0].startswith(LOOPBACK):
        own = next(iter(source_addresses([first])), None) or reachable_address()
        name = interface_of(own) if own else None
        if name is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _meet_by_variables(world: World, timeout: timedelta) -> tuple[Store, str]:
    """The store of the job and the host that it is on, as MASTER_ADDR and MASTER_PORT tell."""
    missing = [name for name in (MASTER_ADDR, MASTER_PORT) if name not in os.environ]
    if missing:
        raise TrainingError(
            f"{' and '.join(missing)} not set for a job of {world.size} ranks",
            hint="start the script with distrib-launch or torchrun",
        )
    store, _, _ = next(rendezvous("env://", world.rank, world.size, timeout=timeout))
    store.set_timeout(timeout)
    return store, os.environ[MASTER_ADDR]


def _meet(world: World, timeout: timedelta) -> tuple[Store, str]:
    """The store of the job and its address, which MPI broadcasts; what fails on rank 0 fails everywhere."""
    store: TCPStore | None = None
    address, port, problem = "", 0, ""
    if world.rank == 0:
        try:
            address = own_address(world.on_one_host)
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
                use_libuv=TAKES_SOCKETS,
            )
        except (OSError, RuntimeError, TrainingError) as error:
            problem = f"rank 0 cannot listen for the others on {address or socket.gethostname()}: {error}"
    address, port, problem = world.comm.bcast((address, port, problem), root=0)
    if problem:
        raise TrainingError(problem, hint="set DISTRIB_ADDRESS to an address of rank 0's host that the others reach")
    return store or TCPStore(address, port, world.size, False, timeout=timeout, wait_for_workers=False), address


def own_address(on_one_host: bool) -> str:
    """Return the address by which the other ranks reach this host.

    Args:
        on_one_host: Whether all ranks run on this host.

    Raises:
        TrainingError: The host has only loopback addresses.
    """
    if address := os.environ.get(DISTRIB_ADDRESS):
        return address
    if on_one_host:
        return "127.0.0.1"
    if address := reachable_address():
        return address
    raise TrainingError(
        f"{socket.gethostname()} has no address but loopback",
        hint="bring a network up, or set DISTRIB_ADDRESS to one that the other hosts reach",
    )
