"""`--config`: options from a TOML or YAML file."""

from __future__ import annotations

from pathlib import Path

import pytest

from distrib.errors import ConfigError
from distrib_launch.arguments import launch_arguments


def parse(path: Path, *words: str):
    return launch_arguments.parse(["--config", str(path), *words, "train.py", "--config", "own.yaml"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", "hosts: n1:2,n2:2\nmax-restarts: 3\nquiet: true\nenv: [A=1, B=2]\nstale_rate: false\n"),
        ("a.toml", 'hosts = "n1:2,n2:2"\nmax_restarts = 3\nquiet = true\nenv = ["A=1", "B=2"]\nstale-rate = false\n'),
    ],
)
def test_keys_are_option_names(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    options = parse(tmp_path / name, "--mode", "async")
    assert (options.hosts, options.max_restarts, options.quiet) == ("n1:2,n2:2", 3, True)
    assert options.variables == ("A=1", "B=2") and not options.strategy.stale_rate
    assert options.arguments == ("--config", "own.yaml")  # of the script


def test_the_command_line_wins(tmp_path):
    (tmp_path / "a.yaml").write_text("hosts: n1:2\nmode: async\nbalance: true\nenv: A=1\nmin-hosts: 2\n")
    options = parse(tmp_path / "a.yaml", "-H", "n9", "--mode", "sync", "-x", "B=2", "--min-hosts", "1")
    assert (options.hosts, options.strategy.mode, options.min_hosts) == ("n9", "sync", 1)
    assert options.variables == ("A=1", "B=2")


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        ("max-restart: 3", ["'max-restart'", "did you mean max-restarts?"]),
        ("max-restarts: many", ["--max-restarts", "many"]),
        ("quiet: 3", ["quiet is 3", "true or false"]),
        ("hosts: true", ["hosts is true", "FILE|LIST"]),
        ("config: b.yaml", ["'config'"]),
        ("just words", ["has no options"]),
        ("a: [", ["a.yaml"]),
        ("[" * 20_000, ["a.yaml:1", "100 levels"]),
        ("mode: !!python/object/apply:os.getcwd []", ["a.yaml:1", "python"]),
        ("hosts: [&a [x], [*a, *a]]", ["hosts is nested"]),
    ],
)
def test_a_mistake_names_file_and_key(tmp_path, text, fragments):
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse(tmp_path / "a.yaml")
    assert all(fragment in str(caught.value) for fragment in fragments), caught.value


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="nouser"):
        parse(Path("~nouser/a.yaml"))
    with pytest.raises(ConfigError, match="nowhere"):
        parse(tmp_path / "nowhere.yaml")


def test_a_toml_file_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "a.toml").write_text("a = " + "[" * 20_000)
    with pytest.raises(ConfigError, match="--config"):
        parse(tmp_path / "a.toml")
