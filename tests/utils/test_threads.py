import os
import signal
import threading

import pytest

from distrib.utils import signals
from distrib.utils.threads import map_in_threads


def test_results_are_in_the_order_of_the_items():
    assert map_in_threads(lambda n: n * n, [3, 1, 2], at_once=2, interrupt=lambda: None) == [9, 1, 4]
    assert map_in_threads(abs, [], at_once=2, interrupt=lambda: None) == []


def test_the_first_error_interrupts_the_other_calls():
    interrupted = threading.Event()

    def work(number):
        if number == 1:
            raise ValueError("one")
        assert interrupted.wait(20)

    with pytest.raises(ValueError, match="one"):
        map_in_threads(work, [0, 1, 2], at_once=3, interrupt=interrupted.set)


@pytest.fixture
def sigterm_raises():
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signals.raise_on_termination()
    yield
    signal.signal(signal.SIGTERM, before)


def test_no_signal_is_lost_while_the_main_thread_begins_to_wait(sigterm_raises):
    lost = []
    for turn in range(6000):
        interrupted = threading.Event()

        def work(spins, interrupted=interrupted):
            os.sched_yield()  # the main thread goes on to its wait
            for _ in range(spins):
                pass
            os.kill(os.getpid(), signal.SIGTERM)
            if not interrupted.wait(5):
                lost.append(spins)

        with pytest.raises(KeyboardInterrupt):
            map_in_threads(work, [turn % 200], at_once=1, interrupt=interrupted.set)
        assert not lost
