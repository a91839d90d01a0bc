"""The options of `coordd run`.

One rule: options end where the user's command begins; all later arguments belong to the command. The options of knobs
are derived from `coordd.config`, so a new knob needs no change here.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from coordd.config import Knob, knobs
from coordd.errors import ConfigError
from coordd.launch import horovodrun
from coordd.launch.hosts import Host, read_hostfile, read_hosts

__all__ = ["EPILOG", "add_options", "command_of", "extra_of", "hosts_of", "joined", "knob_variables", "seconds"]

EPILOG = """\
examples:
  coordd run -n 4 python train.py --epochs 3
  coordd run -n 8 -H node1:4,node2:4 python train.py
  coordd run --fusion-mb 64 -n 2 --output-dir logs python train.py
  coordd run --as-horovod -n 2 python train.py     a script that says 'import horovod.torch as hvd'

The exit code is that of the rank that failed first (128 + the signal's number if a signal ended it), 130 after Ctrl-C,
and 143 after SIGTERM.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds all options and the command to the parser."""
    _add_ranks(parser.add_argument_group("ranks"))
    _add_output(parser.add_argument_group("output"))
    _add_launcher(parser.add_argument_group("launcher"))
    group = parser.add_argument_group("knobs", "settings of the daemon, passed on to every rank")
    for knob in knobs():
        _add_knob(group, knob)
    horovodrun.add_flags(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program to run on every rank, and its arguments")


def joined(arguments: Sequence[str]) -> list[str]:
    """Joins ``--mpi-args`` and its value with ``=``, because the value usually begins with a dash like an option."""
    words = list(arguments)
    if "--mpi-args" in words[:-1]:
        place = words.index("--mpi-args")
        words[place : place + 2] = [f"--mpi-args={words[place + 1]}"]
    return words


def knob_variables(options: argparse.Namespace) -> dict[str, str]:
    """Converts the given knobs to environment variables.

    Raises:
        ConfigError: a value is not legal.
    """
    given: Mapping[str, str] = {knob.name: getattr(options, knob.name) for knob in knobs()}
    variables = {}
    for knob in knobs():
        if (text := given[knob.name]) is not None:
            knob.parse(text, source=knob.flag)
            variables[knob.variable] = text
    return variables


def hosts_of(options: argparse.Namespace) -> tuple[Host, ...]:
    """Returns the hosts of ``--hosts`` or ``--hostfile``; an empty result means that the MPI launcher decides.

    Raises:
        ConfigError: the hosts cannot be parsed.
    """
    if options.hosts is not None:
        return read_hosts(options.hosts)
    return read_hostfile(options.hostfile) if options.hostfile else ()


def command_of(options: argparse.Namespace) -> list[str]:
    """Returns the user's command.

    Raises:
        ConfigError: no command was given.
    """
    command = list(options.command)
    if command[:1] == ["--"]:
        del command[0]
    if not command:
        raise ConfigError("nothing to run: put the command after the options, as in 'coordd run -n 2 python train.py'")
    return command


def extra_of(options: argparse.Namespace) -> tuple[str, ...]:
    """Splits the value of ``--mpi-args`` as a shell would.

    Raises:
        ConfigError: a quote is not closed.
    """
    try:
        return tuple(shlex.split(options.mpi_args))
    except ValueError as error:
        raise ConfigError.illegal("--mpi-args", options.mpi_args, f"words as in a shell ({error})") from error


def _add_ranks(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-n", "-np", "--num-proc", dest="size", type=_count, metavar="N", help="number of ranks")
    where = group.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOSTS", help="hosts and ranks on each, such as a:4,b:4")
    where.add_argument("--hostfile", type=Path, metavar="FILE", help="the same, one 'a slots=4' or 'a:4' a line")
    group.add_argument(
        "--threads", type=_count, default=0, metavar="N", help="threads of each rank; default: its share of the cores"
    )
    group.add_argument("--no-bind", dest="bind", action="store_false", help="do not bind ranks to their share of cores")
    group.add_argument(
        "-x",
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="forward one more variable to other hosts, or set it",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--no-prefix", dest="prefix", action="store_false", help="no '[rank]' before each line")
    group.add_argument("--output-dir", type=Path, metavar="DIR", help="also write rank.<r>.log for each rank there")


def _add_launcher(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--launcher", default="auto", metavar="NAME", help="auto (default), srun, or the path of an mpirun or mpiexec"
    )
    group.add_argument("--mpi-args", default="", metavar="ARGS", help="more arguments for the launcher, in one word")
    group.add_argument(
        "--grace-seconds",
        type=seconds,
        default=5.0,
        metavar="S",
        help="time for ranks to end after Ctrl-C or SIGTERM before they are killed (default: 5)",
    )
    group.add_argument(
        "--dry-run", "--print-command", action="store_true", help="print the launcher's command line and do nothing"
    )


def _add_knob(group: argparse._ArgumentGroup, knob: Knob) -> None:
    about = f"{knob.about} (default: {_written(knob.default)})".replace("%", "%%")
    if knob.kind is bool:
        group.add_argument(knob.flag, dest=knob.name, action="store_const", const="1", help=about)
        opposite, about = knob.flag.replace("--", "--no-", 1), f"the opposite of {knob.flag}"
        group.add_argument(opposite, dest=knob.name, action="store_const", const="0", help=about)
    else:
        metavar = "{" + ",".join(knob.choices) + "}" if knob.choices else knob.kind.__name__.upper()
        group.add_argument(knob.flag, dest=knob.name, metavar=metavar, help=about)


def _written(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    if default is None or default == "":
        return "empty"
    return f"{default:g}" if isinstance(default, float) else str(default)


def _count(text: str) -> int:
    if text.isdecimal() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")


def seconds(text: str, *, least: float = 0.0) -> float:
    """Parses a number of seconds, at most a day.

    Raises:
        argparse.ArgumentTypeError: the text is not a number, or is below ``least`` or above a day.
    """
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not least <= number <= 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from {least:g} to 86400")
    return number
