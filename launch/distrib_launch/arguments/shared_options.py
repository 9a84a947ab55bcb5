"""Parser of both commands and the option groups that several commands share."""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from types import NoneType
from typing import Any, NoReturn

from distrib.errors import ConfigError
from distrib.utils.ranges import is_whole_number
from distrib_launch.arguments.help_text import CommonHelp, HelpFormatter, add_help_all, short_help
from distrib_launch.host_selection import HostFilter
from distrib_launch.launch_options import HOST_FILE_NAME

_RANKS = "-np N starts N ranks on this machine, -H HOST:N,HOST:N as many on each host"
_HOSTS = "-H FILE or -H HOST,HOST names the hosts, and one launch starts the ranks on all of them"
OTHER_LAUNCHERS = {
    **dict.fromkeys(("nproc-per-node", "nproc", "num-gpus", "ntasks", "num-processes"), _RANKS),
    **dict.fromkeys(("nnodes", "nodes", "num-nodes", "num-machines", "hostfile", "machinefile", "host"), _HOSTS),
    **dict.fromkeys(("master-addr", "master-port", "node-rank", "rdzv-backend", "rdzv-endpoint", "rdzv-id", "standalone"),
                    "leave it out: distrib-launch sets it"),
}  # fmt: skip
"""Hints for options of torchrun, mpirun, srun, DeepSpeed and accelerate."""

OF_SCRIPT = "options for your script go after the script: distrib-launch train.py --epochs 3"

MIN_SIMILARITY = 0.75
"""Least similarity of an unknown option to the suggested one: `--epochs` is no misspelling of `--replicas` (0.67)."""


class Parser(argparse.ArgumentParser):
    """Argument parser that raises ConfigError and accepts no abbreviations, which new options would make ambiguous."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False, formatter_class=HelpFormatter)
        self.examples = ""

    def shorten_help(self, usage: str, examples: str) -> None:
        """Let `--help` show the common options only, and add `--help-all`.

        Args:
            usage: First line of both.
            examples: Indented command lines.
        """
        self.usage, self.examples = usage, examples
        self.epilog = f"examples:\n{examples}\n{self.epilog or ''}"
        add_help_all(self)

    def format_help(self) -> str:
        """Return the text of `--help`."""
        return short_help(self, self.examples) if self.examples else super().format_help()

    def error(self, message: str) -> NoReturn:
        """Raise the error of a command line.

        Args:
            message: Message of argparse.

        Raises:
            ConfigError: Always.
        """
        code = "option-missing" if "required" in message else ""
        what, _, hint = message.removeprefix("argument ").partition("; ")
        raise ConfigError(what, hint=hint or f"see {self.prog} --help", code=code)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [str(choice) for choice in action.choices or ()]
        if choices and value not in (action.choices or ()):
            near = difflib.get_close_matches(str(value), choices, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
            name = "/".join(action.option_strings) or "command"
            raise ConfigError(f"{name} {value}: unknown, expected {', '.join(choices)}", hint=hint)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.option_strings and arg_strings == ["--"]:  # of `-H--`; argparse would drop it and return a list
            raise ConfigError(f"{'/'.join(action.option_strings)}: -- is not a value", hint=f"see {self.prog} --help")
        return super()._get_values(action, arg_strings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:  # type: ignore[override]
        """Parse a command line, and reject empty values, such as those of unset shell variables.

        Args:
            args: Command line without the program's name; None: that of this process.
            namespace: Object that gets the values; None: a new one.

        Returns:
            The options, and the words that are not recognized.

        Raises:
            ConfigError: The command line is not valid.
        """
        options, unknown = super().parse_known_args(args, namespace)
        for action in self._actions:
            if action.option_strings and getattr(options, action.dest, None) == "" != action.default:
                name = next(flag for flag in action.option_strings if flag.startswith("--"))
                raise ConfigError(f"{name}: it is empty", hint="is a variable not set?")
        return options, unknown

    def parse_args(self, args: Any = None, namespace: Any = None) -> argparse.Namespace:  # type: ignore[override]
        """Parse a command line, and suggest a correction for unknown options.

        Args:
            args: Command line without the program's name; None: that of this process.
            namespace: Object that gets the values; None: a new one.

        Raises:
            ConfigError: The command line is not valid.
        """
        options: argparse.Namespace
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown)
        return options

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Raise ConfigError for unknown words, and suggest the most similar option.

        Args:
            unknown: Words that the parser did not recognize.
        """
        word = unknown[0].partition("=")[0]
        hint = ""
        if word.startswith("-"):
            near = difflib.get_close_matches(word, self._option_string_actions, n=1, cutoff=MIN_SIMILARITY)
            hint = f"did you mean {near[0]}?" if near else ""
            if "-np" in self._option_string_actions:
                hint = OTHER_LAUNCHERS.get(word.lstrip("-").replace("_", "-")) or hint or OF_SCRIPT
        elif "-H" in self._option_string_actions and HOST_FILE_NAME.search(word.rpartition("/")[2]):
            is_topology = word.endswith(("yaml", "yml"))
            hint = f"{'a topology is named with --topology' if is_topology else 'hosts are named with -H'} {word}"
        what = f"unrecognized arguments: {' '.join(unknown)}"
        raise ConfigError(what, hint=hint or f"see {self.prog} --help", code="option-unknown")


