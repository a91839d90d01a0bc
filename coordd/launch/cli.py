"""The command line: `coordd run`, `tune`, `plan`, `status`, `timeline`, `doctor`, `drop-in-path` and `version`."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Collection, Sequence
from functools import partial
from typing import NoReturn

from coordd.errors import ConfigError, CoorddError
from coordd.launch.drop_in import FOLDER
from coordd.launch.options import EPILOG, add_options, joined, seconds
from coordd.launch.planning import PLAN_EPILOG, add_plan_options, plan
from coordd.launch.run import run
from coordd.launch.timeline import TIMELINE_EPILOG, add_timeline_options, timeline
from coordd.launch.tune import TUNE_EPILOG, add_tune_options, tune
from coordd.version import VERSION

__all__ = ["main"]

_ABOUT = "A background coordination daemon for distributed training."
_FAILED, _MISUSED, _INTERRUPTED = 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code.

    Args:
        arguments: without the program's name; by default those of this process.
    """
    words = sys.argv[1:] if arguments is None else arguments
    parser, commands = _parser()
    if words and words[0] not in commands and not words[0].startswith("-"):
        _refuse(parser, words[:1], commands)
    options, unknown = parser.parse_known_args(joined(words))
    if unknown:
        flags = [flag for action in options.parser._actions for flag in action.option_strings]  # noqa: SLF001
        _refuse(options.parser, unknown, flags)
    try:
        return int(options.action(options))
    except ConfigError as error:
        return _complain(error, _MISUSED)
    except (CoorddError, OSError) as error:
        return _complain(error, _FAILED)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _complain(error: Exception, status: int) -> int:
    sys.stderr.write(f"coordd: {error}\n")
    return status


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str], known: Collection[str]) -> NoReturn:
    """Exits with the usage and the closest known words."""
    near = [word for one in unknown for word in difflib.get_close_matches(one.partition("=")[0], known, n=1)]
    parser.error(f"there is no {' '.join(unknown)}" + (f"; did you mean {' '.join(near)}?" if near else ""))


def _parser() -> tuple[argparse.ArgumentParser, Collection[str]]:
    """Returns the parser, and the names of the commands."""
    parser = argparse.ArgumentParser(prog="coordd", description=_ABOUT, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"coordd {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    start = commands.add_parser(
        "run",
        help="start a command on several ranks",
        usage="coordd run -n N [options] command [arguments]",
        description="Starts a command once per rank, shows its output, and ends all ranks when one fails.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_options(start)
    start.set_defaults(action=run, parser=start)
    search = commands.add_parser(
        "tune",
        help="search for faster settings, and show what was tried",
        usage="coordd tune -n N [options] command [arguments]\n       coordd tune --show [FILE]",
        description="Runs a command as 'coordd run' does, with autotune on and every step free for trials.",
        epilog=TUNE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_tune_options(search)
    search.set_defaults(action=tune, parser=search)
    _add_plan(commands)
    _add_status(commands)
    look = commands.add_parser(
        "timeline",
        help="say where the time of a step went",
        description="Makes one file of what all ranks have recorded, and says where the time of a step went.",
        epilog=TIMELINE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_timeline_options(look)
    look.set_defaults(action=timeline, parser=look)
    check = commands.add_parser(
        "doctor",
        help="tell what is installed, and try it",
        description="Tells what this machine has for coordd, and runs a self-test on two ranks.",
        allow_abbrev=False,
    )
    check.add_argument("--json", action="store_true", help="print the findings as JSON")
    check.set_defaults(action=_doctor, parser=check)
    path = commands.add_parser(
        "drop-in-path",
        help="tell the folder to put on PYTHONPATH for scripts that import horovod, under mpirun or srun",
        allow_abbrev=False,
    )
    path.set_defaults(action=_drop_in_path, parser=path)
    version = commands.add_parser("version", help="tell the version")
    version.set_defaults(action=_version, parser=version)
    return parser, commands.choices


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    ahead = commands.add_parser(
        "plan",
        help="work out what a pipeline's schedule costs, and draw it",
        description="Simulates a schedule of a pipeline: how long a step takes, who is idle, what is kept in memory.",
        epilog=PLAN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_plan_options(ahead)
    ahead.set_defaults(action=plan, parser=ahead)


def _add_status(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    look = commands.add_parser(
        "status",
        help="show what a running job is doing",
        description="Asks a running job of yours, also one that hangs, what each rank waits for.",
        allow_abbrev=False,
    )
    look.add_argument(
        "job",
        nargs="?",
        default="",
        metavar="PID|JOB",
        help="a rank, what has started it, or the job's name; default: the only job here",
    )
    look.add_argument("--json", action="store_true", help="print everything as JSON")
    look.add_argument("--threads", action="store_true", help="show threads that wait for work, too")
    look.add_argument(
        "--watch",
        nargs="?",
        type=partial(seconds, least=0.1),
        const=1.0,
        metavar="SECONDS",
        help="look again and again until the job ends; default: every second",
    )
    look.set_defaults(action=_status, parser=look)


def _status(options: argparse.Namespace) -> int:
    from coordd.launch.status import status  # as below

    return status(options)


def _doctor(options: argparse.Namespace) -> int:
    from coordd.launch.doctor import doctor  # rich takes longer to import than a job to start

    return doctor(options)


def _drop_in_path(_: argparse.Namespace) -> int:
    sys.stdout.write(f"{FOLDER}\n")
    return 0


def _version(_: argparse.Namespace) -> int:
    sys.stdout.write(f"coordd {VERSION}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
