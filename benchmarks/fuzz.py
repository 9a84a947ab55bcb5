"""Generated inputs for every parser and option: each is accepted, or refused by an error of distrib, in less than 2 s of CPU time.

    python benchmarks/fuzz.py [--inputs 500000] [--parser hostfile] [--processes 2] [--seed 0]

Inputs are mutations of valid samples. Exit code 1 if a parser raised another error or was slow.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from fuzz_inputs import ROOT, mutate
from fuzz_parsers import Refused, parsers, write_files

from distrib.errors import DistribError

SLOW_MILLISECONDS = 2000
MAX_SECONDS = 10.0
"""CPU time after which an input is given up."""


@dataclass
class Outcome:
    """Counts of one parser."""

    counts: Counter[str] = field(default_factory=Counter)
    slowest_milliseconds: float = 0.0
    slowest_input: str = ""
    failures: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Shortest input and its traceback, by error and place."""


def fuzz(name: str, inputs: int, seed: int) -> Outcome:
    """Feed one parser in a new working directory."""
    resource.setrlimit(resource.RLIMIT_AS, (16 << 30, 16 << 30))
    outcome = Outcome()
    choice = random.Random(f"{seed} {name}")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        os.chdir(folder)
        quiet = stack.enter_context(Path(os.devnull).open("w"))
        for target in (
            "distrib_launch.cli.show.plot",
            "distrib_launch.cli.show.query_topology",
            "distrib.bandwidth_model.scaling_plot.draw_plan",
        ):
            stack.enter_context(mock.patch(target, side_effect=DistribError("not in this run")))
        for command in ("check", "probe"):
            stack.enter_context(mock.patch(f"distrib_launch.cli.{command}.run", lambda _: 0))
        stack.enter_context(mock.patch.dict(os.environ, {"PATH": str(Path(sys.executable).parent)}))
        stack.enter_context(contextlib.redirect_stdout(quiet))
        stack.enter_context(contextlib.redirect_stderr(quiet))
        logging.disable()
        write_files()
        signal.signal(signal.SIGVTALRM, give_up)
        parser = parsers()[name]
        for _ in range(inputs):
            text = mutate(choice, parser.samples)
            begun = time.process_time()
            signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS)
            try:
                parser.parse(text)
                kind = "accepted"
            except Refused:
                kind = "refused"
            except Exception as error:
                is_foreign = type(error) is not ValueError and not type(error).__module__.startswith(
                    ("distrib", "msgspec")
                )
                is_documented = isinstance(error, parser.errors) and not is_foreign
                kind = "refused" if is_documented and str(error) else "others"
                if kind == "others":
                    frame = traceback.extract_tb(error.__traceback__)[-1]
                    key = f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"
                    if key not in outcome.failures or len(text) < len(outcome.failures[key][0]):
                        outcome.failures[key] = text, traceback.format_exc()
            outcome.counts[kind] += 1
            milliseconds = (time.process_time() - begun) * 1000
            if milliseconds > outcome.slowest_milliseconds:
                outcome.slowest_milliseconds, outcome.slowest_input = milliseconds, text
        os.chdir(ROOT)
    return outcome


def give_up(*_: object) -> None:
    raise TimeoutError(f"no result after {MAX_SECONDS:g} s of CPU time")


def names() -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        found = list(parsers())
        os.chdir(ROOT)
    return found


def main() -> int:
    known = names()
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--inputs", type=int, default=500_000, help="inputs of all parsers together")
    options.add_argument("--parser", choices=known, help="feed this parser only")
    options.add_argument("--processes", type=int, default=1)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    chosen = [given.parser] if given.parser else known
    each = max(1, -(-given.inputs // len(chosen)))
    print(
        f"seed {given.seed}, {each * len(chosen):,} inputs\n|parser|inputs|accepted|refused|others|slowest [CPU ms]|\n|-|-:|-:|-:|-:|-:|",
        flush=True,
    )
    failures: list[str] = []
    with multiprocessing.get_context("fork").Pool(given.processes, maxtasksperchild=1) as pool:
        found = pool.imap(functools.partial(fuzz, inputs=each, seed=given.seed), chosen)
        for name, outcome in zip(chosen, found, strict=True):
            counts, slowest = outcome.counts, outcome.slowest_milliseconds
            print(
                f"|{name}|{each:,}|{counts['accepted']:,}|{counts['refused']:,}|{counts['others']:,}|{slowest:.0f}|",
                flush=True,
            )
            failures += [f"{name}: {key}: {text[:2000]!r}\n{trace}" for key, (text, trace) in outcome.failures.items()]
            if slowest > SLOW_MILLISECONDS:
                failures.append(f"{name}: {slowest:.0f} ms: {outcome.slowest_input[:2000]!r}")
    print("\n".join(failures), file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