class _AppendFilter(argparse.Action):
    """Join the values of an option that is given several times."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        first = getattr(namespace, self.dest)
        setattr(namespace, self.dest, values if first is None else f"{first}@{values}")


class _OnlyOnce(argparse.Action):
    """Refuse a second value, which would silently replace the first one."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: object, option: str | None = None
    ) -> None:
        first = getattr(namespace, self.dest)
        if first is not None:
            raise ConfigError(
                f"{option} is given twice, {first} and {values}",
                hint="name all hosts in one list or file: a:2,b:2",
                code="option-conflict",
            )
        setattr(namespace, self.dest, values)


def integer(what: str, minimum: int = 1) -> Callable[[str], int]:
    """Return a converter for the value of an option.

    Args:
        what: Plural noun for the message, such as `ranks`.
        minimum: Smallest accepted value.
    """

    def read(text: str) -> int:
        if not is_whole_number(text) or int(text) < minimum:
            most = ", of at most 9 digits" if len(text) > 9 else ""
            raise argparse.ArgumentTypeError(
                f"{text[:40]!r} is not a valid number of {what}; give {minimum} or more{most}"
            )
        return int(text)

    return read


def option_words(
    parser: argparse.ArgumentParser, options: Mapping[str, Any], source: str, *, excluded: Collection[str] = ()
) -> list[str]:
    """Convert options by name to words of a command line.

    Args:
        parser: Parser of the command.
        options: Values by the options' long names. Booleans for flags, lists for options that may be repeated.
        source: Origin of the options, for messages.
        excluded: Names that the source cannot set.

    Raises:
        ConfigError: A name is not an option, or a value is not of its type.
    """
    known = {flag[2:]: action for flag, action in parser._option_string_actions.items() if flag.startswith("--")}
    words: list[str] = []
    for key, value in options.items():
        name = key.replace("_", "-")
        if name not in known or name in excluded:
            near = difflib.get_close_matches(name, set(known).difference(excluded), n=1)
            but = f", except {', '.join(excluded)}" if excluded else ""
            hint = f"did you mean {near[0]}?" if near else f"its options are those of {parser.prog} --help-all{but}"
            raise ConfigError(f"{source} has no option {key!r}", hint=hint, code="option-unknown")
        action, flag = known[name], f"--{name}"
        if action.nargs == 0:
            if not isinstance(value, (bool, NoneType)):
                raise ConfigError(f"{source}: {key} is {value!r}", hint="write true or false")
            if isinstance(action, argparse.BooleanOptionalAction) and value is not None:
                yes, no = action.option_strings
                words.append(yes if value == (flag == yes) else no)
            elif value:
                words.append(flag)
        elif isinstance(value, Mapping):
            words += [f"{flag}={key}={item}" for key, item in value.items()]
        elif isinstance(value, (list, tuple)):
            words += [f"{flag}={item}" for item in value]
        elif isinstance(value, bool):
            raise ConfigError(
                f"{source}: {key} is {str(value).lower()}", hint=f"write a value, such as {action.metavar}"
            )
        elif value is not None:
            words.append(f"{flag}={os.fspath(value) if isinstance(value, os.PathLike) else value}")
    return words


