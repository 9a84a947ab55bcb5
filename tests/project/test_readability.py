"""Metrics of scripts/readability.py."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT

SOURCE = '''"""How it is done."""
import re
from distrib import b
LIMIT_SECONDS = 3.0
SIZES = 1 << 20, "all"
NAMES = ("a", "b")
PATTERN = re.compile("a")


class Same:  # twice
    """A class."""

    def act(self, count: int) -> None:
        """Act."""
        import json

    def _act(self, count: int) -> None: ...


def act(count: int) -> int:
    """Act.

    Args:
        count: how often.
    """
    return re.compile(str(count)) and count
'''
GUIDE = """# Title

One two three. Four five six
seven: eight.

```
code is not prose
```

| a | table |
|-|-|

- an item
- another item of five words.

Text before

    indented code
"""


def load(script: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("readability", script)
    assert spec and spec.loader
    module = sys.modules["readability"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_measures(tmp_path):
    for name, text in {
        "distrib/__init__.py": "",
        "distrib/a.py": SOURCE,
        "distrib/b.py": "def f():\n    import distrib.a\n",
        "distrib/c/a.py": "\n" * 501 + "class Same:\n" + "    x = 1\n" * 301,
        "launch/distrib_launch/d.py": "from . import e",
        "launch/distrib_launch/e.py": "from distrib_launch.d import x",
        "docs/guide.md": GUIDE,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    report = load(ROOT / "scripts/readability.py").measure(str(tmp_path))
    assert report.pop("lines, all") == SOURCE.count("\n") + 2 + 803
    assert report == {
        "lines, code": 12 + 2 + 302 + 2, "lines, docstring": 8, "lines, comment": 0,
        "module-level thresholds": ["distrib.a.LIMIT_SECONDS", "distrib.a.SIZES"],
        "module-level regexes": ["distrib.a:7"],
        "imports inside functions": ["distrib.a:15", "distrib.b:2"],
        "import cycles": ["distrib.a distrib.b", "distrib_launch.d distrib_launch.e"],
        "files over 500 lines": ["distrib.c.a"],
        "classes over 300 lines": ["distrib.c.a.Same"],
        "duplicate file names": ["a.py: distrib.a, distrib.c.a"],
        "duplicate class names": ["Same: distrib.a:10, distrib.c.a:502"],
        "docstrings that begin with a question word": ["distrib.a:1"],
        "public functions with parameters": 2, "public functions without Args:": ["distrib.a:13"],
        "docs, words": 35, "docs, words per code block": 17,
        "docs, words of a sentence, median": 3, "docs, words of a sentence, 90 %": 5,
        "docs, words of a sentence, longest": 5, "docs, words of the longest paragraph": 8,
    }  # fmt: skip


@pytest.mark.processes
def test_a_commit_and_a_folder_side_by_side(tmp_path, capsys):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "distrib").mkdir()
    script = Path(shutil.copy(ROOT / "scripts/readability.py", tmp_path / "scripts"))
    (tmp_path / "distrib/b.py").write_text("import distrib.c\n")
    author = ("-c", "user.name=kim", "-c", "user.email=kim@localhost")
    for words in (("init", "-q"), ("add", "."), (*author, "commit", "-q", "-m", "first")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / "distrib/c.py").write_text("import distrib.b\n")
    assert load(script).main(["--list", "HEAD", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert re.search(r"^import cycles +0 +1\n    distrib.b distrib.c$", told, re.MULTILINE), told
