"""The command line: ``python -m coordd_tools.bench {allreduce,step,tf,idle,memory,startup,sets,pipeline}``."""

from __future__ import annotations

import argparse
import datetime as dt
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from coordd_tools.bench import allreduce, catalogue, idle, memory, pipeline, sets, startup, step, tf
from coordd_tools.bench.blocks import Block, join
from coordd_tools.bench.document import Document
from coordd_tools.bench.group import GroupError, Launcher, run
from coordd_tools.bench.jobs import (
    SET_SIZES,
    SIZES,
    AllreduceJob,
    IdleJob,
    Job,
    MemoryJob,
    PipelineJob,
    SetsJob,
    StartupJob,
    StepJob,
    TfJob,
)
from coordd_tools.bench.machine import machine, versions
from coordd_tools.bench.progress import Progress
from coordd_tools.bench.tables import render

__all__ = ["main"]

_WIDTH = 90
_BUSY_PERCENT = 10.0
_FEWEST_RANKS = {"sets": 4, "pipeline": 2}
_MODELS = ("gpt", "mlp", "small")
_ALL_MODELS = (*_MODELS, "wide")
_NOUNS: dict[str, ModuleType] = {
    "step": step,
    "tf": tf,
    "allreduce": allreduce,
    "idle": idle,
    "memory": memory,
    "startup": startup,
    "sets": sets,
    "pipeline": pipeline,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one benchmark; returns the exit code, which is not zero if a rank fails."""
    options = _parser().parse_args(arguments)
    errors = Console(stderr=True)
    engines = options.engines or catalogue.defaults(options.noun)
    if gone := catalogue.missing(engines, options.noun):
        errors.print(f"bench: not installed: {', '.join(gone)}; install it, or leave its engine out with --engines")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the ranks end, too
    try:
        document = _measure(options.make(options, engines), options.ranks, errors)
    except GroupError as error:
        errors.print(f"bench: {error}")
        return error.code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    title = f"{options.noun}, {options.ranks} ranks on {document.machine['usable_threads']} cores"
    wide = Console(width=max(_WIDTH, Console().width))  # a narrow terminal may wrap a number, but never crops it
    wide.print(render(document.report, _NOUNS[options.noun].COLUMNS, title=title))
    if options.json:
        document.write(options.json)
    return 0


def _measure(job: Job, ranks: int, errors: Console) -> Document:
    """Runs the groups, one after the other, and builds the document of their results."""
    launcher = Launcher.find()
    started = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    host = machine()
    if host["busy_percent"] > _BUSY_PERCENT:
        errors.print(f"bench: others use {host['busy_percent']:.0f} % of this machine; the figures will be off")
    joined: list[tuple[Block, ...]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Bar(*columns, console=errors, transient=True) as bar:
        groups: Sequence[Job] = job.groups()
        task = bar.add_task(f"{job.noun}: starting", total=len(groups))
        for number, group in enumerate(groups):

            def tell(message: Progress, number: int = number) -> None:
                bar.update(task, completed=number + message.done / message.total, description=message.what)

            joined += join(run(launcher, group, size=ranks, tell=tell))
    return Document(
        command=["python", "-m", "coordd_tools.bench", *sys.argv[1:]],
        started=started,
        ranks=ranks,
        job=job,
        launcher=launcher.version,
        machine=host,
        versions=versions(),
        report=_NOUNS[job.noun].report(joined),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m coordd_tools.bench", description=__doc__)
    nouns = parser.add_subparsers(
        dest="noun", required=True, metavar="{allreduce,step,tf,idle,memory,startup,sets,pipeline}"
    )
    allreduce_ = _noun(nouns, "allreduce", "in-place sums of one tensor, by size", _allreduce_job, rounds=10)
    allreduce_.add_argument("--sizes", type=_sizes, default=SIZES, help="such as 4,64K,16M (bytes; default: 4 to 64M)")
    allreduce_.add_argument("--calls", type=_count, default=0, help="calls a block (default: by size)")
    step_ = _noun(nouns, "step", "training steps of three models", _step_job, rounds=12)
    step_.add_argument("--models", type=_names(_ALL_MODELS), default=_MODELS, help="of " + ",".join(_ALL_MODELS))
    step_.add_argument("--steps", type=_count, default=0, help="steps a block (default: by model)")
    tf_ = _noun(nouns, "tf", "training steps of three models in TensorFlow", _tf_job, rounds=12)
    tf_.add_argument("--models", type=_names(_MODELS), default=_MODELS, help="of " + ",".join(_MODELS))
    tf_.add_argument("--steps", type=_count, default=0, help="steps a block (default: by model)")
    idle_ = _noun(nouns, "idle", "CPU time while nothing is submitted", _idle_job, rounds=3)
    idle_.add_argument("--seconds", type=float, default=10.0, help="how long to watch (default: 10)")
    memory_ = _noun(nouns, "memory", "what exchanging gradients adds to a rank's memory", _memory_job, rounds=2)
    memory_.add_argument(
        "--models", type=_names(_ALL_MODELS), default=("mlp", "wide"), help="of " + ",".join(_ALL_MODELS)
    )
    _noun(nouns, "startup", "time from import to initialised", _startup_job, rounds=5)
    about = "what one process set can do while another one waits for a rank"
    sets_ = _noun(nouns, "sets", about, _sets_job, rounds=20)
    sets_.add_argument("--sizes", type=_sizes, default=SET_SIZES, help="such as 4,64K,16M (bytes; default: 4,4M)")
    sets_.add_argument("--calls", type=_count, default=0, help="calls a block (default: by size)")
    pipeline_ = _noun(nouns, "pipeline", "training steps of a model in stages", _pipeline_job, rounds=6)
    pipeline_.add_argument("--microbatches", type=_count, default=8, help="of a batch of 16 rows (default: 8)")
    pipeline_.add_argument("--steps", type=_count, default=2, help="steps a block (default: 2)")
    return parser


def _noun(
    nouns: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    about: str,
    make: Callable[[argparse.Namespace, tuple[str, ...]], Job],
    *,
    rounds: int,
) -> argparse.ArgumentParser:
    """Adds one benchmark with the arguments that all benchmarks have."""
    parser = nouns.add_parser(name, help=about, description=about)
    parser.set_defaults(make=make)
    known = catalogue.ENGINES[name]
    fewest = _FEWEST_RANKS.get(name, 1)
    usual = max(2, fewest)
    parser.add_argument("-n", "--ranks", type=_at_least(fewest), default=usual, help=f"how many (default: {usual})")
    parser.add_argument("--engines", type=_names(known), help=f"of {','.join(known)} (default: the installed ones)")
    parser.add_argument("--rounds", type=_count, default=rounds, help=f"blocks of each engine (default: {rounds})")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches (default: 0)")
    parser.add_argument("--json", type=_file, metavar="FILE", help="also writes all figures as JSON")
    parser.add_argument("--quick", action="store_true", help="the least that shows it works; the figures mean little")
    return parser


def _step_job(options: argparse.Namespace, engines: tuple[str, ...]) -> Job:
    rounds, steps = (2, 2) if options.quick else (options.rounds, options.steps)
    return StepJob(engines=engines, rounds=rounds, seed=options.seed, models=options.models, steps=steps)


def _tf_job(options: argparse.Namespace, engines: tuple[str, ...]) -> Job:
    rounds, steps = (2, 2) if options.quick else (options.rounds, options.steps)
    return TfJob(engines=engines, rounds=rounds, seed=options.seed, models=options.models, steps=steps)


def _allreduce_job(options: argparse.Namespace, engines: tuple[str, ...]) -> Job:
    rounds, calls = (2, 3) if options.quick else (options.rounds, options.calls)
    return AllreduceJob(engines=engines, rounds=rounds, seed=options.seed, sizes=options.sizes, calls=calls)


def _idle_job(options: argparse.Namespace, engines: tuple[str, ...]) -> Job:
    rounds, seconds = (1, 1.0) if options.quick else (options.rounds, options.seconds)
    return IdleJob(engines=engines, rounds=rounds, seed=options.seed, seconds=seconds)


def _memory_job(options: argparse.Namespace, engines: tuple[str, ...]) -> Job:
    rounds = 1 if options.quick else options.rounds
    return MemoryJob(engines=engines, rounds=rounds, seed=options.seed, models=options.models)


def _startup_job(options: argparse.Namespace, engines: tuple[str, ...]) -> Job:
    return StartupJob(engines=engines, rounds=1 if options.quick else options.rounds, seed=options.seed)


def _sets_job(options: argparse.Namespace, engines: tuple[str, ...]) -> Job:
    rounds, calls = (2, 3) if options.quick else (options.rounds, options.calls)
    return SetsJob(engines=engines, rounds=rounds, seed=options.seed, sizes=options.sizes, calls=calls)


def _pipeline_job(options: argparse.Namespace, engines: tuple[str, ...]) -> Job:
    rounds, steps = (2, 1) if options.quick else (options.rounds, options.steps)
    return PipelineJob(
        engines=engines, rounds=rounds, seed=options.seed, microbatches=options.microbatches, steps=steps
    )


def _names(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """Returns a parser for a list such as ``gpt,mlp``."""

    def read(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(text.split(",")))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; choose of {', '.join(known)}")
        return names

    return read


def _file(text: str) -> Path:
    """Parses the name of the output file; checks now that its folder exists, not after minutes of measuring."""
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"'{path.parent}' is not a folder")
    return path


def _sizes(text: str) -> tuple[int, ...]:
    """Parses a list such as ``4,64K,16M``, in bytes."""
    shifts = {"K": 10, "M": 20, "G": 30}
    sizes = tuple(
        int(size.rstrip("KMG")) << shifts.get(size[-1:], 0) if size.rstrip("KMG").isdigit() else 0
        for size in text.upper().split(",")
    )
    if any(size < 4 or size % 4 for size in sizes):
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of multiples of 4 bytes, such as 4,64K,16M")
    return sizes


def _at_least(fewest: int) -> Callable[[str], int]:
    """Returns a parser for a whole number with a minimum."""

    def read(text: str) -> int:
        if not text.isdigit() or int(text) < fewest:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least {fewest}")
        return int(text)

    return read


_count = _at_least(1)
