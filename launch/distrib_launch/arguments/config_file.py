"""Option `--config`: a TOML or YAML file whose keys are option names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distrib.cluster.yaml_loader import parse_yaml
from distrib.errors import ConfigError, TopologyError
from distrib_launch.arguments.help_text import CommonHelp
from distrib_launch.arguments.shared_options import Parser, option_words

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NOT_IN_FILES = ("help", "version", "config")


def add_config_option(parser: argparse._ActionsContainer) -> None:
    """Add `--config`.

    Args:
        parser: Parser or group.
    """
    parser.add_argument("--config", metavar="FILE", help=CommonHelp("read options from FILE, such as job.toml or job.yaml"))  # fmt: skip


def parse_with_config(parser: Parser, words: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line together with the file of its option `--config`.

    Args:
        parser: Parser of the command.
        words: Command line without the program's name; None: that of this process.

    Raises:
        ConfigError: The command line or the file is not valid.
    """
    words = sys.argv[1:] if words is None else words
    given = parser.parse_args(words)
    if not given.config:
        return given
    actions = {name: action for action in parser._actions for name in action.option_strings}
    options = {}
    for key, value in _read_config(given.config).items():
        name = str(key).replace("_", "-")
        action = actions.get(f"--{name}")
        is_given = action is not None and getattr(given, action.dest) != action.default
        # The command line wins, except over options that may be repeated.
        if not is_given or isinstance(action, argparse._AppendAction) or name in _NOT_IN_FILES:
            options[name] = value
    return parser.parse_args([*option_words(parser, options, given.config, excluded=_NOT_IN_FILES), *words])


def _read_config(path: str) -> Mapping[str, Any]:
    is_toml = path.endswith(".toml")
    hint = f"write one {'option = value' if is_toml else 'option: value'} per line"
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        content = tomllib.loads(text) if is_toml else parse_yaml(text, path).data
    except OSError as error:
        raise ConfigError(
            f"--config {path}: {error.strerror}", hint="name an existing file", code="config-file"
        ) from None
    except TopologyError as error:
        raise ConfigError(f"--config {error.what}", hint=hint, code="config-file") from None
    except (ValueError, RuntimeError) as error:  # of deep nesting, or of ~ without a home
        raise ConfigError(f"--config {path}: {error}", hint=hint, code="config-file") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: it has no options", hint=hint, code="config-file")
    for key, value in content.items():
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if any(isinstance(item, (list, dict)) for item in items):  # aliases can make nested ones endless
            raise ConfigError(
                f"--config {path}: {key} is nested, expected one value or a list", hint=hint, code="config-file"
            )
    return content
