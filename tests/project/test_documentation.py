"""Documentation: the site builds without warnings, pages are current, and every command in them parses."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distrib_launch.cli import launch, topo
from tests.conftest import ROOT

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
COMMAND = re.compile(r"^(?: {4})?((?:distrib-launch|distrib-topo) .*)$", re.MULTILINE)


def commands() -> list[tuple[str, str]]:
    """Return (page, command) for every command line in a code block of the docs."""
    found = []
    for page in PAGES:
        if page.name in ("distrib-launch.md", "distrib-topo.md"):
            continue  # the commands' own help
        for line in COMMAND.findall(page.read_text(encoding="utf-8")):
            if "error:" not in line and "&&" not in line:
                found.append((str(page.relative_to(ROOT)), line))
    return found


def test_the_docs_have_commands():
    assert len(commands()) > 30


@pytest.mark.parametrize(("page", "command"), commands())
def test_every_documented_command_parses(page: str, command: str):
    program, *words = shlex.split(command, comments=True)
    parser = launch.parser() if program == "distrib-launch" else topo.build_parser()[0]
    parser.parse_args(words)


def test_the_command_reference_is_current():
    subprocess.run([sys.executable, str(ROOT / "scripts" / "reference.py"), "--check"], check=True)


def test_the_site_builds_without_warnings(tmp_path: Path):
    for name in ("distrib", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    zensical = Path(sys.executable).parent / "zensical"
    built = subprocess.run([str(zensical), "build", "--strict"], cwd=tmp_path, text=True, capture_output=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "build" / "site" / "index.html").is_file()
