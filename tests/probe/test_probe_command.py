"""Command `distrib-topo probe`: output, topology file, dropped hosts, failed and interrupted jobs."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import msgspec
import pytest

from distrib.cluster.measurements import Collective, IntraNodeLinkMeasurement, LinkMeasurement, Measurements, Point
from distrib.cluster.measurements_writer import write_measured
from distrib.cluster.topology import read_topology
from distrib.errors import LaunchError, PreflightError
from distrib.probe.matrix_plot import draw_probe
from distrib.probe.protocol import ProbeSpec
from distrib.probe.records import (
    CollectiveMeasurement,
    IntraNodeMeasurement,
    PairMeasurement,
    ProbeEnded,
    ProbeStarted,
    StageDone,
    encode_record,
)
from distrib.probe.settings import DEFAULT
from distrib.probe.stages import LINKS_DONE, SECOND_PASS
from distrib_launch import results, run_directory, runner
from distrib_launch.cli import topo
from tests.support.simulated_network import Network, facts, of_kind


@pytest.fixture
def jobs(monkeypatch, tmp_path):
    """Replace jobs by fakes that print the records of `jobs.records`."""
    monkeypatch.chdir(tmp_path)
    made = SimpleNamespace(
        specs=[],
        inputs=[],
        plans=[],
        records=lambda spec: [*Network(len(spec.hosts)).records(), ProbeEnded(seconds=1.0)],
    )

    def launch(plan, options, *, streams, script_input=b"", input_ranks=None):
        spec = msgspec.json.decode(plan.script[-1], type=ProbeSpec)
        made.specs.append(spec)
        made.plans.append(plan)
        made.inputs.append((script_input, input_ranks))
        for record in made.records(spec):
            streams[0].write(f"[0@{spec.present[0]}] {encode_record(record)}\n")
        whole = made.records(spec) and isinstance(made.records(spec)[-1], ProbeEnded)
        failure = results.Failure(
            rank=1, host="unknown", time=0.0, exit_code=1, signal=None, message="rank 1 died", traceback="", log=""
        )
        return results.Result(
            status="succeeded" if whole else "failed", exit_code=0, world_size=1, hosts=spec.present, seconds=1.0,
            restarts=0, ranks=(), first_failure=None if whole else failure, warnings=(),
        )  # fmt: skip

    monkeypatch.setattr(runner, "launch", launch)
    return made


def probe(*words):
    return topo.main(["probe", "--quick", *map(str, words)])


def write_earlier_probe(path, hosts):
    """Write a file of a complete probe."""
    names = [f"n{n + 1}" for n in range(hosts)]
    pairs = tuple(
        LinkMeasurement(source=a, target=b, transport="tcp", load="alone", bandwidth_bytes_per_second=1e8, variation=0.0)
        for a in names for b in names if a != b
    )  # fmt: skip
    write_measured(path, Measurements(when="2025-05-05", software={}, hosts=tuple(names), pairs=pairs))


def test_hosts_for_parameter_servers_are_probed_too(jobs, tmp_path):
    (tmp_path / "hosts").write_text("n1 slots=2\nn2 slots=2\nn3 role=server\n")
    assert probe("-H", "hosts", "-o", "t.yaml") == 0
    assert [spec.hosts for spec in jobs.specs] == [("n1", "n2", "n3")]
    assert len(read_topology("t.yaml").measured.pairs) == 6
    # Hosts without GPUs are valid beside hosts with GPUs.
    assert {(rank.host, rank.device) for rank in jobs.plans[0].ranks} == {("n1", "auto"), ("n2", "auto"), ("n3", "cpu")}
    (tmp_path / "hosts").write_text("n1 role=server\nn2 role=server\n")
    assert probe("-H", "hosts") == 0
    assert {rank.device for rank in jobs.plans[1].ranks} == {"auto"}


def test_the_single_rank_of_a_host_in_a_quick_probe_sees_all_chosen_gpus(jobs, tmp_path):
    (tmp_path / "hosts").write_text("n1 slots=8\nn2 slots=8\n")
    assert probe("-H", "hosts", "--include", "n1:4,5@n2") == 0
    assert [(host.name, host.ranks, host.chosen) for host in jobs.plans[0].hosts] == [
        ("n1", 1, (4, 5)),
        ("n2", 1, None),
    ]
    assert probe("-H", "hosts", "--exclude", "n1:0-5") == 0
    assert [(host.ranks, host.chosen) for host in jobs.plans[1].hosts] == [(1, (6, 7)), (1, None)]


def test_the_run_directory_of_a_running_job_is_refused(jobs, capsys, tmp_path):
    with run_directory.locked_run_dir(tmp_path / "run"):
        (tmp_path / "run/plan.json").write_text('{"job": "4f"}')
        assert probe("-H", "n1,n2", "--run-dir", "run") == 2
    assert "another job is running in" in capsys.readouterr().err
    assert (tmp_path / "run/plan.json").exists() and not jobs.specs


def test_an_incomplete_probe_does_not_replace_a_complete_one(jobs, capsys):
    write_earlier_probe("t.yaml", 4)
    jobs.records = lambda spec: Network(4).records()
    assert probe("-H", "n[1-4]", "-o", "t.yaml") == 1
    out, err = capsys.readouterr()
    assert "bandwidth over tcp" in out
    assert "t.yaml was not changed: the probe was not completed" in err
    assert "error: the probe was not completed: rank 1 died" in err
    assert read_topology("t.yaml").measured.when == "2025-05-05"


def test_a_probe_without_measured_links_says_so_instead_of_no_findings(jobs, capsys):
    jobs.records = lambda spec: [Network(2).records()[0], ProbeEnded(seconds=1.0)]
    assert probe("-H", "n1,n2") == 0
    assert "no findings: no link was measured" in capsys.readouterr().out


def test_a_probe_of_few_links_does_not_replace_a_complete_one(jobs, capsys, tmp_path):
    write_earlier_probe("t.yaml", 4)
    start, *pairs = Network(4).records()
    failed = [
        msgspec.structs.replace(r, failed="timed out")
        for r in of_kind(PairMeasurement, pairs)
        if {r.source, r.target} != {"n1", "n2"}
    ]
    kept = [r for r in of_kind(PairMeasurement, pairs) if {r.source, r.target} == {"n1", "n2"}]
    jobs.records = lambda spec: [start, *kept, *failed, ProbeEnded(seconds=1.0)]
    assert probe("-H", "n[1-4]", "-o", "t.yaml") == 1
    out, err = capsys.readouterr()
    assert "could not be measured" in out
    assert "t.yaml was not changed: only 2 of its 12 links" in err
    assert (tmp_path / "t.yaml.partial.jsonl").exists()
    assert read_topology("t.yaml").measured.when == "2025-05-05"


def test_a_probe_of_a_few_hosts_does_not_replace_one_of_many(jobs, capsys):
    write_earlier_probe("t.yaml", 4)
    assert probe("-H", "n[1-2]", "-o", "t.yaml") == 2
    assert "-o t.yaml: it has 12 links of 2025-05-05, and these hosts have 2 of them" in capsys.readouterr().err
    assert jobs.specs == []
    assert probe("-H", "n[1-3]", "-o", "t.yaml") == 0  # half of the hosts
    assert read_topology("t.yaml").measured.hosts == ("n1", "n2", "n3")


def test_a_comparison_without_regressions_is_stated(jobs, capsys):
    jobs.records = lambda spec: [*Network(4).records(), ProbeEnded(seconds=1.0)]
    assert probe("-H", "n[1-4]", "-o", "t.yaml") == 0
    assert probe("-H", "n[1-4]", "--baseline", "t.yaml") == 0
    assert "compared with the probe of 2026-01-01T00:00:00+00:00: 12 of 12 directions" in capsys.readouterr().out


def test_several_pictures_are_drawn(jobs, tmp_path):
    jobs.records = lambda spec: [*Network(2).records(), ProbeEnded(seconds=1.0)]
    assert probe("-H", "n[1-2]", "--plot", "a.png", "--plot", "b.svg") == 0
    assert (tmp_path / "a.png").stat().st_size > 1000
    assert (tmp_path / "b.svg").stat().st_size > 1000


def test_axis_labels_of_a_picture_are_not_parsed_as_formulas(tmp_path):
    """A name may contain a $, and matplotlib must not parse it as a formula."""
    curve = tuple(Point(8 * 4**n, 8e-6 * (n + 1)) for n in range(8))
    pairs = tuple(
        LinkMeasurement(source=a, target=b, transport="mpi", load="alone", bandwidth_bytes_per_second=999.7e6 / 8, variation=0.0, curve=curve)
        for a, b in (("n1", "n2"), ("n2", "n1"))
    )  # fmt: skip
    draw_probe(tmp_path / "a.svg", Measurements(when="2026", software={}, hosts=("n1", "n2"), pairs=pairs), "mpi")
    words = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "a.svg").read_text())
    assert {"10 us", "20 us", "50 us", "999.7"} <= set(words) and not any("$" in word for word in words)


@pytest.mark.parametrize("text", ["{nodes: [{hosts: 'n[1-2]'}]}\n", "  nodes:\n    - hosts: n[1-2]\n"])
def test_a_file_without_place_for_measurements_is_refused_before_the_probe(jobs, capsys, tmp_path, text):
    (tmp_path / "t.yaml").write_text(text)
    assert probe("-H", "n[1-2]", "-o", "t.yaml") == 2
    assert "write `nodes:` in block style" in capsys.readouterr().err
    assert jobs.specs == []


def test_findings_are_shown_even_if_the_file_cannot_be_written(jobs, capsys, tmp_path):
    def records(spec):
        (tmp_path / "t.yaml").write_text("{nodes: [{hosts: 'n[1-4]'}]}\n")
        return [*Network(4, slow={2: 0.5}).records(), ProbeEnded(seconds=1.0)]

    jobs.records = records
    assert probe("-H", "n[1-4]", "-o", "t.yaml") == 2
    out, err = capsys.readouterr()
    assert "n3: slow link" in out
    assert "section cannot be inserted" in err
    assert (tmp_path / "t.yaml.partial.jsonl").stat().st_size > 100


def test_results_are_kept_when_the_run_without_gpudirect_fails(jobs, capsys):
    curve = (Point(1 << 20, 1.0),)
    made = Collective(name="all_reduce", backend="nccl", hosts=("n1", "n2"), ranks=2, gpudirect=True, curve=curve)

    def records(spec):
        if not spec.gpudirect:
            raise LaunchError("mpirun did not start")
        return [*Network(2).records(), CollectiveMeasurement(collective=made), ProbeEnded(seconds=1.0)]

    jobs.records = records
    assert probe("-H", "n1,n2", "-o", "t.yaml") == 0
    assert "without GPUDirect RDMA was not completed: mpirun did not start" in capsys.readouterr().out
    assert read_topology("t.yaml").measured.collectives == (made,)


def fails_in_all_reduce(monkeypatch, host):
    """Fail in an all-reduce as NCCL's watchdog does, by SIGABRT on any rank."""
    launch = runner.launch

    def failing(*plan, **to):
        result = launch(*plan, **to)
        failure = results.Failure(
            rank=0, host=host, time=0.0, exit_code=None, signal=6, message="killed by SIGABRT", traceback="", log=""
        )
        return msgspec.structs.replace(result, status="failed", first_failure=failure)

    monkeypatch.setattr(runner, "launch", failing)


