"""Times that the documentation promises until the launcher or a rank agent notices a loss, on a simulated clock."""

from __future__ import annotations

import errno
import signal
import socket
import struct
import types
from typing import Any

import pytest

from distrib.errors import LaunchError
from distrib_launch.rank_agent import agent, control_channel
from distrib_launch.rank_agent.control_channel import Assignment, Kind, SilenceMonitor
from distrib_launch.supervisor import attempts, host_liveness, stop_sequence, supervisor
from distrib_launch.supervisor.host_liveness import LIVENESS, HostLiveness
from distrib_launch.supervisor.stop_sequence import StopSequence
from distrib_launch.supervisor.supervisor import Supervisor
from tests.conftest import ROOT, SCRIPTS
from tests.support.simulated_clock import SimulatedClock


@pytest.mark.parametrize("timeout", [LIVENESS.silence_seconds, 7.0, LIVENESS.async_silence_seconds])
def test_a_host_is_lost_after_its_timeout_and_one_probe(monkeypatch, timeout):
    clock = SimulatedClock(monkeypatch, host_liveness)
    monkeypatch.setattr(socket.socket, "connect_ex", lambda self, target: errno.EINPROGRESS)
    no_answer = types.SimpleNamespace(register=lambda *_: None, poll=lambda _: [])
    monkeypatch.setattr(host_liveness.select, "poll", lambda: no_answer)
    liveness = HostLiveness(timeout)
    liveness.watch("gone", "198.18.0.99", None)
    clock.now += timeout - 0.1
    assert liveness.take_lost_hosts() == []
    liveness.on_life("gone")
    found: list[str] = []
    took = clock.seconds_until(lambda: found.extend(liveness.take_lost_hosts()) or found)
    assert found == ["gone"] and timeout + 0.6 < took < timeout + 0.9


@pytest.fixture
def planned(launch_in_process, monkeypatch):
    """Plan a launch and return its supervisor, which has started nothing."""
    made: list[Supervisor] = []

    class NotRun(Supervisor):
        def run(self) -> Any:
            made.append(self)
            raise LaunchError("not run", hint="", code="ranks-missing")

    monkeypatch.setattr(attempts, "Supervisor", NotRun)

    def plan(*options: str) -> Supervisor:
        run = launch_in_process("-np", "2", *options, SCRIPTS / "job.py")
        assert made, run
        made[-1].selector.close()
        return made.pop()

    return plan


def test_the_time_limits_are_those_of_the_options_and_of_the_documentation(planned, monkeypatch):
    plain, elastic = planned(), planned("--mode", "async")
    page = (ROOT / "docs/explanation/failures.md").read_text()
    silence, async_silence = plain._liveness.silence_seconds, elastic._liveness.silence_seconds
    assert f"no message for {silence:g} s, {async_silence:g} s in mode async" in page
    assert f"`--grace`, {plain.job.grace_seconds:g} s by default" in page
    given = planned("--host-timeout", "7s", "--grace", "5s", "--timeout", "9s", "--hang-timeout", "4s")
    assert (given._liveness.silence_seconds, given.job.grace_seconds, given._timeout_seconds) == (7.0, 5.0, 9.0)
    assert given._hang_detector._timeout_seconds == 4.0
    assert planned("--mode", "async", "--host-timeout", "7s")._liveness.silence_seconds == 7.0
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(supervisor, "send_assignments", lambda *_, **options: sent.append(options))
    given.assign()
    assert sent[0]["host_timeout_seconds"] == 7.0
    given.job.assigned = False
    # --timeout counts from the first start of the job.
    given._check_limits(0.0, 8.9)
    assert not given.job.stopping
    given._check_limits(0.0, 9.1)
    assert given.job.stopping


def test_a_job_stops_soon_after_a_failure_whose_cause_may_still_come(planned):
    """Without a failure of its own a lost host may be the cause, which takes longest."""
    failed = planned()
    failed.job.assigned, failed.job.failed_at = True, 100.0
    failed._check_limits(102.4, 0.0)
    assert not failed.job.stopping
    failed._check_limits(102.6, 0.0)
    assert failed.job.stopping
    failed = planned()
    failed.job.assigned, failed.job.failed_at = True, 100.0
    failed.job.ranks[0].exit = types.SimpleNamespace(failed=True, consequence=False)  # type: ignore[assignment]
    failed._check_limits(100.2, 0.0)
    assert not failed.job.stopping
    failed._check_limits(100.4, 0.0)
    assert failed.job.stopping


class Acknowledgements:
    """A socket whose peer acknowledged its last byte at `at`, or has acknowledged all bytes."""

    def __init__(self, clock: SimulatedClock) -> None:
        self.clock, self.at, self.unacked = clock, clock.now, 1

    def setsockopt(self, *_: Any) -> None: ...

    def getsockopt(self, *_: Any) -> bytes:
        info = bytearray(SilenceMonitor.INFO_BYTES)
        struct.pack_into("=I", info, 24, self.unacked)
        struct.pack_into("=I", info, 56, int((self.clock.now - self.at) * 1000))
        return bytes(info)


