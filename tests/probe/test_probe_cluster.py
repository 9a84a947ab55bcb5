"""`distrib-topo probe` on the virtual cluster: findings, files and faults."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import time

import pytest

from distrib.cluster.links import link_between
from distrib.cluster.topology import read_topology
from tests.conftest import TOPO
from tests.virtual_cluster.calm import repeat_if_spoiled

pytestmark = pytest.mark.cluster
ENV = {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def probe(tmp_path):
    """Run `distrib-topo probe` to completion on the cluster's first host."""

    def run(cluster, *words, timeout=200):
        command = [TOPO, "probe", "-H", cluster.hostfile, "--run-dir", tmp_path / "run", *words]
        done = cluster.run(cluster.hosts[0], command, env=ENV, timeout=timeout, cwd=tmp_path)
        assert cluster.left_over(within_seconds=6) == {}
        return done

    return run


def kinds(output):
    return [(finding["kind"], finding["severity"], finding["hosts"]) for finding in output["findings"]]


@pytest.mark.prioritized
@repeat_if_spoiled
@pytest.mark.forked
def test_a_host_that_became_slow_is_found_and_strict_says_so(make_cluster, probe, tmp_path):
    cluster = make_cluster(4, rate="400mbit")
    earlier = tmp_path / "earlier.yaml"
    done = probe(cluster, "--quick", "-o", earlier)
    assert done.returncode == 0 and "no findings" in done.stdout, done
    (group,) = read_topology(earlier).nodes  # a new file has the hosts' own inventories
    assert len(group.host_names) == len(cluster.hosts) and group.cores and group.memory
    cluster.shape("n3", "200mbit")
    done = probe(cluster, "--quick", "--strict", "--json", "--baseline", earlier)
    assert done.returncode == 1, done
    output = json.loads(done.stdout)
    found = [finding for finding in output["findings"] if finding["severity"] != "note"]  # a busy CPU adds to latencies
    worse = [finding for finding in found if finding["kind"] == "worse_than_baseline"]
    assert worse and all("n3" in finding["hosts"] for finding in worse), done
    (slow,) = [finding for finding in found if finding not in worse]
    assert (slow["kind"], slow["severity"], slow["hosts"]) == ("slow_host", "error", ["n3"])
    assert slow["ratio"] == pytest.approx(0.5, abs=0.05)
    assert output["whole"] is True
    rates = {
        (p["source"], p["target"]): p["bandwidth_bytes_per_second"]
        for p in output["measured"]["pairs"]
        if p["load"] == "together"
    }
    assert len(rates) == 12
    # One stream of a quick probe scatters by `slow_fraction_quick`, the median of six directions far less.
    of_slow = [rate for pair, rate in rates.items() if "n3" in pair]
    others = [rate for pair, rate in rates.items() if "n3" not in pair]
    assert statistics.median(others) * 8 == pytest.approx(382e6, rel=0.05)  # TCP payload at 400 Mb/s
    assert statistics.median(of_slow) * 8 == pytest.approx(191e6, rel=0.05)


@pytest.mark.alone  # the probe reports no uplink while CPUs are busy
@pytest.mark.prioritized
@repeat_if_spoiled
@pytest.mark.forked
def test_a_shared_uplink_is_found_with_both_sides_and_its_ratio(make_cluster, probe):
    racks = [["n1", "n2"], ["n3", "n4"]]
    cluster = make_cluster(4, rate="400mbit", racks=racks, trunk_rate="400mbit")
    done = probe(cluster, "--quick", "--json")
    assert done.returncode == 0, done
    output = json.loads(done.stdout)
    (finding,) = [each for each in output["findings"] if each["kind"] == "oversubscribed_uplink"]
    # The hosts share the machine's cores. A link may be slightly slow, but no host is at fault.
    others = [each for each in output["findings"] if each is not finding]
    assert all(each["kind"] in ("slow_link", "noisy_link") and each["severity"] != "error" for each in others), others
    assert finding["ratio"] == pytest.approx(2.0, abs=0.25)
    hosts = finding["hosts"]
    assert sorted([sorted(hosts[:2]), sorted(hosts[2:])]) == racks