@pytest.mark.parametrize("resumed", [False, True])
def test_an_all_reduce_that_kills_a_rank_loses_no_link_and_no_host(jobs, monkeypatch, capsys, tmp_path, resumed):
    fails_in_all_reduce(monkeypatch, "n2")
    begins = StageDone(stage=LINKS_DONE, title="", done_seconds=1.0, remaining_seconds=1.0)
    start, *seen = Network(3).records(DEFAULT)
    jobs.records = lambda spec: [start, *seen, begins]
    if resumed:  # all stages except the all-reduces are complete
        kept = (start, *seen, msgspec.structs.replace(begins, stage=SECOND_PASS), begins)
        (tmp_path / "t.yaml.partial.jsonl").write_text("".join(encode_record(record) + "\n" for record in kept))
        jobs.records = lambda spec: [start, begins]
    assert topo.main(["probe", "-H", "n[1-3]", "-o", "t.yaml"]) == 1
    assert len(jobs.specs) == 1
    out, err = capsys.readouterr()
    assert "note: all-reduce failed: killed by SIGABRT (n2)" in out and "lost" not in out
    assert "was not completed: all-reduce failed: killed by SIGABRT (n2)" in err and "t.yaml.partial.jsonl" in err
    measured = read_topology("t.yaml").measured
    assert len(measured.pairs) == 6 and measured.hosts == ("n1", "n2", "n3")