def test_a_launcher_that_acknowledges_nothing_is_lost_after_the_patience(monkeypatch):
    clock = SimulatedClock(monkeypatch, control_channel)
    sock = Acknowledgements(clock)
    monitor = SilenceMonitor(sock, 6.0)  # type: ignore[arg-type]
    for _ in range(25):
        clock.now += 0.2
        assert not monitor.is_over_limit()
    sock.at = clock.now  # a late acknowledgement begins the time anew
    assert not monitor.is_over_limit() and 5.9 < clock.seconds_until(monitor.is_over_limit, 0.2) < 6.5
    monitor, sock.unacked = SilenceMonitor(sock, 6.0), 0  # type: ignore[arg-type]
    for _ in range(100):  # there is nothing to acknowledge
        clock.now += 0.2
        assert not monitor.is_over_limit()


def rank_agent(**state: Any) -> agent.RankAgent:
    """Return an agent without a process, a launcher and a script."""
    made = agent.RankAgent.__new__(agent.RankAgent)
    vars(made).update(
        _script=None, _environ={}, _channel=types.SimpleNamespace(sock=None, closed=False, proven=True), _token="", _identity=None, _guard=None,
        _script_input=None, _selector=types.SimpleNamespace(unregister=lambda _: None), _stopped_by="", _sent_exit=False,
        _kill_at=float("inf"), _may_return=False, _rejoin_at=float("inf"), _give_up_at=float("inf"), _said_hello=True, _done=False,
    )  # fmt: skip
    vars(made).update(state)
    return made


@pytest.mark.parametrize(("host_timeout", "patience"), [(1.0, 6.0), (1.8, 6.0), (3.0, 6.0), (4.0, 8.0), (30.0, 60.0)])
def test_an_agent_waits_for_the_launcher_twice_the_host_timeout_and_at_least_six_seconds(
    monkeypatch, host_timeout, patience
):
    monkeypatch.setattr(agent, "SilenceMonitor", lambda _, seconds: waits.append(seconds))
    monkeypatch.setattr(agent, "ScriptProcess", lambda *_, **__: types.SimpleNamespace(device="cpu"))
    waits: list[float] = []
    fields = dict.fromkeys(Assignment.__annotations__, None)
    assignment = Assignment(**{**fields, "host_timeout_seconds": host_timeout, "grace_seconds": 1.0, "environment": {}})  # type: ignore[arg-type]
    rank_agent()._start(assignment)
    assert waits == [patience]
    page = (ROOT / "docs/explanation/architecture.md").read_text()
    assert f"after twice `--host-timeout`, at least {agent.SETTINGS.launcher_silence_seconds:g} s" in page


class Script:
    """A script that ignores SIGTERM."""

    has_ended, pid = False, 0

    def __init__(self) -> None:
        self.signals: list[int] = []

    def signal(self, number: int) -> None:
        self.signals.append(number)


def test_a_script_gets_the_grace_and_two_seconds_when_the_launcher_is_lost(monkeypatch):
    clock = SimulatedClock(monkeypatch, agent)
    script = Script()
    stopped = rank_agent(_script=script)
    stopped._obey(Kind.STOP, {"signal": signal.SIGTERM, "grace_seconds": 30.0})
    assert script.signals == [signal.SIGTERM] and stopped._kill_at == clock.now + 30
    stopped._obey(Kind.STOP, {"signal": signal.SIGTERM, "grace_seconds": 0.0})  # a second Ctrl-C
    assert stopped._kill_at == clock.now
    begun = clock.now
    cut_off = rank_agent(_script=script)
    cut_off._on_launcher_lost()
    assert cut_off._kill_at == begun + 2 and begun + 2 <= clock.now < begun + 2.1 and cut_off._done


def test_a_rank_of_mode_async_that_was_cut_off_tries_to_return_for_an_hour(monkeypatch):
    clock = SimulatedClock(monkeypatch, agent)
    returns = rank_agent(_may_return=True)
    returns._on_launcher_lost()
    assert not returns._done and (returns._rejoin_at, returns._give_up_at) == (clock.now, clock.now + 3600)
    page = (ROOT / "docs/how-to/parameter-servers.md").read_text()
    assert "if its agent returns within an hour" in page


def test_a_rank_that_sends_no_exit_record_is_given_up_after_the_grace_and_three_seconds(monkeypatch):
    clock = SimulatedClock(monkeypatch, stop_sequence)
    plan = types.SimpleNamespace(role="worker", rank=0)
    state = types.SimpleNamespace(plan=plan, exit=None)
    job = types.SimpleNamespace(ranks=[state], workers=[state], assigned=True, stopping=False, grace_seconds=0.0)
    sent: list[Any] = []
    lost: list[Any] = []
    connections = types.SimpleNamespace(send=lambda *frame: sent.append(frame))
    stop = StopSequence(job, connections, lambda *given_up: lost.append(given_up))  # type: ignore[arg-type]
    stop.begin(5.0)
    assert sent == [(state, Kind.STOP, {"signal": signal.SIGTERM, "grace_seconds": 5.0})]
    assert 7.9 < clock.seconds_until(lambda: stop.check(clock.now) or lost) < 8.3