@pytest.mark.prioritized
@repeat_if_spoiled
@pytest.mark.forked
def test_every_link_card_and_rank_is_measured_written_and_drawn(make_cluster, probe, tmp_path):
    cluster = make_cluster(3, rate="200mbit", second_rates={"n1": "400mbit", "n2": "400mbit", "n3": "300mbit"})
    cluster.hostfile.write_text("n1 slots=2\nn2 slots=1\nn3 slots=1\n")
    topology, written = tmp_path / "topology.yaml", tmp_path / "written.yaml"
    topology.write_text("nodes:\n  - hosts: n[1-2]\n")
    done = probe(cluster, "-o", topology)
    assert (done.returncode, done.stdout) == (2, ""), done
    written.write_text("# ours, bought in May\nnodes:\n  - hosts: n[1-3]  # all alike\n")
    done = probe(cluster, "-o", written, "--plot", tmp_path / "links.png", "--json", "--topology", topology)
    assert done.returncode == 0, done
    assert "topology.yaml:1: $.nodes: n3 " in done.stderr
    output = json.loads(done.stdout)
    found = {finding["kind"]: finding for finding in output["findings"]}
    assert found["slow_host"]["hosts"] == ["n3"] and "198.19.0.0/16" in found["slow_host"]["what"], output["findings"]
    assert found["wrong_interface"]["advice"] == "use it with --interface 198.19.0.0/16"
    assert len(found) == 2, output["findings"]
    cards = {
        (p["source"], p["target"]): p["bandwidth_bytes_per_second"]
        for p in output["measured"]["pairs"]
        if p.get("network") == "198.19.0.0/16" and p["interface"] == "eth1"
    }
    assert len(cards) == 6
    assert cards["n1", "n2"] * 8 == pytest.approx(382e6, rel=0.05)
    assert cards["n1", "n3"] * 8 == pytest.approx(287e6, rel=0.05)
    collectives = {len(c["hosts"]): c for c in output["measured"]["collectives"]}
    assert {hosts: c["ranks"] for hosts, c in collectives.items()} == {2: 3, 3: 4}
    largest = max(point[0] for point in collectives[3]["curve"])
    told = any(note.startswith("all-reduce over 3 hosts: sizes above") for note in output["notes"])
    assert told == (largest < 64 << 20)

    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")
    assert not written.with_name("written.yaml.partial.jsonl").exists()
    assert written.read_text().startswith("# ours, bought in May\nnodes:\n  - hosts: n[1-3]  # all alike\n")
    way = link_between(read_topology(written), "n1", "n2")
    assert way.bandwidth_bytes_per_second * 8 == pytest.approx(191e6, rel=0.05)  # the NIC of the job
    measured = read_topology(written).measured
    curves = {(p.source, p.target): p.curve for p in measured.pairs if p.transport == "mpi" and p.load == "alone"}
    assert len(curves) == 6
    for curve in curves.values():
        assert [point.size_bytes for point in curve] == [8 * 4**n for n in range(11)]
        large = curve[-1]
        assert large.size_bytes * 8 / large.seconds == pytest.approx(191e6, rel=0.06)
    assert {(p.transport, p.load, p.both_ways) for p in measured.pairs} >= {
        ("tcp", "alone", False), ("tcp", "together", True), ("mpi", "alone", False)
    }  # fmt: skip
    assert {link.host for link in measured.inside} == {"n1", "n2", "n3"}
    [machine] = measured.machines  # all virtual hosts are one machine
    assert (set(machine.hosts), machine.processors) == ({"n1", "n2", "n3"}, len(os.sched_getaffinity(0)))


@pytest.mark.forked
def test_a_further_network_that_passes_nothing_costs_seconds_and_is_told_of(make_cluster, probe):
    cluster = make_cluster(4, rate="400mbit", second_rates={f"n{n}": "400mbit" for n in range(1, 5)})
    cluster.hostfile.write_text("n1 slots=2\nn2\nn3\nn4 role=server\n")  # servers are probed, too
    subprocess.run(["ip", "-n", cluster.switch_namespace, "link", "set", "second", "down"], check=True)
    done = probe(cluster, "--quick", "--json")
    assert done.returncode == 0, done
    output = json.loads(done.stdout)
    assert [note for note in output["notes"] if note.startswith("198.19.0.0/16 was given up")], output["notes"]
    assert len({(p["source"], p["target"]) for p in output["measured"]["pairs"]}) == 12
    assert output["seconds"] < 60


