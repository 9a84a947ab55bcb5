"""Shell completion of both commands, through argcomplete: bash, zsh and fish."""

from __future__ import annotations

import argparse
import os


def is_completing() -> bool:
    """Return True if a shell runs the command to complete a line."""
    return "_ARGCOMPLETE" in os.environ


def complete_words(parser: argparse.ArgumentParser) -> None:
    """Print the completions of the current command line and exit, if a shell asks for them.

    Args:
        parser: Parser of the command.
    """
    if is_completing():
        import argcomplete  # only a shell that completes a line needs it

        argcomplete.autocomplete(parser)
