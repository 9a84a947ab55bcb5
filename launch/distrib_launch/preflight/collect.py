"""Collect the inventories of all hosts in parallel, over ssh or Slurm, and explain why a host sent none."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shlex
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import msgspec

from distrib.cluster.inventory import (
    Inventory,
    InventoryQuery,
    InventoryReply,
    agent_program,
    own_inventory,
    parse_reply,
)
from distrib.cluster.node import name_hosts
from distrib.errors import LaunchError
from distrib_launch.engines import srun
from distrib_launch.engines.remote_shell import RemoteShell, Transport
from distrib_launch.preflight.check_result import CheckResult, error
from distrib_launch.preflight.host_sessions import LOADER, SHELL_MARK, HostSessions, ReplyTimeout

SSH_EXPLANATIONS = (
    (
        "could not resolve hostname",
        "its name does not resolve",
        "correct the hostfile, or add the host to DNS or /etc/hosts here (if {host} is a file: give its path)",
    ),
    (
        "remote host identification has changed",
        "its host key has changed: it was reinstalled, or another machine has its address",
        "if that is expected: ssh-keygen -R {known_host}, then {ssh} to accept the new key",
    ),
    (
        "host key verification failed|no .* host key is known",
        "its host key is not known here",
        "{ssh} once and accept it, or ssh-keyscan {port}{host} >> ~/.ssh/known_hosts",
    ),
    (
        "are too open|bad owner or permissions",
        "ssh ignores a key or refuses a configuration that other users may access: {words}",
        "chmod 600 the file that it names",
    ),
    (
        "permission denied|too many authentication failures",
        "it refuses the key of this user: {words}",
        "ssh-copy-id {port}{login}, or name the key in ~/.ssh/config; see journalctl -u ssh on {host}",
    ),
    (
        "connection refused",
        "it is up, but no sshd listens on port {number}",
        "start sshd there (systemctl start ssh), or name its port in the hostfile: port=N",
    ),
    (
        "timed out|no route to host|network is unreachable|host is down",
        "{words}",
        "check that {host} is up and that no firewall blocks ssh; try: {ssh} true",
    ),
    (
        "connection (closed|reset)|kex_exchange_identification",
        "its sshd closes the connection: {words}",
        "on {host} see journalctl -u ssh; MaxStartups and hosts.deny are usual causes",
    ),
)
"""Pattern of ssh's output, the cause, and a hint; ssh's exit code is 255 for all of them."""


class HostQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query to one host."""

    name: str
    python: str
    """Interpreter that runs the inventory program."""
    is_local: bool
    """The host is this machine and needs no remote shell."""
    question: InventoryQuery
    transport: Transport = "ssh"
    user: str | None = None
    port: int | None = None

    @property
    def ssh(self) -> str:
        """Return the command by which a user logs in."""
        port = f"-p {self.port} " if self.port else ""
        return f"ssh {port}{self.user}@{self.name}" if self.user else f"ssh {port}{self.name}"

    def _try_python(self, argument: str = "-V") -> str:
        """Return the command by which a user tries the interpreter.

        Args:
            argument: Argument of the interpreter.
        """
        command = shlex.join([self.python, argument])
        if self.is_local:
            return command
        return f"{self.ssh} {command}" if self.transport == "ssh" else f"srun --overlap -n1 -w {self.name} {command}"


class HostReply(msgspec.Struct, frozen=True, kw_only=True):
    """Inventory of a host, or the reason why there is none."""

    inventory: Inventory | None = None
    ports: tuple[int, ...] = ()
    """Ports on which the host accepts test connections while its session is open."""
    problem: CheckResult | None = None
    no_login: bool = False
    """The login did not finish in time: a second try may succeed."""
    sent: float = 0.0
    """Unix time of this machine before the query."""
    received: float = 0.0
    """Unix time of this machine after the reply."""


