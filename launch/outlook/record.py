"""What was foretold of a job, as `plan.json` keeps it."""

from __future__ import annotations

import msgspec

from distrib.bandwidth.prediction import Prediction


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """What was foretold of a job with the strategy that it runs with, and the warning that this is worth."""

    workload: str
    source: str
    """Where the workload is from: a file, or the catalogue."""
    foretold: Prediction
    expected_error: float
    """Of the step's time: of links and workload together."""
    warning: str = ""
