"""Unusual scripts: the assertions of `tests/scripts/habits.py`, on several ranks."""

from __future__ import annotations

import json
import re

import pytest

from tests.conftest import SCRIPTS
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.forked, pytest.mark.usefixtures("inductor_cache")]


@pytest.mark.parametrize(
    ("ranks", "strategy", "lessons"),
    [
        (
            2,
            {},
            "methods frozen_later inferred_buffers growing_buffers looked_at_alone gathered_batches two_models_in_turns "
            "set_by_hand shown_between backward_inside copy_evaluated_alone passed_without_steps frozen_when_read "
            "cleared_after_steps inferred_evaluation begins_as_main warmed_in_no_step has_its_turn_again compiled_step "
            "scaler_lets_go weights_alone values_of_each_rank compiled second_backward unused_zeros step_in_backward read_ahead own_loader "
            "episodes kept_iterator own_epochs closure_numbers reduced not_numbers",
        ),
        (1, {}, "own_loader kept_iterator made_anew own_epochs gathered_batches"),
        (2, {"balance": True}, "looked_at_alone other_workers"),
        (2, {"gradients": {"format": "topk", "fraction": 0.1}}, "wide_default"),
        (
            2,
            {"mode": "local", "inner_steps": 2},
            "read_ahead inferred_buffers growing_buffers has_its_turn_again restored_within_a_round weights_alone followers "
            "values_of_each_rank passed_without_steps",
        ),
    ],
)
def test_habits(ranks, strategy, lessons):
    run = run_ranks(ranks, SCRIPTS / "habits.py", *lessons.split(), DISTRIB_STRATEGY=json.dumps(strategy))
    assert run.returncode == 0, run.stdout + run.stderr
    assert sorted(run.stdout.splitlines()) == sorted(
        f"done: {lesson}" for lesson in lessons.split() for _ in range(ranks)
    )


@pytest.mark.parametrize(
    ("options", "lessons"),
    [
        (("-np", "1"), "has_its_turn_again"),
        (
            ("-np", "2", "--gradients", "fp16"),
            "begins_as_main has_its_turn_again weights_alone evaluated_by_a_method averages_put_in large_gradients reduced "
            "values_of_each_rank main_ends_first",
        ),
    ],
)
def test_habits_without_a_common_step(launch, options, lessons):
    run = launch(*options, "--mode", "async", SCRIPTS / "habits.py", *lessons.split())
    assert run.code == 0, run
    for rank in range(int(options[1])):  # exit code 0 needs only one rank that reaches the end
        told = (run.run_dir / "ranks" / f"{rank}.out").read_text()
        assert re.findall("^done: (.+)$", told, re.MULTILINE) == lessons.split(), run
    assert "the script changed" not in run.err, run.err


def test_a_script_that_destroys_the_group_itself_is_told_what_that_leaves_out():
    run = run_ranks(2, SCRIPTS / "habits.py", "ends_itself")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "destroy_process_group(): the last checks" in run.stdout + run.stderr
    assert "could not wait" not in run.stderr