def query_hosts(
    queries: Sequence[HostQuery],
    remote: RemoteShell,
    own_python: str,
    is_local: Callable[[str], bool],
    sessions: HostSessions,
    say: Callable[[str], None],
    timeout: ReplyTimeout = ReplyTimeout(),  # noqa: B008 (it is immutable)
) -> dict[str, HostReply]:
    """Query all hosts in parallel; return replies by host, in the order of the queries.

    Args:
        queries: One for each host.
        remote: Program that reaches hosts.
        own_python: Interpreter of this process; a local host with it is not queried by a process. Empty: always a process.
        is_local: Return True if a name belongs to this machine; it may take time to resolve the name.
        sessions: Owner of the connections.
        say: Called with notices about hosts that take long.
        timeout: Time limits of each reply.
    """
    waiting = {query.name: None for query in queries}

    def query_and_count(query: HostQuery) -> HostReply:
        reply = query_one(query)
        waiting.pop(query.name, None)
        return reply

    def query_one(query: HostQuery) -> HostReply:
        if query.is_local or is_local(query.name):  # the engine starts no daemon on this machine
            question = msgspec.structs.replace(query.question, programs=())
            query = msgspec.structs.replace(query, is_local=True, question=question)
        if query.is_local and query.python == own_python:
            now = time.time()
            own = own_inventory(query.question)
            return HostReply(inventory=own, ports=sessions.listen(), sent=now, received=time.time())
        command = [query.python, "-X", "utf8", "-c", LOADER]
        if not query.is_local:
            command = remote.command(
                query.name, f"echo '{SHELL_MARK}'; env | sed -n '/^PYTHON/p'; {shlex.join(command)}"
            )
            if remote.transport == "ssh":
                command = sessions.shared(command)
        return _query(query, command, sessions, None if query.is_local else remote.environment, timeout)

    if all(query.is_local for query in queries):
        return {query.name: query_and_count(query) for query in queries}
    logins = 16 * len(os.sched_getaffinity(0))  # more of them slow each other down
    with _notice_after(waiting, say):
        found = sessions.map_hosts(query_and_count, queries, logins)
    replies = {query.name: reply for query, reply in zip(queries, found, strict=True)}
    if silent := [query for query in queries if replies[query.name].no_login]:
        # Logins to all hosts at once may have overloaded this machine.
        what = "login" if remote.transport == "ssh" else "step"
        names = name_hosts(query.name for query in silent)
        say(f"no {what} within {timeout.login_seconds:.0f} s: {names}; trying once more")
        replies |= zip((query.name for query in silent), sessions.map_hosts(query_one, silent, logins), strict=True)
    return replies


@contextlib.contextmanager
def _notice_after(waiting: Collection[str], say: Callable[[str], None]) -> Iterator[None]:
    timer = threading.Timer(8.0, lambda: say(f"waiting for the reply of {name_hosts(waiting)}"))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _query(
    query: HostQuery,
    command: Sequence[str],
    sessions: HostSessions,
    environment: Mapping[str, str] | None,
    timeout: ReplyTimeout,
) -> HostReply:
    sent = time.time()
    if query.is_local:
        timeout = timeout._replace(login_seconds=timeout.total_seconds)
    try:
        output = sessions.run_program(query.name, command, agent_program(query.question), timeout, environment)
    except OSError as failure:
        if query.is_local:
            return HostReply(problem=_no_interpreter(query, failure.strerror or str(failure)))
        hint = "install ssh, or name --ssh-command" if failure.errno == errno.ENOENT else "see ulimit -a"
        raise LaunchError(f"cannot run {command[0]}: {failure.strerror}", hint=hint, code="tool-missing") from None
    received = time.time()
    if reply := parse_reply(output.out, InventoryReply):
        return HostReply(inventory=reply.inventory, ports=reply.ports, sent=sent, received=received)
    reached = query.is_local or SHELL_MARK in output.out
    if output.code is None:
        return HostReply(problem=_timed_out(query, output.err, timeout, reached=reached), no_login=not reached)
    text = output.out.replace(SHELL_MARK, "").strip()
    problem = explain_failure(query, output.code, output.err, text, reached=reached)
    return HostReply(problem=problem, sent=sent, received=received)


# -- explanations -----------------------------------------------------------------------------------------------------


