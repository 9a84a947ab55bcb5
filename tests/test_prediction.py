"""How right the model is on what benchmarks/prediction.py has measured: a change that makes it worse is seen here."""

from __future__ import annotations

import statistics

from benchmarks import prediction


def test_the_model_foretells_what_was_measured():
    rows = prediction.judge(prediction.read(prediction.RESULTS), None)
    assert len(rows) >= 100 and {row["half"] for row in rows} == {"tune", "held-out"}
    assert statistics.fmean(abs(row["error"]) for row in rows) < 0.065
    few = [row for row in rows if row["ranks"] <= prediction.FEW_RANKS]
    assert statistics.fmean(abs(row["error"]) for row in few) < 0.03
    assert statistics.fmean(abs(row["efficiency"] - row["efficiency foretold"]) for row in few) < 0.02
    assert all(row["right"] for row in few)