def test_links_are_measured_again_after_a_rank_died(jobs, monkeypatch, tmp_path):
    fails_in_all_reduce(monkeypatch, "n2")
    begins = StageDone(stage=LINKS_DONE, title="", done_seconds=1.0, remaining_seconds=1.0)
    start, *seen = Network(3).records(DEFAULT)
    done = StageDone(stage="together/tcp/0", title="", done_seconds=1.0, remaining_seconds=1.0)
    (tmp_path / "t.yaml.partial.jsonl").write_text(
        "".join(encode_record(record) + "\n" for record in (start, *seen, begins))
    )
    jobs.records = lambda spec: [start, done]  # measures the failed parts again
    assert topo.main(["probe", "-H", "n[1-3]", "-o", "t.yaml"]) == 1
    assert [spec.present for spec in jobs.specs][:3] == [("n1", "n2", "n3")] * 2 + [("n1", "n3")]


def test_intra_node_links_are_kept_when_the_all_reduce_of_one_machine_fails(jobs, monkeypatch, capsys):
    fails_in_all_reduce(monkeypatch, "localhost")
    start = ProbeStarted(when="2026-01-01", mode="default", hosts=("localhost",), primary="tcp", facts=())
    link = IntraNodeLinkMeasurement(
        host="localhost", source="memory", target="memory", bandwidth_bytes_per_second=1e9, variation=0.0
    )
    begins = StageDone(stage=LINKS_DONE, title="", done_seconds=1.0, remaining_seconds=1.0)
    jobs.records = lambda spec: [start, IntraNodeMeasurement(link=link), begins]
    assert topo.main(["probe", "-H", "localhost:4", "-o", "t.yaml"]) == 1
    assert "all-reduce failed: killed by SIGABRT (localhost)" in capsys.readouterr().out
    assert len(jobs.specs) == 1 and read_topology("t.yaml").measured.inside == (link,)


