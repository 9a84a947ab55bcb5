"""Errors: stable codes, and one line of text."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from distrib import errors
from distrib_launch.cli import launch, topo
from tests.conftest import ROOT

CODES = {code for codes in errors.ERROR_CODES.values() for code in codes}
SOURCES = [path for package in ("distrib", "launch") for path in (ROOT / package).rglob("*.py")]


def used_codes() -> set[str]:
    """Return every string that a `code` argument, a `code` attribute or the root cause of a failure may be."""
    found = {kind.code for kind in vars(errors).values() if isinstance(kind, type) and hasattr(kind, "code")}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            value = None
            given = isinstance(node, ast.keyword) and node.arg == "code"
            if given or (isinstance(node, ast.Assign) and any("code" in ast.unparse(to) for to in node.targets)):
                value = node.value
            elif isinstance(node, ast.FunctionDef) and node.name in ("_error_code", "_lost"):
                value = node
            for part in ast.walk(value) if value else ():
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value in CODES:
                    found.add(part.value)
                elif given and isinstance(part, ast.Constant) and part.value:
                    assert part.value in CODES, f"{path}:{part.lineno}: {part.value} has no meaning"
    return found


def test_every_code_has_a_meaning_and_is_used():
    assert used_codes() == CODES


def test_an_error_has_the_code_of_its_class_or_its_own():
    default = errors.ConfigError("--batch 0, expected 1 or more", hint="raise it")
    own = errors.HostfileError("n1 is already on line 1", source="hosts", line=2, code="hostfile-duplicate-host")
    assert (default.code, str(default)) == ("option-value", "--batch 0, expected 1 or more; raise it")
    assert (own.code, str(own)) == ("hostfile-duplicate-host", "hosts:2: n1 is already on line 1")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["show", "-H", "HOSTS", "--json"], "hostfile-duplicate-host"),
        (["show", "--nothing", "--json"], "option-unknown"),
        (["plan", "--workload", "resnet50", "--gpu", "V100", "--network", "no", "--json"], "option-value"),
    ],
)
def test_json_output_of_an_error_has_its_code(words: list[str], code: str, tmp_path: Path, capsys):
    (tmp_path / "hosts").write_text("n1 slots=1\nn1 slots=1\n")
    topo.main([str(tmp_path / "hosts") if word == "HOSTS" else word for word in words])
    assert json.loads(capsys.readouterr().out)["code"] == code


def test_json_output_of_a_refused_launch_has_its_code(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert launch.main(["--json", "-np", "2", "missing.py"]) == 2
    assert json.loads(capsys.readouterr().out)["code"] == "script-missing"
