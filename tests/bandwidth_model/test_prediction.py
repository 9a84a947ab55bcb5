"""Accuracy of the model on the results of benchmarks/prediction.py, to detect changes that make it worse."""

from __future__ import annotations

import statistics

from benchmarks import prediction


def test_the_model_predicts_what_was_measured():
    rows = prediction.judge(prediction.read(prediction.RESULTS), None)
    assert len(rows) >= 100 and {row["half"] for row in rows} == {"tune", "held-out"}
    assert statistics.fmean(abs(row["error"]) for row in rows) < 0.055
    exact = [row for row in rows if row["ranks"] <= prediction.FEW_RANKS and row["kind"] in ("default", "flat")]
    assert statistics.fmean(abs(row["error"]) for row in exact) < 0.025
    assert statistics.fmean(abs(row["efficiency"] - row["efficiency predicted"]) for row in exact) < 0.02
    wrong = [abs(row["efficiency"] - prediction.THRESHOLD) for row in rows if not row["right"]]
    assert len(wrong) <= 4 and max(wrong) < 0.03
    of_exact = [abs(row["efficiency"] - prediction.THRESHOLD) for row in exact if not row["right"]]
    assert max(of_exact, default=0) < 0.01  # the values on the threshold itself