@pytest.mark.forked
def test_a_host_is_probed_by_itself(make_cluster, probe, tmp_path):
    cluster = make_cluster(2, slots=2, rate="400mbit")
    done = probe(cluster, "--exclude", "n2", "-o", tmp_path / "one.yaml")
    assert done.returncode == 0 and "all-reduce over gloo" in done.stdout, done
    measured = read_topology(tmp_path / "one.yaml").measured
    assert [(each.hosts, each.ranks) for each in measured.collectives] == [(("n1",), 2)]
    assert [link.host for link in measured.inside] == ["n1"]
    assert measured.pairs == ()


@pytest.mark.forked
def test_a_host_that_is_lost_costs_its_own_pairs_only(make_cluster, probe, tmp_path):
    cluster = make_cluster(4, rate="400mbit")
    command = [TOPO, "probe", "-H", cluster.hostfile, "--run-dir", tmp_path / "run", "--json", "--quick"]
    process = cluster.popen("n1", command, env=ENV, cwd=tmp_path)
    wait_for(tmp_path / "run/records.jsonl", "together/tcp/0")
    cluster.lose("n3")
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, (out, err)
    output = json.loads(out)
    assert output["lost_hosts"] == ["n3"]
    assert output["whole"] is True
    assert ("host_lost", "error", ["n3"]) in kinds(output)
    whole = {(p["source"], p["target"]) for p in output["measured"]["pairs"] if p["load"] == "together"}
    left = ("n1", "n2", "n4")
    assert whole >= {(a, b) for a in left for b in left if a != b}
    assert cluster.left_over(within_seconds=6) == {}


def test_a_host_that_freezes_is_blamed_and_keeps_nobody_waiting(make_cluster, tmp_path):
    """The host and its connections stay up, but it sends no reply, and its rank does not exit."""
    cluster = make_cluster(4, rate="400mbit")
    command = [TOPO, "probe", "-H", cluster.hostfile, "--run-dir", tmp_path / "run", "--json", "--quick"]
    process = cluster.popen("n1", command, env=ENV, cwd=tmp_path)
    wait_for(tmp_path / "run/records.jsonl", "inside")
    (rank,) = [pid for pid, line in cluster.processes("n3").items() if "-m distrib.probe " in line]
    os.kill(rank, signal.SIGSTOP)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, (out, err)
    output = json.loads(out)
    assert (output["whole"], output["lost_hosts"]) == (True, ["n3"])
    # Other load may slow a link. The probe must find no other error.
    assert [each for each in kinds(output) if each[1] == "error"] == [("host_lost", "error", ["n3"])], output[
        "findings"
    ]
    (lost,) = [each for each in output["findings"] if each["kind"] == "host_lost"]
    assert "n3 did not reply" in lost["evidence"]
    assert "no reply came from n3 to the last task" in output["notes"]
    assert "n3 does not reply any more" in err
    assert cluster.left_over(within_seconds=6) == {}


@pytest.mark.forked
def test_an_interrupted_probe_goes_on_where_it_stopped(make_cluster, tmp_path):
    cluster = make_cluster(5, rate="400mbit")
    topology = tmp_path / "topology.yaml"
    partial = tmp_path / "topology.yaml.partial.jsonl"
    command = [TOPO, "probe", "-H", cluster.hostfile, "--run-dir", tmp_path / "run", "--quick", "-o", topology]
    process = cluster.popen("n1", command, env=ENV, cwd=tmp_path)
    wait_for(partial, "together/tcp/0")
    for pid, line in cluster.processes("n1").items():
        if "distrib-topo probe" in line and pid == process.pid:
            os.kill(pid, signal.SIGINT)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 130, (out, err)
    assert "run the same command to resume" in err
    assert not topology.exists()
    before = partial.read_text().splitlines()
    assert cluster.left_over(within_seconds=6) == {}
    done = cluster.run("n1", command, env=ENV, timeout=200, cwd=tmp_path)
    assert done.returncode == 0, done
    assert "resuming" in done.stderr and str(partial) in done.stderr
    assert not partial.exists()
    again = (tmp_path / "run/ranks/0.out").read_text()
    finished = [json.loads(line)["stage"] for line in before if '"type":"done"' in line]
    assert finished and all(f'"stage":"{step}"' not in again for step in finished)
    pairs = {(p.source, p.target) for p in read_topology(topology).measured.pairs if p.load == "together"}
    assert len(pairs) == 20


def wait_for(path, word, seconds=120.0):
    deadline = time.monotonic() + seconds
    while not (path.exists() and f'"stage":"{word}"' in path.read_text()):
        assert time.monotonic() < deadline, f"no {word} in {path}"
        time.sleep(0.05)
