"""Before anything starts: every host is asked what it is, judged against the job, and its network card is chosen and tried.

`ask` and `settle` do all that touches a host; `assess` is pure and can be repeated for fewer hosts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from distrib.cluster.inventory import Gpu, Inventory, InventoryQuery, own_inventory
from distrib.errors import PreflightError
from distrib.utils.local_addresses import address_of, is_here, own_addresses, own_names, sources
from distrib_launch import engines
from distrib_launch.launch_plan import LaunchPlan
from distrib_launch.preflight import host_checks
from distrib_launch.preflight.check_result import Check, Status, Want, Way, error, folded, full_table, warning
from distrib_launch.preflight.collect import Answer, Target, ask_all
from distrib_launch.preflight.connectivity import Callee, Round, call_all, explain, explain_launcher
from distrib_launch.preflight.host_sessions import Connections
from distrib_launch.preflight.interface_selection import (
    ClusterNetwork,
    NoNetworkError,
    choose_network,
    engine_environment,
)
from distrib_launch.preflight.remote import Remote
from distrib_launch.rank_agent.affinity import listed_gpus
from distrib_launch.rank_placement import HostPlan


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """What all hosts said, and this machine. `own_names` are the hosts that are this machine."""

    by: Way
    by_host: dict[str, Answer]
    here: Inventory
    own_names: frozenset[str]
    interpreters: dict[str, str]
    seconds: float
    rounds: tuple[Round, ...] = ()
    """What came of the hosts' calls to each other, on each network that was tried."""

    def joined(self, late: Answers) -> Answers:
        """With those of hosts that were asked later."""
        return msgspec.structs.replace(
            self,
            by_host={**self.by_host, **late.by_host},
            own_names=self.own_names | late.own_names,
            interpreters={**self.interpreters, **late.interpreters},
        )


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on the hosts: `--json` of `distrib-topo check`. `fit` is whether the job may start."""

    fit: bool
    by: Way
    hosts: tuple[str, ...]
    checks: tuple[Check, ...]
    network: ClusterNetwork | None
    seconds: float
    inventories: dict[str, Inventory]

    @property
    def errors(self) -> list[Check]:
        return [check for check in self.checks if check.status == "error"]

    @property
    def bad_hosts(self) -> tuple[str, ...]:
        bad = {check.host for check in self.errors}
        return tuple(host for host in self.hosts if host in bad)

    def told(self, status: Status) -> list[str]:
        """The errors, or the warnings, as lines."""
        return folded((check.host, str(check)) for check in self.checks if check.status == status)

    def refusal(self) -> PreflightError:
        """The error that says what is wrong, first as lines, then as a table."""
        from distrib_launch.preflight.check_table import table_text

        more = [f"warning: {line}" for line in self.told("warning")]
        first = {host: next(check for check in self.errors if check.host == host).reason for host in self.bad_hosts}
        return PreflightError("\n".join([*self.told("error"), *more, "", table_text(self)]), hosts=first)


# -- asking -----------------------------------------------------------------------------------------------------------


def ask(
    plan: LaunchPlan,
    hosts: Sequence[HostPlan],
    question: InventoryQuery,
    remote: Remote,
    connections: Connections,
    say: Callable[[str], None],
    *,
    apart: bool = False,
) -> Answers:
    """Ask `hosts` of the plan, in parallel, each with its own interpreter; directly where it is this machine, else by `remote`.

    By Slurm every host: what this process may use of its machine need not be what the job's ranks may there.
    Hosts without another interpreter need the launcher's, and its Open MPI. `say` hears of hosts that take long. `apart`:
    this machine, too, is asked by a process of its own, which can be ended.
    """
    began = time.monotonic()
    python = plan.script[0]
    names = own_names()
    here = own_inventory(question)
    names |= {address.split("/")[0] for interface in here.interfaces for address in interface.addresses}
    known = {host.name: host.name in names for host in hosts}
    directly = remote.by == "ssh"
    targets = [
        Target(
            name=host.name, python=host.python or python, is_here=directly and known[host.name], user=host.user, port=host.port,
            by=remote.by,
            question=msgspec.structs.replace(question, programs=_programs(plan, host)),
        )
        for host in hosts
    ]  # fmt: skip
    by_host = ask_all(
        targets, remote, "" if apart else python, is_here if directly else lambda _: False, connections, say
    )
    own = {host for host, answer in by_host.items() if known[host] or _is(answer, here)}
    return Answers(
        by=remote.by,
        by_host=by_host,
        here=here,
        own_names=frozenset(own),
        interpreters={target.name: target.python for target in targets},
        seconds=time.monotonic() - began,
    )


def _is(answer: Answer, here: Inventory) -> bool:
    return answer.inventory is not None and answer.inventory.network_identity == here.network_identity


def _programs(plan: LaunchPlan, host: HostPlan) -> tuple[str, ...]:
    """PRRTE's daemon where mpirun will look for it: its own path, or, if it came with the interpreter, beside that."""
    folder = Path(plan.command[0]).parent
    if plan.engine != "mpirun" or not (folder / "prted").exists():  # a site's own may keep it elsewhere
        return ()
    if host.python and folder == Path(plan.script[0]).parent:
        folder = Path(host.python).parent
    return (str(folder / "prted"),)


