"""`--container`: options, commands of the runtimes, and real containers of podman, made from this machine's own packages."""

from __future__ import annotations

import csv
import os
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distrib.errors import ConfigError
from distrib.utils.containers import find_runtime
from distrib_launch.arguments.launch_arguments import parse
from distrib_launch.cli import launch
from distrib_launch.rank_agent import container
from distrib_launch.rank_agent.control_channel import Assignment
from tests.conftest import Run, call
from tests.support.podman import BASE, podman

SCRIPT = """
    import os, sys, time
    print(f"rank {os.environ['RANK']} sees {os.path.exists(sys.argv[1])}, as {os.getuid()}", flush=True)
    if sys.argv[2] == "fail" and os.environ["RANK"] == "1":
        raise ValueError("in the container")
    while sys.argv[2] == "wait":
        time.sleep(0.1)
"""


def assignment(**changes: object) -> Assignment:
    """Return an assignment of a script in a container."""
    fields = {
        "command": ["python3", "/job/train.py"], "is_python": True, "directory": "/job", "environment": {}, "device": "cpu",
        "tag": "0a.1", "gpus": None, "bind": "none", "cpu_sharers": 1, "grace_seconds": 1.0, "host_timeout_seconds": 1.0,
        "may_return": False, "keep_result": False, "container": "distrib:cpu",
    }  # fmt: skip
    return Assignment(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["--container-runtime", "podman"], "need an image"),
        (["--container-mount", "/data"], "need an image"),
        (["--container", "i", "--engine", "kubernetes"], "starts pods"),
    ],
)
def test_options_that_contradict_others_are_refused(words, fragment):
    with pytest.raises(ConfigError, match=fragment):
        parse([*words, "train.py"])


def test_a_dry_run_names_the_container(tmp_path):
    (tmp_path / "train.py").touch()
    done = call(launch.main, "-np", "2", "--dry-run", "--container", "distrib:cpu", "train.py", cwd=tmp_path)
    assert f"each rank runs in a container of distrib:cpu: python3 {tmp_path}/train.py" in done.stdout


def test_a_host_without_runtimes_is_named_as_such(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_runtime("auto", "distrib:cpu") == ("", "docker or podman or apptainer is not installed")
    assert find_runtime("podman", "distrib:cpu") == ("", "podman is not installed")


@given(st.text(st.characters(exclude_categories=["C"]), min_size=1))
def test_mounts_are_lines_of_csv(path):
    assert next(csv.reader([container._mount(path)])) == ["type=bind", f"source={path}", f"destination={path}"]


def test_values_of_variables_stay_out_of_the_command():
    words = container._docker("docker", "n", assignment(), ["HF_TOKEN"], {"HOME": "/tmp"}, on_gpu=False, has_input=True)
    assert words[words.index("HF_TOKEN") - 1] == "--env"
    assert "HOME=/tmp" in words
    assert "--interactive" in words


@pytest.mark.parametrize(("runtime", "option"), [("docker", "--gpus"), ("podman", "nvidia.com/gpu=all")])
def test_only_ranks_on_gpus_get_them(runtime, option):
    for on_gpu in (False, True):
        words = container._docker(runtime, "n", assignment(), [], {}, on_gpu=on_gpu, has_input=False)
        assert (option in words) is on_gpu


@given(st.integers(0, 255))
def test_exit_codes_of_runtimes_name_signals(code):
    status = container.exit_status(code)
    assert status == code if code <= 128 or code > 128 + 65 else status == 128 - code


@pytest.fixture
def in_container(podman_store: dict[str, str], launch: Callable[..., Run], tmp_path: Path) -> Callable[..., Run]:
    """Launch the script in containers; fail if one of them is left."""

    def run(what: str, *options: str, ranks: int = 2) -> Run:
        (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
        words = ["--container", BASE, *options, "-np", str(ranks), "train.py", __file__, what]
        done = launch(*words, env=podman_store)
        # Those of tests beside this one are not its own.
        left = podman(podman_store, "ps", "--all", "--quiet", "--filter", f"volume={tmp_path}")
        assert not left.stdout
        return done

    return run


def test_ranks_run_in_containers(in_container):
    run = in_container("end")
    assert run.code == 0, run
    for rank in (0, 1):
        assert f"rank {rank} sees False, as {os.getuid()}" in run.out  # the folder of this test is not mounted


def test_a_failed_rank_is_named_with_its_traceback(in_container):
    run = in_container("fail")
    assert run.code == 1, run
    assert "rank 1 on localhost failed first: ValueError: in the container" in run.err


def test_a_mounted_path_is_there_and_a_stopped_job_leaves_no_container(in_container):
    run = in_container("wait", "--container-mount", __file__, "--timeout", "30s", "--grace", "2s", ranks=1)
    assert run.code == 124, run
    assert "rank 0 sees True" in run.out


def test_a_missing_image_is_refused_before_the_start(launch, podman_store, tmp_path):
    (tmp_path / "train.py").write_text("")
    run = launch(
        "--container", "localhost/none", "--container-runtime", "podman", "-np", "1", "train.py", env=podman_store
    )
    assert run.code == 3, run
    assert "localhost: script: cannot start its container: podman has no image localhost/none" in run.err
