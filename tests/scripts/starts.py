"""Fail, wait or finish in rank 0 at each start of a job, by its number: `starts.py WHAT ...`."""

from __future__ import annotations

import os
import sys
import time

start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
what = sys.argv[1 + start] if len(sys.argv) > 1 + start else ""
print(f"start {start}", flush=True)
if what == "wait":
    time.sleep(60)
if what and os.environ["RANK"] == "0":
    raise RuntimeError(what)