# -- judging ----------------------------------------------------------------------------------------------------------


def assess(
    answers: Answers,
    wants: Mapping[str, Want],
    *,
    question: InventoryQuery,
    interface: str | None,
    environ: Mapping[str, str],
) -> Report:
    """Judge the hosts that `wants` names. `interface` is what the user chose, `environ` what he has set for ranks."""
    hosts = tuple(wants)
    told = {host: answers.by_host[host] for host in hosts}
    inventories = {host: answer.inventory for host, answer in told.items() if answer.inventory}
    found = [answer.problem for answer in told.values() if answer.problem]
    found += host_checks.judge(
        host_checks.Evidence(
            inventories=inventories,
            wants=wants,
            interpreters=answers.interpreters,
            here=answers.here,
            by=answers.by,
            clock_offsets={host: clock_offset(told[host]) for host in inventories},
            script=question.script or "",
            directory=question.directory or "",
        )
    )
    network = None
    if len({facts.network_identity for facts in inventories.values()} | {answers.here.network_identity}) > 1:
        rounds = [calls.among(hosts) for calls in answers.rounds]
        barred = {
            f.address: f"{f.source} cannot reach it ({f.reason})"
            for calls in rounds
            for f in calls.failures
            if f.target
        }
        found += [check for calls in rounds[-1:] for check in explain_launcher(calls)]
        blamed = [explain(calls) for calls in rounds]
        try:
            network = choose_network(
                inventories, wanted=interface, reached_at=_reached(inventories, answers), environ=environ, barred=barred
            )
        except NoNetworkError as problem:
            last = blamed.pop() if blamed else []
            found += last or [error(host, "network", why, problem.hint) for host, why in problem.hosts.items()]
        # What became of networks that another took the place of.
        found += [msgspec.structs.replace(check, status="warning") for checks in blamed for check in checks]
    if network:
        found += _mtus(network)
    silent = [host for host in hosts if host not in inventories]
    checks = full_table(hosts, found, silent, answers.by)
    return Report(
        by=answers.by,
        fit=not any(check.status == "error" for check in checks),
        hosts=hosts,
        checks=checks,
        network=network,
        seconds=answers.seconds,
        inventories=inventories,
    )


def settle(
    plan: LaunchPlan,
    answers: Answers,
    connections: Connections,
    *,
    question: InventoryQuery,
    interface: str | None = None,
    environ: Mapping[str, str],
) -> tuple[Report, Answers]:
    """Judge the plan's hosts, and let them call each other on the network chosen; where that fails, choose the next.

    Returns the verdict and the answers, with what came of the calls. Takes what `assess` takes.
    """
    wants = wants_of(plan, answers, os.environ)
    while True:
        report = assess(answers, wants, question=question, interface=interface, environ=environ)
        if not report.fit or report.network is None:
            return report, answers
        callees = _callees(report.network, answers)
        if not answers.own_names.intersection(wants):
            own = own_addresses(with_network(plan, report, answers, environ))
            callees += _this_machine(own, connections)
        calls = call_all(callees, list(wants), report.network.subnet, connections)
        if not calls.failures:
            return report, answers
        answers = msgspec.structs.replace(answers, rounds=(*answers.rounds, calls))