def test_the_run_without_gpudirect_overrides_the_level_of_the_user(jobs):
    curve = (Point(1 << 20, 1.0),)
    made = Collective(name="all_reduce", backend="nccl", hosts=("n1", "n2"), ranks=2, gpudirect=True, curve=curve)
    jobs.records = lambda spec: [*Network(2).records(), CollectiveMeasurement(collective=made), ProbeEnded(seconds=1.0)]
    assert probe("-H", "n1,n2", "-x", "NCCL_NET_GDR_LEVEL=SYS") == 0
    assert [plan.ranks[0].environment["NCCL_NET_GDR_LEVEL"] for plan in jobs.plans] == ["SYS", "LOC"]


@pytest.mark.parametrize("how", ["here", "there"])
def test_an_interrupted_run_without_gpudirect_keeps_results_and_exits_as_interrupted(jobs, monkeypatch, capsys, how):
    """Either this process or the job's supervisor receives Ctrl-C."""
    curve = (Point(1 << 20, 1.0),)
    made = Collective(name="all_reduce", backend="nccl", hosts=("n1", "n2"), ranks=2, gpudirect=True, curve=curve)
    whole = [*Network(2).records(), CollectiveMeasurement(collective=made), ProbeEnded(seconds=1.0)]
    jobs.records = lambda spec: whole
    launch = runner.launch

    def interrupted(plan, options, **streams):
        result = launch(plan, options, **streams)
        if jobs.specs[-1].gpudirect:
            return result
        if how == "here":
            raise KeyboardInterrupt
        return msgspec.structs.replace(result, status="stopped", exit_code=143)

    monkeypatch.setattr(runner, "launch", interrupted)
    assert probe("-H", "n1,n2", "-o", "t.yaml") == (130 if how == "here" else 143)
    assert "without GPUDirect RDMA was not completed: interrupted" in capsys.readouterr().out
    assert read_topology("t.yaml").measured.collectives == (made,)


def test_a_probe_without_records_cannot_be_resumed(jobs, capsys):
    assert probe("-H", "n1,n2", "--resume", "-o", "t.yaml") == 2
    assert "no probe of these hosts in this mode" in capsys.readouterr().err
    assert jobs.specs == []


def test_findings_are_shown_although_rank_0_ended_the_job(jobs, monkeypatch, capsys):
    """Rank 0 fails because another rank is frozen. The command must report the frozen rank."""
    start, *seen = Network(2).records()
    failed = [msgspec.structs.replace(r, failed="n2 did not reply") for r in seen if isinstance(r, PairMeasurement)]
    jobs.records = lambda spec: [
        start,
        *failed,
        ProbeEnded(seconds=1.0, notes=("no answer came from n2 when last asked",)),
    ]
    launch = runner.launch
    monkeypatch.setattr(
        runner, "launch", lambda *plan, **to: msgspec.structs.replace(launch(*plan, **to), status="failed")
    )
    assert probe("-H", "n1,n2") == 0
    out = capsys.readouterr().out
    assert "n2 did not reply" in out and "note: no answer came from n2 when last asked" in out
    assert len(jobs.specs) == 1