def accept_old_spelling(parser: argparse._ActionsContainer, old: str, new: str) -> None:
    """Accept the former name of an option without showing it in the help.

    Args:
        parser: Parser or group with the option.
        old: Former name.
        new: Present name.
    """
    parser._option_string_actions[old] = parser._option_string_actions[new]


def add_hosts(parser: argparse._ActionsContainer, default: str) -> None:
    """Add `-H` and `--topology`.

    Args:
        parser: Parser or group.
        default: Hosts that are used without `-H`, as text for the help.
    """
    parser.add_argument("-H", "--hosts", action=_OnlyOnce, metavar="FILE|LIST",
                        help=CommonHelp(f"use the hosts of a hostfile or list, such as a:2,b:2 (default: {default})"))  # fmt: skip
    parser.add_argument("--topology", metavar="FILE", help="read the description of the hosts from FILE (default: the YAML file "
                        "beside the hostfile with the same stem)")  # fmt: skip


def add_host_filter(parser: argparse._ActionsContainer) -> None:
    """Add `--include`, `--exclude` and `--gpu-type`.

    Args:
        parser: Parser or group.
    """
    parser.add_argument("--include", action=_AppendFilter, metavar="HOSTS",
                        help="use only these hosts, slots or GPUs, such as host:0,2@host2@node[3-8]:1")  # fmt: skip
    parser.add_argument(
        "--exclude", action=_AppendFilter, metavar="HOSTS", help="use all but these hosts, slots or GPUs"
    )
    parser.add_argument("--gpu-type", metavar="GPU", help="use only hosts with GPUs of this kind, such as A100")
    accept_old_spelling(parser, "--pool", "--gpu-type")


def host_filter(options: argparse.Namespace) -> HostFilter:
    """Return the values of the options of `add_host_filter`.

    Args:
        options: Parsed options.
    """
    return HostFilter(include=options.include, exclude=options.exclude, gpu_type=options.gpu_type)


def add_ssh(parser: argparse._ActionsContainer) -> None:
    """Add `--ssh-command`.

    Args:
        parser: Parser or group.
    """
    parser.add_argument("--ssh-command", metavar="CMD", help="reach hosts with this command (default: ssh), such as "
                        "'ssh -i KEY'")  # fmt: skip


def add_connection_options(parser: argparse._ActionsContainer) -> None:
    """Add the options for the network between hosts and the programs that reach them.

    Args:
        parser: Parser or group.
    """
    parser.add_argument("--interface", metavar="NAME|CIDR", help="use this network between hosts, by interface name or as "
                        "10.0.0.0/16 (default: the fastest that all hosts share)")  # fmt: skip
    parser.add_argument(
        "--mpirun", metavar="PATH", help="use the site's Open MPI 5 (default: the one installed with distrib)"
    )
    add_ssh(parser)


def add_no_preflight(parser: argparse._ActionsContainer) -> None:
    """Add `--no-preflight`.

    Args:
        parser: Parser or group.
    """
    parser.add_argument(
        "--no-preflight", dest="preflight", action="store_false", help="start without checking the hosts"
    )
    accept_old_spelling(parser, "--no-check", "--no-preflight")


def fraction(text: str) -> float:
    """Convert `80%`, `80` or `0.8` to 0.8.

    Args:
        text: Value of an option.

    Raises:
        argparse.ArgumentTypeError: The text is not a number from 0 to 100 %.
    """
    number, percent, rest = text.strip().partition("%")
    try:
        value = float(number) if number.isascii() and len(number) < 12 else -1.0
    except ValueError:
        value = -1.0
    value /= 100 if percent or value > 1 else 1
    if rest or not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid percentage; write such as 80%")
    return value
