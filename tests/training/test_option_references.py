"""Numeric options of modes sync and local on three ranks; `tests/scripts/option_references.py` computes them in plain torch."""

from __future__ import annotations

import pytest

from tests.conftest import SCRIPTS
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.forked, pytest.mark.usefixtures("inductor_cache")]


@pytest.mark.parametrize(
    ("mode", "checks"),
    [
        ("sync", ["sync_steps", "sync_rates", "sync_compression", "sync_limits"]),
        ("local", ["local_rounds", "local_rates"]),
    ],
)
def test_numeric_options_of_a_mode_match_plain_torch(mode, checks):
    result = run_ranks(3, SCRIPTS / "option_references.py", mode, seconds=120)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines() == [f"{check}: as in plain torch" for check in checks]
    if mode == "sync":
        assert "after 4 steps weight differs on rank 1 from rank 0" in result.stderr, result.stderr
