"""Preflight checks connections between all hosts, and names the host that cannot be reached."""

from __future__ import annotations

import contextlib
import json
import re
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrib.cluster.remote import connectivity_agent
from distrib_launch.preflight.connectivity import (
    ConnectionAttempt,
    ConnectionRound,
    ProbeTarget,
    _targets_of,
    explain_host_failures,
    explain_launcher_failures,
)
from distrib_launch.preflight.host_sessions import HostSessions
from distrib_launch.preflight.interface_selection import NoNetworkError, choose_network
from tests.conftest import SCRIPTS, TOPO
from tests.support.inventories import interface, inventory

WHERE = SCRIPTS / "where.py"
NET = "10.0.0.0/24"
NEAR = 16
"""Largest number of hosts that all connect to each other."""


def callee(number, *, from_all=False):
    return ProbeTarget(host=f"n{number}", addresses=(f"10.0.0.{number}",), ports=(40000,), from_all=from_all)


def calls(hosts, *failed, subnet=NET, lost_bytes=0):
    """Return the connection results of all pairs of hosts, and this machine (0); the pairs in `failed` failed.

    `lost_bytes`: these pairs connected, but packets of this size were lost.
    """
    reason = f"packets of {lost_bytes} bytes are lost on the path" if lost_bytes else "timed out"
    numbers = range(1, hosts + 1)
    return ConnectionRound(
        subnet=subnet,
        attempts=tuple(
            ConnectionAttempt(
                source=f"n{source}",
                target=f"n{target}" if target else "",
                address=f"10.0.0.{target}",
                reason=reason if (source, target) in failed else "",
            )
            for source in numbers
            for target in (0, *numbers)
            if source != target
        ),
    )


def blamed(*arguments, **more):
    return {check.host: check for check in explain_host_failures(calls(*arguments, **more))}


# -- connection attempts ----------------------------------------------------------------------------------------------


@given(st.integers(1, 300))
def test_every_host_calls_and_is_called_by_enough_others(size):
    callees = [callee(number, from_all=number == 0) for number in range(size)]
    called = dict.fromkeys((c.host for c in callees), 0)
    for source in called:
        others = [c.host for c in _targets_of(source, callees)]
        assert source not in others
        assert len(set(others)) == len(others)
        assert len(others) == size - 1 if size - 1 <= NEAR else NEAR / 2 <= len(others) <= 2 * NEAR
        for other in others:
            called[other] += 1
    assert called.pop("n0") == size - 1  # all hosts connect to n0
    assert not called or min(called.values()) >= min(size - 1, NEAR / 2)
    assert len(list(_targets_of("elsewhere", [callee(0, from_all=True)]))) == 1


def test_a_door_takes_any_number_of_calls():
    """The kernel queues at most 128 connections on older versions. It drops further ones while the queue is full."""
    with HostSessions() as connections:
        target = ("127.0.0.1", connections.listen()[0])
        for _ in range(3):
            assert connectivity_agent.test_targets([target] * 600, 5.0) == [""] * 600
        connections.stop_listening()
        assert connectivity_agent.test_targets([target], 1.0) == ["Connection refused"]


def test_a_call_tells_why_it_failed():
    with contextlib.ExitStack() as stack:
        there = stack.enter_context(connectivity_agent.listen(0))
        full = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):  # the kernel accepts one more than the backlog and drops the rest
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        with socket.create_server(("127.0.0.1", 0)) as gone:
            closed = gone.getsockname()
        port = connectivity_agent.port_number(there)
        told = connectivity_agent.test_targets(
            [("127.0.0.1", port), closed, full.getsockname(), ("127.0.0.2", port)], 0.3
        )
    assert told == ["", "Connection refused", "timed out", ""]
    assert connectivity_agent.test_targets([], 0.3) == []


# -- attribution ------------------------------------------------------------------------------------------------------


def test_a_host_that_nobody_reaches_is_blamed():
    found = blamed(3, (1, 3), (2, 3))
    assert list(found) == ["n3"]
    assert found["n3"].reason.startswith("n1, n2 cannot reach it at 10.0.0.3 (timed out)")


def test_a_host_that_reaches_nobody_is_blamed_where_the_others_get_through():
    found = blamed(3, (3, 1), (3, 2))
    assert list(found) == ["n3"]
    assert "none of the other hosts" in found["n3"].reason


