"""Help of the commands: `--help` shows the options that most users need, `--help-all` all of them."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn


class CommonHelp(str):
    """Help of an option that `--help` shows too; that of others is a `str` and shown by `--help-all` only."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Formatter of argparse that writes the value once per option and breaks no words at hyphens."""

    def __init__(self, prog: str, **settings: Any) -> None:
        super().__init__(prog, **{"max_help_position": 27, **settings})

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


class _PrintHelp(argparse.Action):
    """Print the whole help and exit."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: object, values: object, option: str | None = None
    ) -> NoReturn:
        parser._print_message(argparse.ArgumentParser.format_help(parser), sys.stdout)
        parser.exit()


def add_help_all(parser: argparse.ArgumentParser) -> None:
    """Add `--help-all`.

    Args:
        parser: Parser of a command with many options.
    """
    parser._option_string_actions["--help"].help = "show the most used options and exit"
    parser.add_argument("--help-all", action=_PrintHelp, nargs=0, dest="help", default=argparse.SUPPRESS,
                        help="show all options and exit")  # fmt: skip


def short_help(parser: argparse.ArgumentParser, examples: str) -> str:
    """Return the usage, examples, and the common options by group.

    Args:
        parser: Parser of the command.
        examples: Indented command lines.
    """
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, [], [])
    formatter.add_text(examples)
    for group in parser._action_groups:
        if common := [action for action in group._group_actions if isinstance(action.help, CommonHelp)]:
            formatter.start_section(group.title)
            formatter.add_arguments(common)
            formatter.end_section()
    formatter.add_text(f"{parser.prog} --help-all lists all {len(_shown(parser._actions))} options.")
    return formatter.format_help()


def _shown(actions: Sequence[argparse.Action]) -> list[argparse.Action]:
    return [action for action in actions if action.option_strings and action.help is not argparse.SUPPRESS]