def _callees(network: ClusterNetwork, answers: Answers) -> list[Callee]:
    """The hosts, at their chosen addresses. All of them must reach this machine, be it one of them."""
    return [
        Callee(host=one.host, addresses=(one.address,), ports=ports, by_all=one.host in answers.own_names)
        for one in network.hosts
        if (ports := answers.by_host[one.host].ports)
    ]


def _this_machine(addresses: Collection[str], connections: Connections) -> list[Callee]:
    ports = connections.listen()
    return [Callee(host="", addresses=tuple(sorted(addresses)), ports=ports, by_all=True)] if ports else []


def clock_offset(answer: Answer) -> float:
    """Seconds that the host's clock is ahead of ours, at least; 0 where its time lies between question and answer."""
    assert answer.inventory
    theirs = answer.inventory.time
    return max(0.0, theirs - answer.answered) or min(0.0, theirs - answer.asked)


def _reached(inventories: Mapping[str, Inventory], answers: Answers) -> dict[str, str]:
    """At which address each host was reached: sshd says; and from this machine the kernel's route to another.

    By Slurm, which goes by their names: what these stand for.
    """
    if answers.by == "srun":
        return {host: address for host in inventories if (address := address_of(host))}
    found = {host: facts.ssh_connection[2] for host, facts in inventories.items() if len(facts.ssh_connection) == 4}
    for host in inventories:
        if host in answers.own_names:
            found.pop(host, None)  # a launcher that was itself started over ssh
            others = list(found.values())
            if own := next(iter(sources(others[:1])), None):
                found[host] = own
    return found


def _mtus(network: ClusterNetwork) -> list[Check]:
    mtus = {choice.host: f"{choice.mtu}" for choice in network.hosts if choice.mtu}
    if not mtus:
        return []
    common, odd = host_checks.odd_ones(mtus)
    fix = "large packets may vanish between them; set the same MTU everywhere"
    return [
        warning(host, "network", f"{network.of(host).interface} has MTU {mtu}, the others' {common}", fix)
        for host, mtu in odd.items()
    ]


def wants_of(plan: LaunchPlan, answers: Answers, environ: Mapping[str, str]) -> dict[str, Want]:
    """What the plan wants of each host; ranks on this machine also see what `environ` says, those of others what is set there."""
    found = {}
    for host in plan.hosts:
        ranks = [rank for rank in plan.ranks if rank.host == host.name and rank.role == "worker"]
        there = answers.by_host[host.name].inventory if host.name in answers.by_host else None
        outside = there.visible_gpus if there else None
        if host.name in answers.own_names and answers.by == "ssh":
            outside = environ.get("CUDA_VISIBLE_DEVICES")
        listed = ranks[0].environment.get("CUDA_VISIBLE_DEVICES", outside) if ranks else None
        indices = None if host.chosen is None else host.chosen
        if listed is not None:
            visible = _indices(listed, there.gpus if there else ())
            places = indices if indices is not None else range(host.workers)
            indices = tuple(visible[place] for place in places if place < len(visible))
        none = listed is not None and not listed_gpus(listed)
        devices = ("cpu",) if none else tuple(rank.device for rank in ranks) or ("cpu",)
        found[host.name] = Want(
            ranks=host.workers or host.servers, devices=devices, gpu_indices=indices, visible_gpus=listed
        )
    return found


def _indices(listed: str, gpus: Sequence[Gpu]) -> list[int]:
    """The GPUs that CUDA_VISIBLE_DEVICES lists, by index or UUID, up to the first that is none of these, where CUDA stops, too."""
    found: list[int] = []
    for name in listed_gpus(listed):
        by_uuid = (gpu.index for gpu in gpus if name.startswith("GPU-") and (gpu.uuid or "").startswith(name))
        index = int(name) if name.isascii() and name.isdigit() else next(by_uuid, None)
        if index is None:
            break
        found.append(index)
    return found


# -- the choice, into the plan ----------------------------------------------------------------------------------------


