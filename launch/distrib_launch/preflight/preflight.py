"""Preflight: query every host, check it against the job, choose the network and test it.

`query_plan_hosts` and `check_hosts` communicate with hosts; `evaluate` is pure and is repeated for fewer hosts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from distrib.cluster.inventory import Gpu, Inventory, InventoryQuery, own_inventory
from distrib.cluster.node import name_hosts
from distrib.environment import DISTRIB_SHARE_GPUS
from distrib.errors import LaunchError, PreflightError
from distrib.utils.netif import is_here, own_addresses, own_names, resolve, source_addresses
from distrib_launch import engines
from distrib_launch.engines.remote_shell import RemoteShell, Transport
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.preflight import host_checks
from distrib_launch.preflight.check_result import (
    CheckResult,
    HostRequirements,
    Status,
    complete_results,
    error,
    fold_by_host,
    table_text,
)
from distrib_launch.preflight.collect import HostQuery, HostReply, query_hosts
from distrib_launch.preflight.connectivity import (
    ConnectionRound,
    ProbeTarget,
    connect_all,
    explain_host_failures,
    explain_launcher_failures,
)
from distrib_launch.preflight.host_sessions import HostSessions
from distrib_launch.preflight.interface_selection import (
    ClusterNetwork,
    NoNetworkError,
    choose_network,
    engine_environment,
)
from distrib_launch.rank_agent.affinity import listed_gpus
from distrib_launch.rank_placement import HostPlan


class HostReplies(msgspec.Struct, frozen=True, kw_only=True):
    """Replies of all hosts, and the inventory of this machine."""

    transport: Transport
    by_host: dict[str, HostReply]
    local: Inventory
    own_names: frozenset[str]
    """Hosts that are this machine."""
    interpreters: dict[str, str]
    seconds: float
    rounds: tuple[ConnectionRound, ...] = ()
    """Test connections on each network that was tried."""

    def joined(self, late: HostReplies) -> HostReplies:
        """Add the replies of hosts that were queried later.

        Args:
            late: Their replies.
        """
        return msgspec.structs.replace(
            self,
            by_host={**self.by_host, **late.by_host},
            own_names=self.own_names | late.own_names,
            interpreters={**self.interpreters, **late.interpreters},
        )


class PreflightReport(msgspec.Struct, frozen=True, kw_only=True, rename={"transport": "by"}):
    """Result of the preflight: `--json` of `distrib-topo check`."""

    fit: bool
    """The job may start."""
    transport: Transport
    hosts: tuple[str, ...]
    checks: tuple[CheckResult, ...]
    network: ClusterNetwork | None
    seconds: float
    inventories: dict[str, Inventory]

    @property
    def errors(self) -> list[CheckResult]:
        """Return the results that stop the launch."""
        return [check for check in self.checks if check.status == "error"]

    @property
    def bad_hosts(self) -> tuple[str, ...]:
        """Return the hosts with errors."""
        bad = {check.host for check in self.errors}
        return tuple(host for host in self.hosts if host in bad)

    def lines(self, status: Status) -> list[str]:
        """Return the results with a status as lines.

        Args:
            status: `error` or `warning`.
        """
        return fold_by_host((check.host, str(check)) for check in self.checks if check.status == status)

    def refusal(self) -> PreflightError:
        """Return the error that refuses the launch, with all results; a single one needs no table."""
        problems = [*self.lines("error"), *(f"warning: {line}" for line in self.lines("warning"))]
        hint = ""
        if len(problems) > 1:
            problems += ["", table_text(self.hosts, self.checks, self.transport)]
        else:
            problems[0], _, hint = problems[0].partition("; ")
        first = {host: next(check for check in self.errors if check.host == host).reason for host in self.bad_hosts}
        return PreflightError("\n".join(problems), hint=hint, hosts=first)


# -- queries ----------------------------------------------------------------------------------------------------------


def query_plan_hosts(
    plan: LaunchPlan,
    hosts: Sequence[HostPlan],
    question: InventoryQuery,
    remote: RemoteShell,
    sessions: HostSessions,
    say: Callable[[str], None],
) -> HostReplies:
    """Query hosts of a plan in parallel, each with its own interpreter.

    Over ssh this machine replies directly. Over Slurm it is queried as all hosts are: ranks may use other CPUs and GPUs than
    this process.

    Args:
        plan: Plan of the launch.
        hosts: Hosts to query.
        question: Paths that the job needs.
        remote: Program that reaches hosts.
        sessions: Owner of the connections.
        say: Called with notices about hosts that take long.
    """
    began = time.monotonic()
    python = plan.script[0]
    names = own_names()
    local = own_inventory(question)
    names |= {address.split("/")[0] for interface in local.interfaces for address in interface.addresses}
    known = {host.name: host.name in names for host in hosts}
    directly = remote.transport == "ssh"
    queries = [
        HostQuery(
            name=host.name, python=host.python or python, is_local=directly and known[host.name], user=host.user, port=host.port,
            transport=remote.transport,
            question=msgspec.structs.replace(question, programs=engines.get(plan.engine).required_programs(plan, host)),
        )
        for host in hosts
    ]  # fmt: skip
    by_host = query_hosts(queries, remote, python, is_here if directly else lambda _: False, sessions, say)
    own = {host for host, reply in by_host.items() if known[host] or _is_this_machine(reply, local)}
    return HostReplies(
        transport=remote.transport,
        by_host=by_host,
        local=local,
        own_names=frozenset(own),
        interpreters={query.name: query.python for query in queries},
        seconds=time.monotonic() - began,
    )


def _is_this_machine(reply: HostReply, local: Inventory) -> bool:
    return reply.inventory is not None and reply.inventory.network_identity == local.network_identity


# -- evaluation -------------------------------------------------------------------------------------------------------


def evaluate(
    replies: HostReplies,
    requirements: Mapping[str, HostRequirements],
    *,
    question: InventoryQuery,
    interface: str | None,
    environ: Mapping[str, str],
) -> PreflightReport:
    """Check hosts against the job and choose the network.

    Args:
        replies: Replies and test connections.
        requirements: Requirements by host; other hosts are not checked.
        question: Paths that the job needs.
        interface: Value of `--interface`.
        environ: Variables that the user has set for ranks.
    """
    hosts = tuple(requirements)
    of_hosts = {host: replies.by_host[host] for host in hosts}
    inventories = {host: reply.inventory for host, reply in of_hosts.items() if reply.inventory}
    found = [reply.problem for reply in of_hosts.values() if reply.problem]
    found += host_checks.run_checks(
        host_checks.CheckInputs(
            inventories=inventories,
            requirements=requirements,
            interpreters=replies.interpreters,
            local=replies.local,
            transport=replies.transport,
            clock_offsets={host: _clock_offset(of_hosts[host]) for host in inventories},
            script=question.script or "",
            directory=question.directory or "",
        )
    )
    network = None
    if len({facts.network_identity for facts in inventories.values()} | {replies.local.network_identity}) > 1:
        network, problems = _network(replies, hosts, inventories, interface, environ)
        found += problems
    silent = [host for host in hosts if host not in inventories]
    checks = complete_results(hosts, found, silent, replies.transport)
    return PreflightReport(
        transport=replies.transport,
        fit=not any(check.status == "error" for check in checks),
        hosts=hosts,
        checks=checks,
        network=network,
        seconds=replies.seconds,
        inventories=inventories,
    )


def _network(
    replies: HostReplies,
    hosts: Collection[str],
    inventories: Mapping[str, Inventory],
    interface: str | None,
    environ: Mapping[str, str],
) -> tuple[ClusterNetwork | None, list[CheckResult]]:
    """Choose the best network whose test connections have not failed; failures on others are warnings."""
    rounds = [tested.among(hosts) for tested in replies.rounds]
    failed = {
        failure.address: f"{failure.source} cannot reach it ({failure.reason})"
        for tested in rounds
        for failure in tested.failures
        if failure.target
    }
    found = [check for tested in rounds[-1:] for check in explain_launcher_failures(tested)]
    explained = [explain_host_failures(tested) for tested in rounds]
    network = None
    try:
        network = choose_network(
            inventories, wanted=interface, reached_at=_reached_at(inventories, replies), environ=environ, failed=failed
        )
    except NoNetworkError as problem:
        last = explained.pop() if explained else []
        found += last or [error(host, "network", why, problem.hint) for host, why in problem.hosts.items()]
    found += [msgspec.structs.replace(check, status="warning") for checks in explained for check in checks]
    return network, found


def check_hosts(
    plan: LaunchPlan,
    replies: HostReplies,
    sessions: HostSessions,
    *,
    question: InventoryQuery,
    interface: str | None = None,
    environ: Mapping[str, str],
) -> tuple[PreflightReport, HostReplies]:
    """Evaluate the hosts of a plan and test the chosen network; if the test fails, choose the next. Return the report and all replies.

    Args:
        plan: Plan of the launch.
        replies: Replies of its hosts.
        sessions: Their sessions.
        question: Paths that the job needs.
        interface: Value of `--interface`.
        environ: Variables that the user has set for ranks.
    """
    requirements = requirements_of(plan, replies, os.environ)
    while True:
        report = evaluate(replies, requirements, question=question, interface=interface, environ=environ)
        if not report.fit or report.network is None:
            return report, replies
        targets = _host_targets(report.network, replies)
        if not replies.own_names.intersection(requirements):
            own = launcher_addresses(apply_network(plan, report, replies, environ))
            targets += local_target(own, sessions)
        tested = connect_all(targets, list(requirements), report.network.subnet, sessions)
        if not tested.failures:
            return report, replies
        replies = msgspec.structs.replace(replies, rounds=(*replies.rounds, tested))


def launcher_addresses(plan: LaunchPlan) -> set[str]:
    """Return the addresses of this machine by which the hosts of a plan reach it.

    Args:
        plan: Plan of the job; addresses that its hosts reported take precedence, because only ssh may know their names.

    Raises:
        LaunchError: No network reaches them.
    """
    names = [host.name for host in plan.hosts]
    found = set(plan.seen_as) or own_addresses(names, [host.address for host in plan.hosts if host.address])
    if not found:
        raise LaunchError(
            f"no network leads from here to {name_hosts(names)}",
            hint="check names and routes",
            code="network-unreachable",
        )
    return found


def _host_targets(network: ClusterNetwork, replies: HostReplies) -> list[ProbeTarget]:
    """Return the hosts at their chosen addresses. If this machine is one of them, every host must reach it."""
    return [
        ProbeTarget(host=one.host, addresses=(one.address,), ports=ports, from_all=one.host in replies.own_names)
        for one in network.hosts
        if (ports := replies.by_host[one.host].ports)
    ]


def local_target(addresses: Collection[str], sessions: HostSessions) -> list[ProbeTarget]:
    """Return this machine as a target of test connections.

    Args:
        addresses: Its addresses.
        sessions: Sessions that listen on this machine.
    """
    ports = sessions.listen()
    return [ProbeTarget(host="", addresses=tuple(sorted(addresses)), ports=ports, from_all=True)] if ports else []


def _clock_offset(reply: HostReply) -> float:
    """Return the smallest offset of the host's clock that the query's times allow, in seconds; negative: it is behind."""
    assert reply.inventory
    theirs = reply.inventory.time
    return max(0.0, theirs - reply.received) or min(0.0, theirs - reply.sent)


def _reached_at(inventories: Mapping[str, Inventory], replies: HostReplies) -> dict[str, str]:
    """Return the address at which each host was reached: as sshd reports it, or by its name under Slurm."""
    if replies.transport == "srun":
        return {host: address for host in inventories if (address := next(iter(resolve(host)), ""))}
    found = {host: facts.ssh_connection[2] for host, facts in inventories.items() if len(facts.ssh_connection) == 4}
    for host in inventories:
        if host in replies.own_names:
            found.pop(host, None)  # the address belongs to the ssh session in which the launcher runs
            others = list(found.values())
            if own := next(iter(source_addresses(others[:1])), None):
                found[host] = own
    return found


def requirements_of(plan: LaunchPlan, replies: HostReplies, environ: Mapping[str, str]) -> dict[str, HostRequirements]:
    """Return the requirements of the job by host.

    Args:
        plan: Plan of the launch.
        replies: Replies of its hosts, which have their values of CUDA_VISIBLE_DEVICES.
        environ: Environment of this process, which ranks on this machine inherit.
    """
    found = {}
    for host in plan.hosts:
        ranks = [rank for rank in plan.ranks if rank.host == host.name and rank.role == "worker"]
        there = replies.by_host[host.name].inventory if host.name in replies.by_host else None
        outside = there.visible_gpus if there else None
        if host.name in replies.own_names and replies.transport == "ssh":
            outside = environ.get("CUDA_VISIBLE_DEVICES")
        listed = ranks[0].environment.get("CUDA_VISIBLE_DEVICES", outside) if ranks else None
        indices = None if host.chosen is None else host.chosen
        share = any(DISTRIB_SHARE_GPUS in rank.environment for rank in ranks)
        if listed is not None:
            visible = _indices(listed, there.gpus if there else ())
            places = indices if indices is not None else range(host.workers)
            indices = tuple(visible[place] for place in places if place < len(visible))
        none = listed is not None and not listed_gpus(listed)
        devices = ("cpu",) if none else tuple(rank.device for rank in ranks) or ("cpu",)
        found[host.name] = HostRequirements(
            ranks=host.workers or host.servers,
            devices=devices,
            gpu_indices=indices,
            visible_gpus=listed,
            share_gpus=share,
        )
    return found


def _indices(listed: str, gpus: Sequence[Gpu]) -> list[int]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES lists by index or UUID, up to the first unknown one, as CUDA does."""
    found: list[int] = []
    for name in listed_gpus(listed):
        by_uuid = (gpu.index for gpu in gpus if name.startswith("GPU-") and (gpu.uuid or "").startswith(name))
        index = int(name) if name.isascii() and name.isdigit() else next(by_uuid, None)
        if index is None:
            break
        found.append(index)
    return found


