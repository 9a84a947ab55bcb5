"""Published results, predicted from the catalogue only; benchmarks/results/published.md shows every row."""

from __future__ import annotations

import csv
import functools
import json

import pytest

from benchmarks import published
from tests.conftest import ROOT

FILES = [ROOT / "tests" / "data" / "published" / f"{name}.csv" for name in ("scaling", "frameworks", "busbw")]
AGAIN = f"python benchmarks/published.py --markdown {' '.join(str(path.relative_to(ROOT)) for path in FILES)}"


@functools.cache
def results() -> dict:
    return {path: published.read_results(path) for path in FILES}


@pytest.mark.parametrize(
    ("path", "mean", "median", "bias"),
    [(FILES[0], 0.047, 0.018, 0.041), (FILES[1], 0.095, 0.097, 0.093), (FILES[2], 0.175, 0.072, 0.09)],
    ids=lambda value: getattr(value, "stem", ""),
)
def test_errors_of_both_halves_stay_within_the_bounds(path, mean, median, bias):
    for half in published.report(results()[path])["halves"].values():
        assert half["mean_absolute_error"] <= mean
        assert half["median_absolute_error"] <= median
        assert abs(half["bias"]) <= bias


def test_the_page_shows_every_row_as_the_model_says_now():
    page = (ROOT / "benchmarks" / "results" / "published.md").read_text(encoding="utf-8")
    assert page == published.markdown(results()), f"write it again: {AGAIN}"


def test_the_document_shows_the_summary():
    document = (ROOT / "docs" / "benchmarks" / "prediction.md").read_text(encoding="utf-8")
    assert published.summary_table(results()) in document
    assert AGAIN.partition(" --markdown")[0] in document


def test_every_published_figure_is_possible_and_named_once():
    for path in FILES:
        rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
        assert len({tuple(row) for row in rows}) == len(rows)
    for one in (*results()[FILES[0]], *results()[FILES[1]]):
        assert 0 < one.published <= 1 and 0 < one.predicted <= 1.01, one


def test_json_reports_errors_halves_and_ranges_of_sizes(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["published.py", "--json", str(FILES[2])])
    published.main()
    told = json.loads(capsys.readouterr().out)
    assert {"mean_absolute_error", "median_absolute_error", "bias", "rows"} <= set(told)
    assert told["rows"] == sum(half["rows"] for half in told["halves"].values())
    assert told["rows"] == sum(part["rows"] for part in told["sizes"].values())
    assert told == published.report(results()[FILES[2]])


def test_rows_with_a_named_fault_count_in_every_figure_but_one():
    whole = published.report(results()[FILES[2]])
    (sound,) = whole["without_named_faults"].values()
    assert whole["sizes"]["16 MiB and more"]["rows"] - sound["rows"] == 3
    assert published.NAMED_FAULTS.keys() <= {one.source for one in results()[FILES[2]]}
