"""Names of modules, functions and files in strings of the product, docs and scripts exist.

A linter does not check these names: `-m` commands, registries, and the files that identify a stack in a hang report.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator

from tests.conftest import ROOT

PRODUCT = sorted([*(ROOT / "distrib").rglob("*.py"), *(ROOT / "launch").rglob("*.py")])
TEXTS = sorted(
    [ROOT / "README.md", ROOT / "Dockerfile", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.py")]
)
DOTTED = re.compile(r"(?<![\w./])((?:distrib|distrib_launch)(?:\.\w+)+)(?::(\w+))?")
FILE = re.compile(r"(?<![\w.])/?((?:distrib|distrib_launch)/\w+(?:/\w+)*(?:\.\w+)?)")


LOGGERS = {"distrib.launch", "distrib.topo"}


def strings(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a module, except docstrings and names of loggers."""
    skipped = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("getLogger"):
            skipped |= {id(argument) for argument in node.args}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value


def resolves(dotted: str) -> bool:
    """Return True if a dotted name is a module, or an attribute of one."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            if not hasattr(found, name):
                return False
            found = getattr(found, name)
        return True
    return False


def names_a_file(path: str) -> bool:
    """Return True for a file of this project. `distrib/join` is a key, /opt/distrib/bin an installation."""
    second = path.split("/")[1]
    return path.endswith((".py", ".yaml")) or (ROOT / "distrib" / second).is_dir()


def missing(text: str) -> list[str]:
    """Return the names in a string that do not exist."""
    dotted = [f"{name}.{inside}" if inside else name for name, inside in DOTTED.findall(text)]
    files = [path for path in FILE.findall(text) if names_a_file(path)]
    return [name for name in dotted if name not in LOGGERS and not resolves(name)] + [
        path for path in files if not (ROOT / path).exists() and not (ROOT / "launch" / path).exists()
    ]


def test_names_that_do_not_exist_are_found():
    assert missing("python -m distrib.probe, or distrib.training.strategies.ddp:DdpStrategy; distrib.init()") == []
    assert missing("/distrib/training/job.py /distrib/training/ distrib/join distrib_launch/rank_agent/agent.py") == []
    assert missing("-m distrib.prob") == ["distrib.prob"]
    assert missing("distrib.training.strategies.ddp:Nothing") == ["distrib.training.strategies.ddp.Nothing"]
    assert missing("/distrib/training/jobs.py distrib/training/b") == ["distrib/training/jobs.py", "distrib/training/b"]


def test_names_in_strings_of_the_product_exist():
    for path in PRODUCT:
        tree = ast.parse(path.read_text())
        assert [name for text in strings(tree) for name in missing(text)] == [], path
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("with_name"):
                names = [a.value for a in node.args if isinstance(a, ast.Constant) and str(a.value).endswith(".py")]
                assert all(path.with_name(str(name)).exists() for name in names), (path, names)


def test_names_in_texts_exist():
    for path in TEXTS:
        assert missing(path.read_text()) == [], path