# -- the network in the plan ----------------------------------------------------------------------------------------


def apply_network(
    plan: LaunchPlan, report: PreflightReport, replies: HostReplies, environ: Mapping[str, str]
) -> LaunchPlan:
    """Add each host's interface to the plan, and the variables that make every library use it.

    Args:
        plan: Plan of the launch.
        report: The report, with a network.
        replies: Replies of the hosts.
        environ: Environment of this process.
    """
    network = report.network
    if network is None:  # every host is this machine, perhaps by a name that only ssh knows
        is_local = report.inventories and not source_addresses([host.name for host in plan.hosts])
        return msgspec.structs.replace(plan, listen=("127.0.0.1",)) if is_local else plan
    choices = {choice.host: choice for choice in network.hosts}
    hosts = tuple(
        msgspec.structs.replace(
            host,
            interface=choices[host.name].interface,
            address=choices[host.name].address,
        )
        for host in plan.hosts
    )
    ranks = tuple(
        msgspec.structs.replace(rank, environment={**choices[rank.host].environment, **rank.environment})
        for rank in plan.ranks
    )
    own = [choices[host.name].address for host in plan.hosts if host.name in replies.own_names]
    return msgspec.structs.replace(
        plan,
        hosts=hosts,
        ranks=ranks,
        network=network.reason,
        listen=tuple(own[:1]),
        seen_as=_seen_as(report, replies),
        engine_environment=engine_environment(network, replies.local, environ),
        notes=(*plan.notes, *network.notes),
    )


def _seen_as(report: PreflightReport, replies: HostReplies) -> tuple[str, ...]:
    """Return the addresses of this machine that every host's sshd reports; empty behind a gateway or jump host."""
    connections = [
        report.inventories[host].ssh_connection[:1] for host in report.hosts if host not in replies.own_names
    ]
    addresses = dict.fromkeys(connection[0] if connection else "127.0.0.1" for connection in connections)
    ours = all(not address.startswith("127.") and address != "::1" and is_here(address) for address in addresses)
    return tuple(addresses) if ours else ()


def question_of(plan: LaunchPlan) -> InventoryQuery:
    """Return the paths that the job needs on each host.

    Args:
        plan: Plan of the job.
    """
    script = plan.script[1]
    # A program may be another build on each host.
    return InventoryQuery(
        script=None if script == "-m" or plan.program else script, directory=plan.directory, run_dir=plan.run_dir,
        container=(plan.container.runtime, plan.container.image) if plan.container.image else None,
    )  # fmt: skip
