"""Queries to hosts: explanations of failures, timeouts, sessions."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from distrib.cluster.inventory import (
    InventoryQuery,
)
from distrib_launch.engines.remote_shell import RemoteShell
from distrib_launch.preflight import collect as ask
from distrib_launch.preflight.check_result import fold_by_host
from distrib_launch.preflight.collect import HostQuery, explain_failure
from distrib_launch.preflight.host_sessions import SHELL_MARK, HostSessions, ReplyTimeout
from tests.conftest import SCRIPTS

WHERE = SCRIPTS / "where.py"
JOB = SCRIPTS / "job.py"
GLOO = SCRIPTS / "gloo.py"


@pytest.mark.parametrize(
    ("words", "reason", "fix"),
    [
        ("ssh: Could not resolve hostname n2: Name or service not known", "does not resolve", "/etc/hosts here (if n2 is a file: give its path)"),
        ("ssh: connect to host n2 port 22: Connection refused", "no sshd listens on port 22", "systemctl start ssh"),
        ("ssh: connect to host n2 port 22: No route to host", "No route to host", "firewall"),
        ("ssh: connect to host n2 port 22: Connection timed out", "timed out", "n2 is up"),
        ("root@n2: Permission denied (publickey,password).", "refuses the key", "ssh-copy-id n2"),
        ("No ED25519 host key is known for n2 and you have requested strict checking.\nHost key verification failed.",
         "host key is not known", "ssh-keyscan n2"),
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "host key has changed",
         "ssh-keygen -R n2"),
        ("Permissions 0644 for '/root/.ssh/id' are too open.\nroot@n2: Permission denied (publickey).", "may access",
         "chmod 600"),
        ("Bad owner or permissions on /root/.ssh/config", "/root/.ssh/config", "chmod 600"),
        ("Received disconnect from 10.0.0.2 port 22:2: Too many authentication failures", "refuses the key", "~/.ssh/config"),
        ("kex_exchange_identification: Connection closed by remote host", "closes the connection", "MaxStartups"),
        ("", "ssh prints nothing", "try: ssh n2 true"),
    ],
)  # fmt: skip
def test_failures_of_ssh_are_told_apart(words, reason, fix):
    target = HostQuery(name="n2", python="/opt/python", is_local=False, question=InventoryQuery())
    check = explain_failure(target, 255, words)
    assert (check.host, check.check, check.status) == ("n2", "ssh", "error")
    assert reason in check.reason
    assert fix in check.fix


@pytest.mark.parametrize(
    ("code", "words", "reason"),
    [
        (127, "bash: line 1: /opt/python: No such file or directory", "cannot run /opt/python there"),
        (126, "sh: 1: /opt/python: Permission denied", "cannot run /opt/python there"),
        (1, "/opt/python: Command not found.", "cannot run /opt/python there"),
        (
            1,
            "Fatal Python error: init_fs_encoding: no codec\nPython runtime state: core initialized\n\n<no Python frame>",
            "Fatal Python error: init_fs_encoding: no codec (PYTHONHOME set there)",
        ),
        (1, "SyntaxError: future feature annotations is not defined", "too old"),
        (1, "This account is currently not available.", "This account is currently not available."),
    ],
)
def test_failures_of_the_interpreter_are_told_apart(code, words, reason):
    target = HostQuery(name="n2", python="/opt/python", is_local=False, question=InventoryQuery())
    check = explain_failure(target, code, words, "PYTHONHOME=/nope")
    assert (check.check, check.status) == ("python", "error")
    assert reason in check.reason


@pytest.mark.parametrize(
    ("code", "out", "err", "reached", "check", "reason"),
    [
        (1, "This account is currently not available.", "", False, "ssh",
         "it prints 'This account is currently not available.'"),
        (0, "", "", False, "ssh", "its login shell exits before the command"),
        (1, "", "nonexistent_cmd: command not found\nValueError: invalid literal for int() with base 10: ''", True, "python",
         "reads standard input"),
        (0, "hello", "", True, "python", "prints something else: 'hello'"),
    ],
)  # fmt: skip
def test_login_shells_that_do_not_come_to_the_command_are_told_so(code, out, err, reached, check, reason):
    target = HostQuery(name="n2", python="/opt/python", is_local=False, question=InventoryQuery())
    told = explain_failure(target, code, err, out, reached=reached)
    assert (told.check, told.status) == (check, "error") and reason in told.reason and "ssh n2" in told.fix


def test_keys_and_ports_in_what_to_do_about_ssh():
    other = HostQuery(name="n2", python="/opt/python", is_local=False, question=InventoryQuery(), port=2222)
    changed = "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed."
    assert "ssh-keygen -R '[n2]:2222'" in explain_failure(other, 255, changed).fix


def test_closing_ends_those_who_wait_for_an_answer(tmp_path):
    """Ctrl-C ends a query even if another process holds the pipe of the reply open."""
    connections = HostSessions()
    ended = threading.Event()
    file = tmp_path / "pid"

    def ask():
        words = f'setsid sh -c "echo \\$\\$ > {file}.new; mv {file}.new {file}; exec sleep 60" & wait'
        with contextlib.suppress(OSError):
            connections.run_program("n1", ["sh", "-c", words], "pass", ReplyTimeout(50.0, 50.0))
        ended.set()

    threading.Thread(target=ask, daemon=True).start()
    while not file.exists():
        time.sleep(0.01)
    try:
        connections.close()
        assert ended.wait(15.0)
    finally:
        os.kill(int(file.read_text()), signal.SIGKILL)


def test_a_python_that_is_slow_is_waited_for_and_an_ssh_that_is_not(tmp_path):
    with HostSessions() as connections:
        for words, seconds in ((f"echo '{SHELL_MARK}'; sleep 60", 1.5), ("sleep 60", 0.5)):
            begun = time.monotonic()
            told = connections.run_program("n1", ["sh", "-c", words], "pass", ReplyTimeout(0.5, 1.5))
            assert told.code is None and (SHELL_MARK in told.out) == (seconds > 1)
            assert seconds <= time.monotonic() - begun < seconds + 0.9


def test_hosts_without_a_login_are_queried_once_more(tmp_path):
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f'#!/bin/sh\nif [ $1 = dead ] || [ ! -e {tmp_path}/$1 ]; then touch {tmp_path}/$1; sleep 60; fi\nexec sh -c "$2"\n'
    )
    ssh.chmod(0o755)
    targets = [
        ask.HostQuery(name=name, python=sys.executable, is_local=False, question=InventoryQuery())
        for name in ("busy", "dead")
    ]
    said: list[str] = []
    with HostSessions() as connections:
        remote = RemoteShell(transport="ssh", words=(str(ssh),))
        told = ask.query_hosts(
            targets, remote, sys.executable, lambda _: False, connections, said.append, ReplyTimeout(login_seconds=3.0)
        )
    assert told["busy"].inventory is not None
    assert "dead: ssh: no login within 3 s; check that dead is up" in str(told["dead"].problem)
    assert said == ["no login within 3 s: busy, dead; trying once more"]


def test_hosts_of_which_the_same_is_said_share_a_line():
    told = [(f"n{i}", f"n{i}: ssh: no login; is n{i} up? try: ssh n{i} true") for i in range(1, 21)]
    other = [("n21", "n21: ssh: it refuses our key"), ("gpu", "gpu: ssh: no login; is n1 up? try: ssh n1 true")]
    assert fold_by_host([*told, *other]) == [
        "n[1-20]: ssh: no login; is n1 up? try: ssh n1 true",
        "n21: ssh: it refuses our key",
        "gpu: ssh: no login; is n1 up? try: ssh n1 true",
    ]


@pytest.mark.processes
def test_the_limit_of_open_files_is_raised_or_refused():
    code = (
        "import resource, sys\nfrom distrib_launch.open_files import require_open_files\n"
        "from distrib.errors import LaunchError\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, int(sys.argv[1])))\n"
        "try:\n    require_open_files(100, 800)\n"
        "except LaunchError as error:\n    print(error)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    told = [
        subprocess.run([sys.executable, "-c", code, str(hard)], capture_output=True, text=True).stdout
        for hard in (4096, 1024)
    ]
    assert told[0] == "3984\n"  # 1056 of them for connections without proof of the token
    assert told[1].startswith("800 ranks on 100 hosts need about 2928 open files here, but the limit is 1024")
