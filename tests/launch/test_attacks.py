"""Hostile scripts, messages, files and names: the launcher reports the job and runs none of their code."""

from __future__ import annotations

import json
import os

import pytest

from distrib.cluster import hostfile
from distrib.errors import ConfigError
from distrib_launch import engines, plan_builder, run_directory
from distrib_launch.engines import mpirun
from distrib_launch.launch_options import LaunchOptions
from distrib_launch.supervisor.rank_exit import parse_error_record

HTML = "<script>alert(1)</script>"
STATUS_LINES = [
    b'{"metrics": {"%b": 1}, "main": true}' % HTML.encode(), b'{"metrics": {"%b": 2}, "main": true}' % HTML.encode(),
    b'{"metrics": 5, "main": true}', b'{"metrics": [1], "main": true}', b'{"metrics": {"a": 1%b}, "main": true}' % (b"0" * 400),
    b'{"metrics": {"a": 1e999, "\\ud800": NaN}, "main": true}', b'{"step": 1%b}' % (b"0" * 40), b'{"step": 1e999}', b"[1]", b"5",
    b"[" * 4000, b'{"warning": {"%b": 1}}' % HTML.encode(), b'{"warning": "\\ud800"}', b'{"closing": 5, "prepared": []}',
    b'{"measured": [1]}', b'{"measured": {"steps": 1%b, "step_seconds": 1, "compute_seconds": 1, "exposed_seconds": 0}}' % (b"0" * 40),
    b'{"measured": {"steps": 0, "step_seconds": 0, "compute_seconds": -1e308, "exposed_seconds": 0}}', bytes(range(256)),
]  # fmt: skip
SCRIPT = f"""
import os
for line in {STATUS_LINES!r}:
    os.write(int(os.environ["DISTRIB_STATUS_FD"]), line + b"\\n")
text = "{HTML}\\\\u001b]0;x\\\\u0007"
with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
    file.write('{{"message": {{"message": "%s", "extraInfo": {{"py_callstack": "%s"}}}}}}' % (text, text))
os._exit(5)
"""


def test_a_script_that_sends_anything_gets_its_exit_code_and_a_report_without_its_tags(launch, tmp_path):
    script = tmp_path / "<img src=x onerror=alert(1)>.py"
    script.write_text(SCRIPT)
    run = launch("-np", "1", script, HTML)
    assert run.code == 5 and run.result["first_failure"]["message"].startswith(HTML), run
    report = (run.run_dir / "report.html").read_text()
    assert "alert(1)" in report and "<script" not in report and "<img" not in report


@pytest.mark.parametrize(
    "text",
    ["", "\0\xff", '{"message": ' + "[" * 200_000, '{"message": 5}', '{"message": " \\n "}', '{"message": {"message": null}}',
     '{"message": {"message": "m", "extraInfo": 5}}', '{"message": {"message": "m", "extraInfo": {"py_callstack": 5}}}'],
)  # fmt: skip
def test_an_error_file_of_another_form_is_ignored(text):
    assert parse_error_record(text) is None


def test_files_of_mpirun_in_tmp_are_not_written_through_links(tmp_path):
    options = LaunchOptions(script="x", directory="/", run_dir=str(tmp_path), engine="mpirun", ranks=1)
    plan = plan_builder.build_plan(options, hostfile.parse_host_list("a:2"), None)
    (victim := tmp_path / "victim").write_text("kept")
    links = mpirun.ranks_file(plan), mpirun.wrapper_file(plan)
    for link in links:
        link.symlink_to(victim)
    try:
        engines.get("mpirun").write_files(tmp_path, plan)
        assert victim.read_text() == "kept" and not any(link.is_symlink() for link in links)
        assert links[0].read_text() == "a\n" and links[1].read_text().startswith("exec ")
        assert all(link.stat().st_mode & 0o022 == 0 for link in links)
    finally:
        for link in links:
            link.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
def test_run_directories_of_other_users_are_refused_and_links_in_own_ones_replaced(tmp_path):
    (victim := tmp_path / "victim").write_text("kept")
    run_dir = tmp_path / "run"
    (run_dir / "ranks").mkdir(parents=True)
    (run_dir / "plan.json").write_text(json.dumps({"job": "1"}))
    for name in ("ranks/0.out", "result.json", "report.html"):
        (run_dir / name).symlink_to(victim)
    with run_directory.locked_run_dir(run_dir):
        assert run_directory.prepare_run_dir(run_dir)
    assert not any(path.is_symlink() for path in run_dir.rglob("*")) and victim.read_text() == "kept"
    os.chown(run_dir, 65534, 65534)
    run_dir.chmod(0o755)
    with run_directory.locked_run_dir(run_dir):  # root in a container often works in folders of others
        pass
    run_dir.chmod(0o777)
    with pytest.raises(ConfigError, match="user 65534 owns it"), run_directory.locked_run_dir(run_dir):
        pass
