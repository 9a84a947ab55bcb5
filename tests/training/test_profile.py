"""`distrib-launch --profile` and `job.profile`: measurements, and unchanged results of the script."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from distrib.bandwidth_model.workload import read_workload
from distrib.training import profiler
from distrib_launch.cli import launch as launch_command
from tests import fork_server
from tests.conftest import SCRIPTS, call

pytestmark = pytest.mark.forked

STEPS = SCRIPTS / "steps.py"


def test_a_script_is_measured_and_ended(launch, tmp_path):
    run = launch("--profile", tmp_path / "p.json", STEPS, 100_000, 0.03, 160_000)
    assert run.code == 0, run
    assert "20 steps of 4 samples" in run.err and "written to " in run.err
    assert "loss" not in run.out
    assert run.result["status"] == "succeeded"
    found = read_workload(tmp_path / "p.json")
    assert (found.name, found.origin, found.device, found.batch) == ("steps", "measured", "cpu", 4)
    assert {gradient.name for gradient in found.gradients[:2]} == {"last.bias", "last.weight"}
    assert {g.name: g.elements for g in found.gradients}["first.weight"] == 80_000
    assert found.gradient_bytes == found.parameter_bytes == 4 * (2 * 80_000 + 10_000 + 8)
    # The sleeps are lower bounds; a busy machine may take any time beyond them.
    assert found.forward_seconds >= 0.0099 and found.backward_seconds >= 0.0199
    assert found.gradients[-1].ready_seconds >= 0.0199 > found.gradients[0].ready_seconds
    assert found.gradients[-1].ready_seconds <= found.backward_seconds
    assert 0 < found.processor_share < 0.9  # mostly sleeps
    assert found.loading_processor_seconds == 0  # in processes of its own


def test_what_the_processes_of_a_loader_take_is_measured(launch, tmp_path):
    run = launch("--profile", tmp_path / "p.json", STEPS, 100_000, 0.03, 1600, "busy:0.003:2")
    assert run.code == 0, run
    found = read_workload(tmp_path / "p.json")
    # Each of a batch's four samples uses 3 ms of CPU time; the kernel counts in ticks of 10 ms.
    assert 0.006 < found.loading_processor_seconds < 0.05
    assert f" {1e3 * found.loading_processor_seconds:.3g} ms of processors" in run.err


def test_batches_that_come_in_bursts_are_waited_for_all_the_same(launch, tmp_path):
    """Four loader processes take 0.4 s per batch and start together. One step of four waits for all of them."""
    assert launch("--profile", tmp_path / "p.json", STEPS, 100_000, 0.02, 1600, "far:0.1:4").code == 0
    found = read_workload(tmp_path / "p.json")
    assert found.loader_seconds > 0.04
    assert found.loader_seconds + found.compute_seconds == pytest.approx(0.1, rel=0.6)  # the longest wait is 0.4 s


def alone(*words: object) -> subprocess.CompletedProcess[str]:
    """Run `steps.py` without a launcher."""
    command, environ = [sys.executable, STEPS, *map(str, words)], {**os.environ, **fork_server.ALONE}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environ)


def test_a_profile_does_not_change_what_is_computed(tmp_path):
    plain, measured = alone(30, 0, 1600), alone(30, 0, 1600, tmp_path / "p.json")
    assert plain.stdout == measured.stdout and "after 30 steps" in plain.stdout, (plain, measured)
    assert read_workload(tmp_path / "p.json").batch == 4


def test_the_variation_of_a_machine_that_stood_still_can_be_read_again():
    assert profiler.quartile_variation([0.001] * 11 + [1.0] * 9) == 10.0
    assert profiler.quartile_variation([1.0] * 20) == 0.0


def test_one_hiccup_is_not_the_variation_of_the_step(launch, tmp_path):
    assert launch("--profile", tmp_path / "p.json", STEPS, 100, 0.03, 1600, "hiccup").code == 0
    assert read_workload(tmp_path / "p.json").variation < 0.5  # one step in 20 took thirty times as long


def test_a_step_of_a_script_that_accumulates_has_the_samples_of_all_its_batches(launch, tmp_path):
    run = launch("--profile", tmp_path / "p.json", STEPS, 400, 0.003, 1600, "accumulates")
    assert run.code == 0 and "20 steps of 16 samples" in run.err, run
    found = read_workload(tmp_path / "p.json")
    assert found.batch == 16 and found.forward_seconds > found.backward_seconds


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("two-optimizers", "2 optimizers were prepared, and a profile knows one; hand only"),
        ("unprepared", "no optimizer was prepared; hand model"),
    ],
)
def test_a_script_that_cannot_be_profiled_is_not_run_to_its_end(launch, tmp_path, how, says):
    run = launch("--profile", tmp_path / "p.json", STEPS, 10**9, 0.001, 1600, how, timeout=200)
    assert run.code == 1 and says in run.err and "Traceback" not in run.err, run


def test_a_thread_of_the_script_does_not_hold_the_profile_up(launch, tmp_path):
    run = launch("--profile", tmp_path / "p.json", STEPS, 1000, 0, 1600, "thread", timeout=240)  # takes 600 s
    assert run.code == 0 and read_workload(tmp_path / "p.json"), run


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((3, 0, 1600), "the script took 3 step(s); a profile needs 10 (5 to warm up and 5 measured, better 20)"),
        ((30, 0, 1600, "unprepared"), "no optimizer was prepared"),
        ((30, 0, 1600, "no-backward"), "no gradient of the model was computed by backward() in 30 step(s)"),
    ],
)
def test_scripts_that_give_no_profile_are_told_why(launch, tmp_path, words, says):
    run = launch("--profile", tmp_path / "p.json", STEPS, *words)
    assert run.code == 1 and "Traceback" not in run.err, run
    assert "no profile" in run.err and says in run.err
    assert not (tmp_path / "p.json").exists()


def test_a_script_without_distrib_and_wrong_options(launch, tmp_path):
    run = launch("--profile", tmp_path / "p.json", SCRIPTS / "where.py")
    assert run.code == 1 and "distrib.init()" in run.err, run
    for words, says in [
        (["-np", 2], "--profile measures one rank"),
        (["--mode", "local"], "not in mode local"),
        (["--accumulate", 4], "a step of one batch, not of 4; leave out --accumulate"),
        (["--profile", tmp_path / "none" / "p.json"], "there is no folder"),
    ]:
        done = call(launch_command.main, "--profile", tmp_path / "p.json", *words, STEPS, 30, 0, 1600)
        assert done.returncode == 2 and says in done.stderr, done


def test_too_few_steps_alone_are_told_too(tmp_path):
    done = alone(4, 0, 1600, tmp_path / "p.json")
    assert done.returncode == 0 and "no profile: the script took 4 step" in done.stderr
    assert not (tmp_path / "p.json").exists()
