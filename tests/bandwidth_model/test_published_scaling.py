"""Published results, predicted from the catalogue only; docs/benchmarks/prediction.md shows every row."""

from __future__ import annotations

import statistics

from tests.conftest import ROOT
from tests.support.published_results import ROWS, table

DOCUMENT = ROOT / "docs" / "benchmarks" / "prediction.md"


def test_published_scaling_is_predicted_within_12_percent_in_the_mean():
    errors = {row.what + " " + row.source: abs(row.predicted / row.published - 1) for row in ROWS}
    assert statistics.fmean(errors.values()) <= 0.12, errors


def test_every_row_is_named_once_and_can_be():
    assert len({(row.what, row.source) for row in ROWS}) == len(ROWS)
    assert all(0 < row.published <= 1 for row in ROWS)
    assert all(0 < row.predicted <= 1 for row in ROWS)


def test_the_document_shows_what_the_model_says_now():
    """`python -m tests.support.published_results` prints the table."""
    assert table() in DOCUMENT.read_text(encoding="utf-8")