def test_a_host_that_reaches_nobody_because_nobody_lets_it_in_is_not_blamed():
    """One host has no firewall, and all other hosts have one."""
    pairs = [(a, b) for a in (1, 2, 3, 4) for b in (2, 3, 4) if a != b]
    assert list(blamed(4, *pairs)) == ["n2", "n3", "n4"]


def test_where_nobody_gets_through_everybody_is_blamed_and_the_remedy_said_once():
    found = blamed(3, *[(a, b) for a in (1, 2, 3) for b in (1, 2, 3) if a != b])
    assert sorted(found) == ["n1", "n2", "n3"]
    assert [f"ufw allow from {NET}" in check.fix for check in found.values()] == [True, False, False]


def test_hosts_that_do_not_reach_this_machine_are_told_so():
    (check,) = explain_launcher_failures(calls(2, (2, 0), (1, 2)))
    assert check.host == "n2"
    assert f"cannot reach this machine, {socket.gethostname()}, at 10.0.0.0" in check.reason


def test_a_host_with_another_mtu_is_named():
    pairs = [(a, b) for a in (1, 2, 3, 4) for b in (1, 2, 3, 4) if a != b]
    one = blamed(4, *[pair for pair in pairs if 3 in pair], lost_bytes=9000)
    assert list(one) == ["n3"]
    assert "packets of 9000 bytes are lost" in one["n3"].reason and "mtu 1500" in one["n3"].fix
    assert sorted(blamed(2, (1, 2), (2, 1), lost_bytes=9000)) == ["n1", "n2"]
    (check,) = explain_launcher_failures(calls(2, (2, 0), lost_bytes=9000))
    assert (check.host, "mtu 1500" in check.fix) == ("n2", True)


def test_only_hosts_that_are_left_are_judged():
    assert calls(3, (1, 3), (2, 3), (3, 0)).among(["n1", "n2"]).failures == []


def test_a_network_that_does_not_lead_there_is_passed_over_for_one_that_may():
    hosts = {
        f"n{i}": inventory(
            f"n{i}",
            interfaces=(
                interface("eth0", f"10.0.0.{i}/24", speed=1e9),
                interface("eth1", f"10.1.0.{i}/24", speed=1e8),
            ),
        )
        for i in (1, 2)
    }
    assert choose_network(hosts).subnet == "10.0.0.0/24"
    other = choose_network(hosts, failed={"10.0.0.2": "n1 cannot reach it (timed out)"})
    assert other.subnet == "10.1.0.0/24"
    assert other.passed_over == ("n2's eth0 (10.0.0.2/24): n1 cannot reach it (timed out)",)
    with pytest.raises(NoNetworkError):
        choose_network(hosts, failed={"10.0.0.2": "", "10.1.0.1": "", "10.0.0.1": ""})


def test_no_bridge_takes_the_place_of_the_network_that_all_share():
    bridge = interface("br-a", "172.18.0.1/16", kind="bridge")
    cards = {i: (interface("eth0", f"10.0.0.{i}/24"), *([bridge] if i == 2 else [])) for i in (1, 2)}
    hosts = {f"n{i}": inventory(f"n{i}", interfaces=found) for i, found in cards.items()}
    with pytest.raises(NoNetworkError, match=r"10\.0\.0\.2/24"):
        choose_network(hosts, failed={"10.0.0.2": "n1 cannot reach it"})


# -- on the virtual cluster -------------------------------------------------------------------------------------------


@pytest.mark.cluster
def test_firewalls_that_let_in_ssh_alone_are_named_before_the_start(make_cluster, launch):
    cluster = make_cluster(4)
    cluster.wall("n3", verdict="drop")
    cluster.wall("n4", verdict="reject with icmpx admin-prohibited")
    run = launch("-H", cluster.hostfile, WHERE, cluster=cluster)
    assert run.code == 3, run
    for host, others, why in ("n3", "n1, n2, n4", "timed out"), ("n4", "n1, n2, n3", "No route to host"):
        assert f"{host}: network: {others} cannot reach it at {cluster.address(host)} ({why})" in run.err
    assert "error: n3: network: " in run.err and "firewall" in run.err
    assert "n1: network" not in run.err
    assert run.seconds < 30
    left = launch("-H", cluster.hostfile, "--drop-bad-hosts", WHERE, cluster=cluster)
    assert left.code == 0, left
    assert left.result["hosts"] == ["n1", "n2"]


