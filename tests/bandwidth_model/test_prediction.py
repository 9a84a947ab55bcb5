"""Accuracy of the model on the results of benchmarks/prediction.py, to detect changes that make it worse."""

from __future__ import annotations

import statistics

from benchmarks import prediction


def test_the_model_predicts_what_was_measured():
    rows = prediction.judge(prediction.read(prediction.RESULTS), None)
    assert len(rows) == 100 and {row["half"] for row in rows} == {"tune", "held-out"}
    assert statistics.fmean(abs(row["error"]) for row in rows) < 0.123
    carried = [row for row in rows if row["busy"] <= prediction.CARRIED]
    exact = [row for row in carried if row["kind"] in ("default", "flat")]
    assert len(carried) == 43 and statistics.fmean(abs(row["error"]) for row in carried) < 0.036
    assert statistics.fmean(abs(row["error"]) for row in exact) < 0.035
    assert statistics.fmean(abs(row["efficiency"] - row["efficiency predicted"]) for row in exact) < 0.017
    wrong = [abs(row["efficiency"] - prediction.THRESHOLD) for row in carried if not row["right"]]
    assert len(wrong) <= 1 and max(wrong, default=0) < 0.02
