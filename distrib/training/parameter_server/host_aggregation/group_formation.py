"""Formation of a host group: the workers of one host elect the lowest rank as leader and connect to its local socket."""

from __future__ import annotations

import socket
from collections.abc import Callable

from distrib.training.parameter_server.client import ParameterClient
from distrib.training.parameter_server.host_aggregation.leader import HostLeader
from distrib.training.parameter_server.host_aggregation.member import HostMember
from distrib.training.parameter_server.transport import decode, encode


def form_host_group(
    client: ParameterClient,
    host: str,
    gather: Callable[[bytes], list[tuple[int, bytes]]],
    *,
    size: int,
    synchronous: bool,
) -> int:
    """Form a group of the workers with the same host, unless a worker is alone. Collective.

    Args:
        client: The client of this worker.
        host: Text that is equal on the workers that push together.
        gather: Gathers bytes of all workers, with their ranks.
        size: Number of workers of the job. Push ids of groups begin there.
        synchronous: True if every step needs all workers.

    Returns:
        The number of host groups and of workers without one.
    """
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # the kernel chooses an abstract name, which needs no file
    listener.listen(1024)
    listener.setblocking(False)
    workers = {rank: decode(data) for rank, data in gather(encode([host, listener.getsockname().hex()]))}
    sockets = {rank: bytes.fromhex(name) for rank, (where, name) in workers.items() if where == host}
    leader = min(sockets, default=client.rank)
    is_grouped = len(sockets) > 1 and client.rank in sockets
    if is_grouped and leader == client.rank:
        client.join_group(HostLeader(client, size + leader, listener, sockets, synchronous=synchronous))
    else:
        listener.close()
        if is_grouped:
            client.join_group(HostMember(client, size + leader, sockets[leader], synchronous=synchronous))
    return len({where for where, _ in workers.values()})