@pytest.mark.cluster
def test_a_firewall_that_lets_in_some_ports_is_named(make_cluster):
    """The kernel may choose an open port by chance. The ranks would choose other ports, and hang."""
    cluster = make_cluster(3)
    cluster.wall("n2", ports="22, 32768-44999")
    told = cluster.run("n1", [TOPO, "check", "-H", cluster.hostfile])
    assert told.returncode == 3, told
    assert "error: n2: network: n1, n3 cannot reach it at 198.18.0.2 (timed out" in told.stdout
    assert re.search(r"timed out on \d of 9 ports, such as \d{5}\)", told.stdout), told.stdout


@pytest.mark.cluster
def test_a_switch_port_without_jumbo_frames_is_named_before_the_start(make_cluster, launch):
    """All connections would succeed, and the ranks would then hang."""
    cluster = make_cluster(4)
    cluster.raise_mtu(narrow="n3")
    cluster.run("n1", ["ip", "link", "set", "eth0", "mtu", "1500"], check=True)  # as the MTU of a login node
    run = launch("-H", "n[2-4]:1", WHERE, cluster=cluster)
    assert run.code == 3, run
    assert "n3: network" in run.err and "packets of 9000 bytes" in run.err and "same MTU" in run.err
    assert "n2: network" not in run.err
    left = launch("-H", "n[2-4]:1", "--drop-bad-hosts", WHERE, cluster=cluster)
    assert left.code == 0, left
    assert left.result["hosts"] == ["n2", "n4"]


@pytest.mark.cluster
def test_a_host_that_gets_out_to_nobody_is_named(make_cluster):
    cluster = make_cluster(3)
    cluster.wall("n2", hook="output")
    told = cluster.run("n1", [TOPO, "check", "-H", cluster.hostfile, "--json"])
    assert told.returncode == 3, told
    bad = [check for check in json.loads(told.stdout)["checks"] if check["status"] == "error"]
    assert [(check["host"], check["check"]) for check in bad] == [("n2", "network")]
    assert "it reaches none of the other hosts" in bad[0]["reason"]


@pytest.mark.cluster
def test_a_launcher_behind_a_firewall_is_told_so(make_cluster, launch):
    cluster = make_cluster(3)
    cluster.wall("n1")
    run = launch("-H", "n2:1,n3:1", WHERE, cluster=cluster)
    assert run.code == 3, run
    assert f"n2, n3: network: it cannot reach this machine, n1, at {cluster.address('n1')} (timed out)" in run.err


@pytest.mark.cluster
@pytest.mark.forked
def test_ranks_keep_to_the_ports_that_the_kernel_may_give(make_cluster, launch):
    """A site opens some ports and restricts the kernel to them. Libraries that choose a port must use that range."""
    cluster = make_cluster(3)
    for host in cluster.hosts:
        cluster.run(host, ["sh", "-c", "echo 40000 41000 > /proc/sys/net/ipv4/ip_local_port_range"], check=True)
        cluster.wall(host, ports="22, 40000-41000")
    for script in (SCRIPTS / "mpi_ring.py", SCRIPTS / "gloo.py"):
        run = launch("-H", cluster.hostfile, "--timeout", "60s", script, cluster=cluster)
        assert run.code == 0, run


@pytest.mark.cluster
def test_addresses_of_ipv6_that_lead_nowhere_are_left_alone(make_cluster, launch):
    """Open MPI uses all addresses of a matching NIC. Half of a LAN with IPv6 hung."""
    cluster = make_cluster(3)
    for number, host in enumerate(cluster.hosts[:2], start=1):
        cluster.run(host, ["ip", "-6", "addr", "add", f"fd00::{number}/64", "dev", "eth0", "nodad"], check=True)
    run = launch("-H", cluster.hostfile, "--timeout", "60s", SCRIPTS / "mpi_ring.py", cluster=cluster)
    assert run.code == 0, run


@pytest.mark.cluster
def test_another_network_is_taken_where_the_first_leads_nowhere(make_cluster, launch):
    cluster = make_cluster(2, second_rates={"n1": "1gbit", "n2": "1gbit"})
    cluster.wall("n2")
    run = launch("-H", cluster.hostfile, WHERE, cluster=cluster)
    assert run.code == 0, run
    plan = json.loads((run.run_dir / "plan.json").read_text())
    assert [host["interface"] for host in plan["hosts"]] == ["eth1", "eth1"]
    assert f"warning: n2: network: n1 cannot reach it at {cluster.address('n2')} (timed out)" in run.err