def test_a_host_that_fails_preflight_can_be_dropped(jobs, capsys):
    def records(spec):
        if "n3" in spec.present:
            raise PreflightError("n3: no route to host", hosts={"n3": "no route to host"})
        seen = [r for r in of_kind(PairMeasurement, Network(4).records()) if "n3" not in (r.source, r.target)]
        return [Network(4).records()[0], *seen, ProbeEnded(seconds=1.0)]

    jobs.records = records
    assert probe("-H", "n[1-4]") == 3
    assert "probes the 3 other hosts" in capsys.readouterr().err
    assert probe("-H", "n[1-4]", "--drop-bad-hosts", "--json") == 0
    out, err = capsys.readouterr()
    output = json.loads(out)
    assert (output["left_out_hosts"], output["lost_hosts"], output["findings"]) == (["n3"], [], [])
    assert output["notes"] == ["n3 was left out from the beginning: no route to host"]
    assert "n3 is left out: no route to host" in err
    assert probe("-H", "n[1-4]", "--exclude", "n3") == 0
    assert jobs.specs[-1].hosts == jobs.specs[-1].present == ("n1", "n2", "n4")


def test_earlier_measurements_of_a_dropped_host_are_kept(jobs, capsys, tmp_path):
    start, *seen = Network(3).records()
    start = msgspec.structs.replace(start, facts=tuple(facts(f"n{n + 1}") for n in range(3)))
    done = StageDone(stage="together/tcp/0", title="", done_seconds=1.0, remaining_seconds=1.0)
    (tmp_path / "t.yaml.partial.jsonl").write_text("".join(encode_record(r) + "\n" for r in (start, *seen, done)))

    def records(spec):
        if "n3" in spec.present:
            raise PreflightError("n3: no route to host", hosts={"n3": "no route to host"})
        return [msgspec.structs.replace(start, facts=start.facts[:2]), ProbeEnded(seconds=1.0)]

    jobs.records = records
    assert probe("-H", "n[1-3]", "-o", "t.yaml", "--drop-bad-hosts") == 0
    assert "n3 was left out when the probe was resumed: no route to host" in capsys.readouterr().out
    kept = read_topology("t.yaml").measured
    assert kept.hosts == ("n1", "n2", "n3") and len(kept.pairs) == 6


def test_hosts_that_only_the_topology_file_has_are_reported(jobs, capsys, tmp_path):
    write_earlier_probe("t.yaml", 4)
    assert probe("-H", "n[1-3]", "-o", "t.yaml") == 0
    err = capsys.readouterr().err
    assert "$.nodes[0].hosts: n4 is not in -H" in err
    assert "2025-05-05 in t.yaml (links), and leaves out n4" in err


@pytest.mark.parametrize("words", [(), ("-H", "localhost")])
def test_this_machine_alone_can_be_probed(jobs, capsys, words):
    start = ProbeStarted(when="2026-01-01", mode="quick", hosts=("localhost",), primary="tcp", facts=())
    link = IntraNodeLinkMeasurement(
        host="localhost", source="memory", target="memory", bandwidth_bytes_per_second=1e9, variation=0.0
    )
    jobs.records = lambda spec: [start, IntraNodeMeasurement(link=link), ProbeEnded(seconds=1.0)]
    assert probe(*words, "-o", "t.yaml") == 0
    out = capsys.readouterr().out
    assert (
        "inside hosts" in out
        and "1 host probed" in out
        and not any(line.startswith("links") for line in out.splitlines())
    )
    assert [spec.hosts for spec in jobs.specs] == [("localhost",)]
    assert read_topology("t.yaml").measured.inside == (link,)


def test_an_interrupted_probe_is_resumed_with_a_message_and_its_records_go_to_rank_0(jobs, capsys, tmp_path):
    start, *seen = Network(2).records()
    done = StageDone(stage="together/tcp/0", title="", done_seconds=1.0, remaining_seconds=1.0)
    (tmp_path / "t.yaml.partial.jsonl").write_text("".join(encode_record(r) + "\n" for r in (start, *seen, done)))
    assert probe("-H", "n1,n2", "-o", "t.yaml") == 0
    err = capsys.readouterr().err
    assert "resuming the probe of 2026-01-01T00:00:00+00:00 from t.yaml.partial.jsonl" in err
    assert "--no-resume" in err
    assert jobs.specs[0].done == ("together/tcp/0",)
    [(known, ranks)] = jobs.inputs
    assert ranks == (0,)
    assert known.startswith(b'{"type":"started"') and b'"type":"pair"' in known
