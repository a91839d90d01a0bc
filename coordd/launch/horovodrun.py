"""The flags of ``horovodrun`` that coordd calls otherwise, for job scripts that have them.

Each sets the variable that horovodrun sets, so that what has no meaning here is explained where variables are; or it
sets an option of ours; or it is for ssh; or it is left aside with a note, or refused by a sentence that says what to
use. All of them need ``--as-horovod``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordd.config import knobs
from coordd.errors import ConfigError

__all__ = ["FLAGS", "Flag", "add_flags", "as_horovod", "asks_for_build", "notes", "ssh_words", "variables"]


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        names: as horovodrun has them.
        variable: what it sets; with ``value``, or with what the user gives.
        value: what a switch sets.
        convert: turns the user's value into the variable's.
        option: the path of ours that it sets.
        ssh: what ssh calls it.
        note: what to say when it is left aside.
        why: why it is refused, and what to use.
        takes: how many values follow.
    """

    names: tuple[str, ...]
    variable: str = ""
    value: str = ""
    convert: Callable[[str], str] = str
    option: str = ""
    ssh: str = ""
    note: str = ""
    why: str = ""
    takes: int = 1


def _bytes(megabytes: str) -> str:
    return str(round(float(megabytes) * (1 << 20)))


def _port(number: str) -> str:
    if not (number.isdecimal() and 0 < int(number) < 1 << 16):
        raise ValueError(number)
    return number


def _switch(name: str, variable: str) -> tuple[Flag, Flag]:
    return Flag((f"--{name}",), variable, "1", takes=0), Flag((f"--no-{name}",), variable, "0", takes=0)


_CHECK_BUILD = "--check-build"
_OWN_TRANSPORT = "coordd chooses the transport itself; --transport names one"
_SAME_RANKS = "the ranks of a job stay the same: give -n, save checkpoints, and start the job anew when it has failed"

FLAGS = (
    Flag(("--fusion-threshold-mb",), "HOROVOD_FUSION_THRESHOLD", convert=_bytes),
    Flag(("--cycle-time-ms",), "HOROVOD_CYCLE_TIME"),
    Flag(("--timeline-filename",), "HOROVOD_TIMELINE"),
    *_switch("timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES"),
    Flag(("--stall-check-warning-time-seconds",), "HOROVOD_STALL_CHECK_TIME_SECONDS"),
    Flag(("--stall-check-shutdown-time-seconds",), "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"),
    Flag(("--autotune-log-file",), "HOROVOD_AUTOTUNE_LOG"),
    Flag(("--autotune-warmup-samples",), "HOROVOD_AUTOTUNE_WARMUP_SAMPLES"),
    Flag(("--autotune-steps-per-sample",), "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE"),
    Flag(("--autotune-bayes-opt-max-samples",), "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES"),
    Flag(("--autotune-gaussian-process-noise",), "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE"),
    *_switch("hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE"),
    *_switch("hierarchical-allgather", "HOROVOD_HIERARCHICAL_ALLGATHER"),
    *_switch("torus-allreduce", "HOROVOD_TORUS_ALLREDUCE"),
    *_switch("mpi-threads-disable", "HOROVOD_MPI_THREADS_DISABLE"),
    Flag(("--num-nccl-streams",), "HOROVOD_NUM_NCCL_STREAMS"),
    Flag(("--thread-affinity",), "HOROVOD_THREAD_AFFINITY"),
    Flag(("--start-timeout",), "HOROVOD_START_TIMEOUT"),
    Flag(("--gloo-timeout-seconds",), "HOROVOD_GLOO_TIMEOUT_SECONDS"),
    Flag(("--network-interface", "--network-interfaces"), "HOROVOD_GLOO_IFACE"),
    Flag(("--verbose",), "HOROVOD_LOG_LEVEL", "info", takes=0),
    Flag(("--output-filename",), option="output_dir"),
    Flag(("-hostfile",), option="hostfile"),
    # What coordd does anyhow, or has nothing to do for.
    Flag(("--disable-cache", "--log-with-timestamp", "--log-without-timestamp"), takes=0),
    Flag(("--mpi", "--gloo"), note=_OWN_TRANSPORT, takes=0),
    Flag((_CHECK_BUILD, "-cb"), takes=0),
    Flag(("--ssh-port", "-p"), ssh="-p", convert=_port),
    Flag(("--ssh-identity-file", "-i"), ssh="-i"),
    Flag(("--jsrun",), why="give --launcher the path of an mpirun, mpiexec or srun", takes=0),
    Flag(("--tcp",), why="say it to your MPI, as in --mpi-args '--mca btl tcp,self'", takes=0),
    Flag(("--binding-args",), why="coordd binds ranks itself; --no-bind leaves that to your MPI and --mpi-args"),
    Flag(("--config-file",), why="give flags, or set COORDD_* variables"),
    Flag(("--version", "-v"), why="'coordd --version' tells it", takes=0),
    Flag(("--prefix-timestamp", "-prefix-timestamp"), why="pipe the output through a program such as ts", takes=0),
    Flag(("--slots-per-host", "--slots"), why="say it behind the host, as in --hosts a:4,b:4"),
    Flag(("--min-np", "--min-num-proc", "--max-np", "--max-num-proc"), why=_SAME_RANKS),
    Flag(("--host-discovery-script", "--elastic-timeout", "--reset-limit"), why=_SAME_RANKS),
    Flag(("--blacklist-cooldown-range",), why=_SAME_RANKS, takes=2),
)
"""Those of ``horovodrun``, but for what `coordd run` calls alike: -np, -H, --hostfile, --mpi-args, --autotune."""


