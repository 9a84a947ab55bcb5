"""End of a rank: failures, the last round, the script after its job."""

from __future__ import annotations

import time

import pytest

from tests.conftest import SCRIPTS
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.processes


def test_replicas_that_differ_at_the_end_are_a_failure(tmp_path):
    script = tmp_path / "by_hand.py"
    script.write_text(
        "import sys, distrib, torch\n"
        "job = distrib.init()\n"
        "model = job.prepare(torch.nn.Linear(2, 1))\n"
        "model(torch.ones(1, 2)).sum().backward()\n"
        "if sys.argv[1:]:\n"
        "    model.bias.data -= 0.1 * job.rank * model.bias.grad\n"
        "print('done')\n"
    )
    result = run_ranks(2, script, DISTRIB_STRATEGY='{"mode": "local"}')
    assert result.returncode == 0, result.stderr  # no parameter was updated
    result = run_ranks(2, script, "learn", DISTRIB_STRATEGY='{"mode": "local"}')
    assert result.returncode == 1 and "done" in result.stdout, result.stderr
    assert (
        ": bias differs between ranks, and no prepared optimizer has it" in result.stderr
    )  # of the rank that ends first


def test_a_rank_that_fails_in_its_last_synchronization_exits_with_1(tmp_path):
    script = tmp_path / "full.py"
    script.write_text(
        "import distrib\n"
        "from distrib.training.strategies.base import TrainingStrategy\n"
        "def settle(strategy):\n    raise RuntimeError('none left')\n"
        "TrainingStrategy.synchronize = settle\n"
        "job = distrib.init()\n"
    )
    result = run_ranks(1, script)
    assert result.returncode == 1 and "RuntimeError: none left" in result.stderr, result.stderr


@pytest.mark.parametrize("does", ["handles", "asks"])
def test_a_script_may_continue_after_its_job(tmp_path, does):
    """It may handle an error of the job's block for a long time, or continue with the MPI that it initialized."""
    script = tmp_path / "goes_on.py"
    script.write_text(
        "import sys, time\n"
        "if 'asks' in sys.argv:\n    from mpi4py import MPI\n"
        "import distrib\n"
        "from distrib.training import shutdown as leaving\n"
        "leaving.TIMEOUTS = leaving.ShutdownTimeouts(failed_exit_seconds=0.2)\n"
        "try:\n"
        "    with distrib.init() as job:\n"
        "        if 'handles' in sys.argv:\n"
        "            raise KeyError('batch')\n"
        "    print('the sum is', MPI.COMM_WORLD.allreduce(job.rank), flush=True)\n"
        "except KeyError:\n"
        "    time.sleep(0.6)\n"
        "    print('saved', flush=True)\n"
    )
    result = run_ranks(2, script, does)
    assert result.stdout.splitlines() == ["saved" if does == "handles" else "the sum is 1"] * 2, result.stderr


WITHOUT_WITH = {"LESSON_WITHOUT_WITH": "1"}


@pytest.mark.parametrize(
    ("variables", "how", "code"),
    [
        *(({}, "raise", 1), ({}, "exit", 7)),  # the `with` statement sees a SystemExit of either origin
        *((WITHOUT_WITH, how, code) for how, code in (("raise", 1), ("exit", 7))),
    ],
)
def test_a_failed_rank_exits_at_once_with_its_code(variables, how, code):
    begin = time.monotonic()
    result = run_ranks(2, SCRIPTS / "lessons.py", "fails", how, **variables)
    assert result.returncode == code, result.stdout + result.stderr
    assert ("this rank fails" in result.stderr) == (how == "raise")
    assert time.monotonic() - begin < 40