def with_network(plan: LaunchPlan, report: Report, answers: Answers, environ: Mapping[str, str]) -> LaunchPlan:
    """The plan with each host's interface, and what makes every library keep to it."""
    network = report.network
    if network is None:  # every host is this machine, be it by a name that ssh alone knows
        alone = report.inventories and not sources([host.name for host in plan.hosts])
        return msgspec.structs.replace(plan, listen=("127.0.0.1",)) if alone else plan
    choices = {choice.host: choice for choice in network.hosts}
    hosts = tuple(
        msgspec.structs.replace(
            host,
            interface=choices[host.name].interface,
            address=choices[host.name].address,
            shell=report.inventories[host.name].shell or None,
        )
        for host in plan.hosts
    )
    ranks = tuple(
        msgspec.structs.replace(rank, environment={**choices[rank.host].environment, **rank.environment})
        for rank in plan.ranks
    )
    own = [choices[host.name].address for host in plan.hosts if host.name in answers.own_names]
    return msgspec.structs.replace(
        plan,
        hosts=hosts,
        ranks=ranks,
        network=network.reason,
        listen=tuple(own[:1]),
        seen_as=_seen_as(report, answers),
        engine_environment=engine_environment(network, answers.here, environ),
        notes=(*plan.notes, *network.notes),
    )


def _seen_as(report: Report, answers: Answers) -> tuple[str, ...]:
    """Where every host's sshd says that this machine called from; the address of a gateway, or a jump host, is not ours."""
    told = [report.inventories[host].ssh_connection[:1] for host in report.hosts if host not in answers.own_names]
    addresses = dict.fromkeys(connection[0] if connection else "127.0.0.1" for connection in told)
    ours = all(not address.startswith("127.") and address != "::1" and is_here(address) for address in addresses)
    return tuple(addresses) if ours else ()


# -- afterwards -------------------------------------------------------------------------------------------------------


def diagnose(plan: LaunchPlan, hosts: Sequence[str], say: Callable[[str], None]) -> PreflightError | None:
    """Ask hosts that did not start their ranks why; None when all of them seem fit. `say` hears of those that take long."""
    silent = [host for host in plan.hosts if host.name in hosts]
    question = question_of(plan)
    if (remote := engines.remote_shell(plan)) is None:
        return None
    with Connections() as connections:
        answers = ask(plan, silent, question, remote, connections, say)
        wants = {host: want for host, want in wants_of(plan, answers, os.environ).items() if host in hosts}
        ours = _this_machine(plan.listen or own_addresses(plan), connections)
        answers = msgspec.structs.replace(answers, rounds=(call_all(ours, list(wants), None, connections),))
    report = assess(answers, wants, question=question, interface=None, environ=os.environ)
    return report.refusal() if report.errors else None


MATTERS = ("ssh", "srun", "cuda", "gpus", "network")
"""What may have gone wrong with a host since its job began, such that others wait for it in vain."""


def look_again(plan: LaunchPlan, connections: Connections) -> list[str]:
    """Ask the hosts of a job that runs what they are now, and whether they reach each other still, at the addresses that they use.

    What is wrong, in lines: errors, and warnings on GPUs and the network, be they of the start.
    """
    remote = engines.remote_shell(plan)
    assert remote
    question = question_of(plan)
    answers = ask(plan, plan.hosts, question, remote, connections, lambda _: None, apart=True)
    callees = [
        Callee(host=host.name, addresses=(host.address,), ports=ports)
        for host in plan.hosts
        if host.address and (ports := answers.by_host[host.name].ports)
    ]
    hosts = [host.name for host in plan.hosts if answers.by_host[host.name].inventory]
    calls = call_all(callees, hosts, None, connections)
    checks = assess(answers, wants_of(plan, answers, os.environ), question=question, interface=None, environ={}).checks
    found = [c for c in (*explain(calls), *checks) if c.status in ("error", "warning") and c.check in MATTERS]
    return folded((check.host, str(check)) for check in found)


def question_of(plan: LaunchPlan) -> InventoryQuery:
    """What the plan's job needs of a host's files."""
    script = plan.script[1]
    return InventoryQuery(script=None if script == "-m" else script, directory=plan.directory, run_dir=plan.run_dir)
