"""The virtual cluster: different hosts, link rates, delay and loss, and cleanup."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.virtual_cluster import Cluster
from tests.virtual_cluster.calm import repeat_if_spoiled
from tests.virtual_cluster.virtual import OWN_NAMES

pytestmark = pytest.mark.cluster


def traces(prefix: str = OWN_NAMES) -> set[str]:
    """Return leftovers on the machine of clusters whose names have a prefix."""
    folders = [Path("/run/netns"), Path("/etc/netns"), Path("/run/distrib-cluster")]
    names = {str(entry) for folder in folders if folder.exists() for entry in folder.iterdir()}
    return {name for name in names if Path(name).name.startswith(prefix)}


def test_hosts_have_names_addresses_and_memory_of_their_own(make_cluster):
    cluster = make_cluster(3)
    for host in cluster.hosts:
        assert cluster.run(host, ["hostname"]).stdout.strip() == host
    assert cluster.run("n1", ["ssh", "n3", "hostname"]).stdout.strip() == "n3"
    cluster.run("n1", ["touch", "/dev/shm/only-here"], check=True)
    assert cluster.run("n2", ["ls", "/dev/shm"]).stdout == ""
    assert "198.18.0.2 n2" in cluster.run("n1", ["cat", "/etc/hosts"]).stdout
    assert cluster.left_over() == {}


@pytest.mark.prioritized
def test_a_link_has_the_rate_it_was_given(make_cluster):
    cluster = make_cluster(2, rate="200mbit")

    @repeat_if_spoiled
    def measure():
        server = cluster.popen("n2", ["iperf3", "-s", "-1"])
        while "5201" not in cluster.run("n2", ["ss", "-ltn"]).stdout:
            assert server.poll() is None
            time.sleep(0.05)
        told = json.loads(cluster.run("n1", ["iperf3", "-c", "n2", "-t", "2", "-J"], check=True).stdout)
        server.communicate(timeout=10)
        assert 0.85 * 200e6 < told["end"]["sum_received"]["bits_per_second"] < 200e6

    measure()


def test_weather(make_cluster):
    cluster = make_cluster(2)
    sleeper = cluster.popen("n2", ["sleep", "60"])
    deadline = time.monotonic() + 10
    while not any("sleep" in command for command in cluster.processes("n2").values()):
        assert time.monotonic() < deadline
    cluster.cut("n2")

    def reach(seconds):
        return cluster.run("n1", ["ssh", "-o", f"ConnectTimeout={seconds}", "n2", "true"]).returncode

    assert reach(seconds=1) == 255
    time.sleep(1.5)  # n1 has now given up resolving the address
    cluster.restore("n2")
    assert reach(seconds=10) == 0
    cluster.lose("n2")
    assert sleeper.wait(timeout=5) == -9
    assert reach(seconds=1) == 255
    cluster.restore("n2")
    assert reach(seconds=10) == 0


def test_everything_is_removed_even_when_building_fails():
    before = traces()

    class Broken(Cluster):
        def _wait_sshd(self, host: str) -> None:
            raise RuntimeError("no sshd today")

    with pytest.raises(RuntimeError, match="no sshd today"), Broken(2):
        pass
    assert traces() == before


def test_clusters_one_after_another_leave_nothing():
    before = traces()
    for _ in range(3):
        with Cluster(2) as cluster:
            leftover = cluster.popen("n1", ["sleep", "60"])
            deadline = time.monotonic() + 10
            while "sleep 60" not in cluster.processes("n1").values() and time.monotonic() < deadline:
                time.sleep(0.01)
        assert leftover.wait(timeout=5) == -9
        assert traces() == before


def test_the_command_line_tool():
    before = traces("clitest")
    tool = [sys.executable, "-m", "tests.virtual_cluster", "--name", "clitest"]

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*tool, *words], capture_output=True, text=True, cwd=ROOT, timeout=200)

    try:
        up = call("up", "2", "--rate", "1gbit")
        assert up.returncode == 0, up
        assert re.search(r"hostfile /\S+/hosts.txt", up.stdout)
        assert call("run", "n2", "hostname").stdout == "n2\n"
        assert call("shape", "n1", "10mbit").returncode == 0
        assert call("cut", "n2").returncode == 0
        for verb in ("restore", "lose", "restore"):
            assert call(verb, "n2").returncode == 0
        assert call("run", "n2", "hostname").stdout == "n2\n"
        assert "already" in call("up", "2").stderr
        assert "no host n7" in call("run", "n7", "true").stderr
    finally:
        down = call("down")
    assert down.returncode == 0, down
    assert traces("clitest") == before
