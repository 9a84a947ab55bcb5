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
        if page.name in ("distrib-launch.md", "distrib-topo.md") or page.parent.name == "recordings":
            continue  # the commands' own output
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


LINK = re.compile(r"\]\(([^)\s]+)\)")
ROOT_PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings():
    """The build of the site checks links between its pages, but neither pictures nor the pages outside docs/."""
    broken = []
    for page in [*ROOT_PAGES, *PAGES]:
        for link in LINK.findall(page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not link.startswith("https://") and (
                not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target))
            ):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r'"([\w/-]+\.md)"', (ROOT / "zensical.toml").read_text(encoding="utf-8")))
    assert {page for page in listed if not page.startswith("recordings/")} == {
        str(page.relative_to(ROOT / "docs"))
        for page in PAGES
        if page != ROOT / "README.md" and page.parent.name != "recordings"
    }


def test_lines_of_the_changelog_have_at_most_15_words():
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("- ") and len(line.split()) > 16] == []


def test_the_reference_lists_every_finding():
    sources = (ROOT / "distrib" / "probe" / "diagnosis").glob("*.py")
    kinds = {
        kind for source in sources for kind in re.findall(r'\bkind(?:: str)? ?= ?"(\w+)"', source.read_text("utf-8"))
    }
    listed = re.findall(r"^\|`(\w+)`\|", (ROOT / "docs/reference/findings.md").read_text("utf-8"), re.MULTILINE)
    assert set(listed) == kinds


@pytest.mark.processes
def test_the_command_reference_is_current():
    subprocess.run([sys.executable, str(ROOT / "scripts" / "reference.py"), "--check"], check=True)


@pytest.mark.processes
def test_the_site_builds_without_warnings(tmp_path: Path):
    for name in ("distrib", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("zensical.toml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    zensical = Path(sys.executable).parent / "zensical"
    built = subprocess.run([str(zensical), "build", "--strict"], cwd=tmp_path, text=True, capture_output=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "build" / "site" / "index.html").is_file()
