"""`coordd tune`: a run whose steps may all be autotune trials, followed by a report; or only the report."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from coordd.config import Config
from coordd.errors import ConfigError
from coordd.launch.options import add_options
from coordd.launch.run import run

__all__ = ["TUNE_EPILOG", "add_tune_options", "tune"]

TUNE_EPILOG = """\
examples:
  coordd tune -n 4 python train.py           search until nothing faster turns up, then train on
  coordd tune -n 4 --steps 500 python train.py
  coordd tune --show                         what the last search tried

What was found is kept; later runs with --autotune begin with it. Ctrl-C ends the run, and keeps what was measured.
"""
_NEWEST = Path()
_NOTHING = (
    "the run wrote no autotune record: it has to train with a DistributedOptimizer for some fifty steps at least; "
    "looked in"
)


def add_tune_options(parser: argparse.ArgumentParser) -> None:
    """Adds all options and the command to the parser."""
    group = parser.add_argument_group("search")
    group.add_argument(
        "--steps", dest="autotune_steps", metavar="N", help="training steps for the search; then train on"
    )
    group.add_argument(
        "--show",
        nargs="?",
        type=Path,
        const=_NEWEST,
        metavar="FILE",
        help="run nothing, show the last search or the record in FILE",
    )
    group.add_argument("--html", type=Path, metavar="FILE", help="where the picture goes; default: beside the record")
    add_options(parser)
    parser.set_defaults(autotune="1", autotune_share="1")


def tune(options: argparse.Namespace) -> int:
    """Runs `coordd tune`; returns the exit code of the run.

    Raises:
        ConfigError: the options are invalid, Optuna is not installed, or there is no record to show.
        RecordError: the record to show is not usable.
        LauncherError: no launcher can start that many ranks.
        OSError: the launcher cannot be started, or the picture cannot be written.
    """
    if options.show is not None:
        _show(_last() if options.show == _NEWEST else options.show, options.html)
        return 0
    from coordd.tuning.proposals import require_optuna
    from coordd.tuning.record import latest, written

    require_optuna()
    where = _where(options)
    before = written(where)
    status = run(options)
    if options.dry_run:
        return status
    path = latest(written(where), before)
    if path is None:
        sys.stderr.write(f"coordd: {_NOTHING} {where}\n")
        return status or 1
    _show(path, options.html)
    return status


def _where(options: argparse.Namespace) -> Path:
    """Returns the path of the record that the run will write, or the folder in which it will write one."""
    from coordd.tuning.record import folder

    chosen = Config.load(os.environ, autotune_log=options.autotune_log).autotune_log
    return Path(chosen) if chosen else folder(os.environ)


def _last() -> Path:
    from coordd.tuning.record import folder, latest, written

    where = folder(os.environ)
    if (path := latest(written(where), {})) is None:
        raise ConfigError(f"no search is recorded in {where}: run 'coordd tune -n 2 python train.py' first")
    return path


def _show(path: Path, html: Path | None) -> None:
    """Prints a record and writes the HTML page."""
    from rich.console import Console

    from coordd.tuning.picture import page
    from coordd.tuning.record import Record
    from coordd.tuning.terminal import show

    record = Record.load(path)
    target = html or path.with_suffix(".html")
    target.write_text(page(record), "utf-8")
    console = Console(highlight=False)
    show(record, console)
    console.print(f"\nthe picture: {target.resolve().as_uri()}\nthe record:  {path}", soft_wrap=True, markup=False)
