"""How both commands read their options: what is wrong with one is an error like all others."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from distrib.errors import ConfigError

GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL, where no --grace is given."""

FILE_NAME = re.compile(r"/|\.(txt|hosts|hostfile|list|cfg|conf|ini|ya?ml)$|^(hosts|hostfile)$")
"""Names that are no host's, and no script's, but those of files about hosts."""

_RANKS = "-np N starts N ranks on this machine, -H HOST:N,HOST:N as many on each host"
_HOSTS = "-H FILE or -H HOST,HOST names the hosts, and one launch starts the ranks on all of them"
OTHERS_WORDS = {
    **dict.fromkeys(("nproc-per-node", "nproc", "num-gpus", "gpus", "ntasks", "ntasks-per-node", "num-processes", "ppn", "N"), _RANKS),
    **dict.fromkeys(("nnodes", "nodes", "num-nodes", "num-machines"), _HOSTS),
    **dict.fromkeys(("hostfile", "machinefile", "nodefile", "nodelist", "f"), "-H FILE names the hosts"),
    **dict.fromkeys(("host", "hosts", "w"), "-H HOST:N,HOST:N names the hosts"),
    **dict.fromkeys(("master-addr", "master-port", "node-rank", "machine-rank", "standalone"), "leave it out: the launcher sees to it"),
    **dict.fromkeys(("rdzv-backend", "rdzv-endpoint", "rdzv-id", "rdzv-conf"), "leave it out: the launcher sees to it"),
    "oversubscribe": "-np N on this machine, or slots=N in a hostfile, may be more than there are cores",
    **dict.fromkeys(("map-by", "bind-to", "cpu-bind"), "--bind says which processors a rank may use"),
    "mca": "--interface chooses the network; -x OMPI_MCA_NAME=VALUE sets other parameters of Open MPI",
}  # fmt: skip
"""What takes the place of options of torchrun, mpirun, srun, DeepSpeed and accelerate, which some write with one dash."""


class _OfOthers(argparse.Action):
    """An option of another launcher, with one dash. Argparse would take `-hostfile` for `-h`, and some versions show the help."""

    def __call__(self, parser: Any, namespace: object, values: object, option: str | None = None) -> None:
        parser.refuse([option])


class Parser(argparse.ArgumentParser):
    """Raises ConfigError for wrong options, and takes no abbreviations, which another option may make ambiguous one day."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def _get_option_tuples(self, word: str) -> list[Any]:
        """What `word` may abbreviate: argparse asks of every word with one dash, the script's own among them."""
        return [found for found in super()._get_option_tuples(word) if not isinstance(found[0], _OfOthers)]

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"see {self.prog} --help")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        """As argparse does it; an option without a value, as of a variable that is not set, is never taken for one left out."""
        if "-np" in self._option_string_actions:
            for flag in {f"-{word}" for word in OTHERS_WORDS if len(word) > 1} - self._option_string_actions.keys():
                self.add_argument(flag, action=_OfOthers, nargs=0, dest=argparse.SUPPRESS, help=argparse.SUPPRESS)
        options, unknown = super().parse_known_args(args, namespace)
        for action in self._actions:
            if action.option_strings and getattr(options, action.dest, None) == "" != action.default:
                name = next(flag for flag in action.option_strings if flag.startswith("--"))
                raise ConfigError(f"{name}: it is empty", hint="is a variable not set?")
        return options, unknown

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        """As argparse does it, but for the words on what it does not know."""
        options: argparse.Namespace
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown)
        return options

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Raise for words that are no option of this command, naming one that may have been meant."""
        word = unknown[0].partition("=")[0]
        known = [flag for flag, action in self._option_string_actions.items() if not isinstance(action, _OfOthers)]
        near = difflib.get_close_matches(word, known, n=1)
        perhaps = f"; did you mean {near[0]}?" if near and word.startswith("-") else ""
        if "-np" in self._option_string_actions and word.startswith("-"):
            others = OTHERS_WORDS.get(word.lstrip("-").replace("_", "-"))
            perhaps = f"; {others}" if others else perhaps
        elif (
            "-H" in self._option_string_actions
            and not word.startswith("-")
            and FILE_NAME.search(word.rpartition("/")[2])
        ):
            option = (
                "a topology is named with --topology" if word.endswith(("yaml", "yml")) else "hosts are named with -H"
            )
            perhaps = f"; {option} {word}"
        self.error(f"unrecognized arguments: {' '.join(unknown)}{perhaps}")


class Joined(argparse.Action):
    """An option that may be given several times, each with hosts: all of them count."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        first = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if first is None else f"{first}@{values}")


MOST_DIGITS = 9


def number(what: str, least: int = 1) -> Callable[[str], int]:
    """What reads an option that is a number of `what`."""

    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > MOST_DIGITS or int(text) < least:
            most = f", of at most {MOST_DIGITS} digits" if len(text) > MOST_DIGITS else ""
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number of {what}; give {least} or more{most}")
        return int(text)

    return read


def add_hosts(parser: argparse._ActionsContainer, default: str) -> None:
    """Which hosts, and what they are made of; `default` says which are meant where none are named."""
    parser.add_argument(
        "-H",
        "--hosts",
        action=Once,
        metavar="FILE|LIST",
        help=f"a hostfile, or hosts such as a:2,b:2 (default: {default})",
    )
    parser.add_argument("--topology", metavar="FILE", help="what the hosts are made of (default: the YAML file beside the "
                        "hostfile with its stem)")  # fmt: skip


def add_ssh(parser: argparse._ActionsContainer) -> None:
    """How hosts are reached."""
    parser.add_argument("--ssh-command", metavar="CMD", help="how to reach hosts (default: ssh)")


def add_ways(parser: argparse._ActionsContainer) -> None:
    """The network between hosts, and what reaches and starts them."""
    parser.add_argument("--interface", metavar="NAME|CIDR", help="the network between the hosts, by interface names or "
                        "as 10.0.0.0/16 (default: the best one that all share)")  # fmt: skip
    parser.add_argument(
        "--mpirun", metavar="PATH", help="a site's own Open MPI 5 (default: the one installed with distrib)"
    )
    add_ssh(parser)


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
