"""Time in the queue for a CPU, from the kernel."""

import os
import subprocess
import sys

from distrib.training.telemetry import scheduler_stats

PINNED = "import os, time; os.sched_setaffinity(0, {int(os.sys.argv[1])})\n"
BUSY = PINNED + "while True: pass"
MEASURED = (
    PINNED
    + """
from distrib.training.telemetry import scheduler_stats
before = scheduler_stats.queued_by_thread()
end = time.process_time() + 0.5
while time.process_time() < end: pass
print(scheduler_stats.longest_queue_seconds(before, scheduler_stats.queued_by_thread()))
"""
)


def test_a_thread_that_shares_a_cpu_is_in_its_queue():
    cpu = str(min(os.sched_getaffinity(0)))
    with subprocess.Popen([sys.executable, "-c", BUSY, cpu]) as rival:
        try:
            output = subprocess.run([sys.executable, "-c", MEASURED, cpu], capture_output=True, check=True).stdout
        finally:
            rival.kill()
    assert float(output) > 0.1


def test_a_thread_that_began_in_between_counts_from_its_begin():
    assert scheduler_stats.longest_queue_seconds({"1": 2.0}, {"1": 2.1, "7": 0.3}) == 0.3
    assert scheduler_stats.longest_queue_seconds({"1": 2.0}, {}) == 0.0
