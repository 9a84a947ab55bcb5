"""How both commands read their options: what is wrong with one is an error like all others."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from distrib.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Raises ConfigError for wrong options, and takes no abbreviations, which another option may make ambiguous one day."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"see {self.prog} --help")


class Once(argparse.Action):
    """An option whose second value would take the place of the first, where people mean both."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        first = getattr(namespace, self.dest)
        if first is not None:
            raise ConfigError(
                f"{option} is given twice, {first} and {values}", hint="name all hosts in one list or file: a:2,b:2"
            )
        setattr(namespace, self.dest, values)