class _Said(argparse.Action):
    """Notes that a flag was said, and as what; a path is put where ours is."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - argparse's signature
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        flag: Flag = self.const
        namespace.horovodrun = (*namespace.horovodrun, (option_string, flag, values))
        if flag.option:
            setattr(namespace, flag.option, Path(values))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds all flags that no knob has for its own; the help, which is long enough, does not show them."""
    own = {flag for knob in knobs() for flag in (knob.flag, knob.flag.replace("--", "--no-", 1))}
    parser.set_defaults(horovodrun=())
    for flag in FLAGS:
        if names := [name for name in flag.names if name not in own]:
            count = None if flag.takes == 1 else flag.takes
            parser.add_argument(
                *names, dest="horovodrun", action=_Said, const=flag, nargs=count, default=(), help=argparse.SUPPRESS
            )


def as_horovod(options: argparse.Namespace) -> bool:
    """Says whether ``--as-horovod`` was given; it is a knob, whose value ranks get like that of any other."""
    return bool(options.as_horovod == "1")


def variables(options: argparse.Namespace) -> dict[str, str]:
    """Turns the flags that were given into environment variables.

    Raises:
        ConfigError: ``--as-horovod`` was not given, or a flag is refused, or its value cannot be read.
    """
    found = {}
    for word, flag, given in options.horovodrun:
        if not as_horovod(options):
            text = f"{word} is a flag of horovodrun: give --as-horovod too, or what 'coordd run --help' has for it"
            raise ConfigError(text)
        if flag.why:
            raise ConfigError(f"{word} is a flag of horovodrun that coordd refuses: {flag.why}")
        if flag.variable:
            found[flag.variable] = flag.value or _converted(word, flag, given)
    return found


def notes(options: argparse.Namespace) -> tuple[str, ...]:
    """Tells of the flags that were given for nothing: one sentence each."""
    return tuple(f"{word}: {flag.note}" for word, flag, _ in options.horovodrun if flag.note)


def ssh_words(options: argparse.Namespace) -> list[str]:
    """Lists what was given for ssh, as ssh has it.

    Raises:
        ConfigError: a value cannot be read.
    """
    given = [(word, flag, value) for word, flag, value in options.horovodrun if flag.ssh]
    return [text for word, flag, value in given for text in (flag.ssh, _converted(word, flag, value))]


def asks_for_build(options: argparse.Namespace) -> bool:
    """Whether nothing is to be run, and only to be told what could be.

    Raises:
        ConfigError: like `variables`.
    """
    variables(options)
    return any(_CHECK_BUILD in flag.names for _, flag, _ in options.horovodrun)


def _converted(word: str, flag: Flag, given: str) -> str:
    try:
        return flag.convert(given)
    except ValueError as error:
        legal = "a port, from 1 to 65535" if flag.ssh else "a number"
        raise ConfigError.illegal(word, given, legal) from error