def explain_failure(query: HostQuery, code: int, err: str, out: str = "", *, reached: bool = True) -> CheckResult:
    """Explain why a host sent no inventory.

    Args:
        query: The query.
        code: Exit code of ssh, srun or the interpreter.
        err: Standard error of the command.
        out: Standard output without the mark of the shell.
        reached: The host's shell ran the command.
    """
    if query.transport == "srun" and not query.is_local and not reached:
        if explanation := srun.ENGINE.explain(err):
            return error(query.name, "srun", *explanation)
        return error(query.name, "srun", f"Slurm starts no step there{_srun_line(err)}", f"try: {query._try_python()}")
    if code == 255 and query.transport == "ssh" and not query.is_local:
        return _explain_ssh(query, err)
    lines = [line.strip() for line in err.splitlines() if line.strip() and not line.startswith("srun: ")]
    words = lines[-1] if lines else f"exit code {code}"
    if not reached or "invalid literal for int()" in words or "exec('" in words:
        printed = next((line.strip()[:120] for line in reversed(out.splitlines()) if line.strip()), "")
        return error(
            query.name, "ssh" if not reached else "python",
            "its login shell exits before the command, or reads standard input" + (f"; it prints {printed!r}" if printed else ""),
            f"check ~/.bashrc there for exit, exec or read; try: {query._try_python()}",
        )  # fmt: skip
    if fatal := next((line for line in lines if line.startswith("Fatal Python error")), ""):
        names = ", ".join(re.findall(r"^(PYTHON\w+)=", out, re.MULTILINE))
        seen = f" ({names} set there)" if names else ""
        fix = f"see whether its login files (~/.bashrc, /etc/environment) set {names}; try: " if names else ""
        return error(
            query.name, "python", f"{query.python} does not run there: {fatal}{seen}", fix + query._try_python()
        )
    if code in (126, 127) or re.search(r"command not found|no such file or directory|permission denied", words, re.I):
        return _no_interpreter(query, words)
    if "SyntaxError" in err:
        return error(query.name, "python", f"{query.python} is too old for distrib", "use Python 3.10 or later")
    out = re.sub(r"^PYTHON\w+=.*\n?", "", out, flags=re.MULTILINE).strip()
    if code == 0 and out:
        words = f"its login shell prints something else: {out.splitlines()[-1].strip()[:120]!r}"
    return error(query.name, "python", f"{query.python} does not run there: {words}", query._try_python())


def _no_interpreter(query: HostQuery, words: str) -> CheckResult:
    return error(
        query.name, "python", f"cannot run {query.python} there: {words}",
        "install distrib there at the same path, or name the host's interpreter in the hostfile: python=/PATH",
    )  # fmt: skip


def _explain_ssh(query: HostQuery, err: str) -> CheckResult:
    lines = [line.strip() for line in err.splitlines() if line.strip() and not line.startswith("Warning: Permanently")]
    words = lines[-1].removeprefix("ssh: ") if lines else "ssh prints nothing"
    fields = {
        "host": query.name,
        "login": f"{query.user}@{query.name}" if query.user else query.name,
        "port": f"-p {query.port} " if query.port else "",
        "number": query.port or 22,
        "known_host": shlex.quote(f"[{query.name}]:{query.port}") if query.port else query.name,
        "ssh": query.ssh,
        "words": words,
    }
    if "UNKNOWN port" in err:  # ssh's name for the end of a ProxyJump or ProxyCommand that failed
        return error(query.name, "ssh", f"the jump host or proxy command failed: {lines[0]}", f"try: {query.ssh} true")
    for pattern, reason, fix in SSH_EXPLANATIONS:
        if re.search(pattern, err, re.IGNORECASE):
            return error(query.name, "ssh", reason.format(**fields), fix.format(**fields))
    return error(query.name, "ssh", f"ssh cannot log in: {words}", f"try: {query.ssh} true")


def _srun_line(err: str) -> str:
    lines = [line.strip().removeprefix("srun: ").removeprefix("error: ") for line in err.splitlines() if line.strip()]
    return f": {lines[0]}" if lines else ""


def _timed_out(query: HostQuery, err: str, timeout: ReplyTimeout, *, reached: bool) -> CheckResult:
    if reached:
        where = "" if query.is_local else f"{query.transport} logs in, but "
        return error(
            query.name, "python", f"{where}{query.python} has not replied within {timeout.total_seconds:.0f} s",
            f"check for a disk or network file system that hangs there; try: {query._try_python()}",
        )  # fmt: skip
    if query.transport == "srun":
        what = f"Slurm has started no step there within {timeout.login_seconds:.0f} s{_srun_line(err)}"
        return error(query.name, "srun", what, f"see scontrol show node {query.name}, and slurmd's log there")
    return error(
        query.name, "ssh", f"no login within {timeout.login_seconds:.0f} s",
        f"check that {query.name} is up, that no firewall blocks ssh and that ~/.bashrc there does not wait; try: {query.ssh} true",
    )  # fmt: skip
