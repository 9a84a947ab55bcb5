"""`starts.py WHAT ...`: what each start of a job does, by its number, in rank 0: a word to fail with, `wait`, or nothing more."""

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
