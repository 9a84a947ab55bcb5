"""Names of files, arguments, variables and hosts' folders with bytes that are not UTF-8."""

from __future__ import annotations

import json
import os

import pytest

LATIN = os.fsdecode(b"caf\xe9")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / LATIN
    folder.mkdir()
    (folder / f"{LATIN}.txt").touch()
    (folder / f"{LATIN}-2.py").touch()
    return folder


def test_scripts_arguments_variables_and_folders_of_any_bytes(launch, folder):
    script = folder / f"{LATIN}.py"
    script.write_text(
        "import os, sys\n"
        "found = os.fsencode(sys.argv[1]), os.environb[b'LATIN'], os.path.basename(os.getcwdb())\n"
        "assert found == (b'caf\\xe9',) * 3, found\n"
        "print('rank', os.environ['RANK'], 'has them')\n"
        "if len(sys.argv) > 2:\n"
        "    raise ValueError(sys.argv[2])\n"
    )
    words = ["-np", "2", "-x", f"LATIN={LATIN}", "--run-dir", folder / "run", script, LATIN]
    for _ in range(2):  # the second run replaces the files of the first
        run = launch(*words, cwd=folder)
        assert run.code == 0, run
        assert "rank 0 has them" in run.out and "rank 1 has them" in run.out
        plan = json.loads((folder / "run/plan.json").read_bytes())
        assert (plan["script"][1:], plan["directory"]) == ([str(script), LATIN], str(folder))
        assert b"\xe9" not in (folder / "run/report.html").read_bytes()
    run = launch(*words, LATIN, cwd=folder)
    failure = json.loads((folder / "run/result.json").read_bytes())["first_failure"]
    assert run.code == 1 and failure["message"] == f"ValueError: {LATIN}", run
    assert str(script) in failure["traceback"]


@pytest.mark.parametrize("options", [["--dry-run"], ["--dry-run", "--json"], ["--json"]])
def test_plans_and_results_with_any_bytes_are_printed(launch, folder, options):
    (folder / "ok.py").touch()
    run = launch(*options, "-np", "1", "ok.py", LATIN, cwd=folder)
    assert run.code == 0, run
    assert "--json" not in options or isinstance(json.loads(run.out), dict)
    if options[0] == "--dry-run":
        assert r"caf\udce9" in run.out


@pytest.mark.cluster
def test_names_of_any_bytes_on_other_hosts(make_cluster, launch, folder):
    cluster = make_cluster(2)
    script = folder / f"{LATIN}.py"
    script.write_text(
        "import os, sys\nprint(os.environ['RANK'], os.fsencode(sys.argv[1] + os.environ['LATIN']).hex())\n"
    )
    words = ["-H", cluster.hostfile, "-x", f"LATIN={LATIN}", "--run-dir", folder / "run", script, LATIN]
    run = launch(*words, cluster=cluster, cwd=folder)
    assert run.code == 0, run
    assert "0 636166e9636166e9" in run.out and "1 636166e9636166e9" in run.out
