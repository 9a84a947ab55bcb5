"""Liveness of silent hosts: a host is alive if its kernel replies to a connection attempt."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest

from distrib_launch.supervisor.host_liveness import HostLiveness


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for(liveness: HostLiveness, seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if gone := liveness.take_lost_hosts():
            return gone
        time.sleep(0.02)
    return []


def test_a_host_that_is_silent_but_refuses_a_connection_lives():
    liveness = HostLiveness(0.1)
    liveness.watch("busy", "127.0.0.1", closed_port())
    assert wait_for(liveness, 1.5) == []


def test_a_host_that_is_silent_but_accepts_a_connection_lives():
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        liveness = HostLiveness(0.1)
        liveness.watch("busy", "127.0.0.1", server.getsockname()[1])
        assert wait_for(liveness, 1.0) == []


def test_a_host_lives_that_answers_at_one_of_its_ports():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as callers:
        for _ in range(3):  # the kernel drops connects beyond its queue
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        liveness = HostLiveness(0.1)
        liveness.watch("gone", "127.0.0.1", full.getsockname()[1])
        liveness.watch("behind a wall", "127.0.0.1", full.getsockname()[1], closed_port())
        assert wait_for(liveness, 10) == ["gone"]
        assert wait_for(liveness, 0.5) == []


def test_a_host_that_neither_speaks_nor_answers_has_vanished_and_is_named_once(monkeypatch):
    # This machine drops no packets silently, so the test fakes connects that stay open.
    monkeypatch.setattr(socket.socket, "connect_ex", lambda self, target: 115)
    monkeypatch.setattr("distrib_launch.supervisor.host_liveness.select.poll", lambda: Deaf())
    liveness = HostLiveness(0.2)
    liveness.watch("gone", "198.18.0.99", None)
    begun = time.monotonic()
    assert wait_for(liveness, 10) == ["gone"]
    assert 0.7 < time.monotonic() - begun < 15
    assert wait_for(liveness, 0.5) == []


def test_a_host_to_which_the_kernel_knows_no_way_any_more_does_not_live():
    """Every attempt fails at once, as on a network without a router some seconds after the loss."""
    liveness = HostLiveness(0.1)
    liveness.watch("gone", "255.255.255.255", None)  # every connection to it fails
    assert wait_for(liveness, 10) == ["gone"]


class Deaf:
    def register(self, *_: object) -> None: ...

    def poll(self, _: int) -> list[tuple[int, int]]:
        return []


@pytest.mark.parametrize("heard", ["watched", "unknown"])
def test_signs_of_life_count_for_watched_hosts_only(heard):
    liveness = HostLiveness(0.1)
    liveness.watch("watched", "127.0.0.1", closed_port())
    liveness.on_life(heard)
    assert wait_for(liveness, 0.3) == []
