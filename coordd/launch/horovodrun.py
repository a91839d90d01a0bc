"""The flags of ``horovodrun`` that have other names in coordd, for existing job scripts.

A flag either sets the environment variable that horovodrun sets (so the configuration explains variables without
effect), sets an option of `coordd run`, is passed to ssh, is ignored with a note, or is refused with a sentence that
says what to use. All of them need ``--as-horovod``.
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
    """One flag of ``horovodrun``.

    Attributes:
        names: horovodrun's names of the flag.
        variable: environment variable that it sets, to ``value`` or to the user's value.
        value: value that a switch sets.
        convert: converts the user's value to the variable's.
        option: name of the path option of `coordd run` that it sets.
        ssh: ssh's name of the flag.
        note: note that is printed when the flag is ignored.
        why: reason why the flag is refused, and what to use instead.
        takes: number of values that follow.
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
    # Flags that ask for what coordd does anyway, or that need no action.
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
"""The flags of ``horovodrun``, except those that `coordd run` has too: -np, -H, --hostfile, --mpi-args, --autotune."""


class _Said(argparse.Action):
    """Records a given flag with its name and values; a flag with an ``option`` sets that option to the path."""

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
    """Adds all flags whose names no knob uses; the help, which is long enough, does not list them."""
    own = {flag for knob in knobs() for flag in (knob.flag, knob.flag.replace("--", "--no-", 1))}
    parser.set_defaults(horovodrun=())
    for flag in FLAGS:
        if names := [name for name in flag.names if name not in own]:
            count = None if flag.takes == 1 else flag.takes
            parser.add_argument(
                *names, dest="horovodrun", action=_Said, const=flag, nargs=count, default=(), help=argparse.SUPPRESS
            )


def as_horovod(options: argparse.Namespace) -> bool:
    """Returns whether ``--as-horovod`` was given; it is a knob, whose value is passed to ranks like any other."""
    return bool(options.as_horovod == "1")


def variables(options: argparse.Namespace) -> dict[str, str]:
    """Converts the given flags to environment variables.

    Raises:
        ConfigError: ``--as-horovod`` was not given, a flag is refused, or its value cannot be parsed.
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
    """Returns one sentence for each given flag that is ignored."""
    return tuple(f"{word}: {flag.note}" for word, flag, _ in options.horovodrun if flag.note)


def ssh_words(options: argparse.Namespace) -> list[str]:
    """Returns the ssh arguments for the given flags.

    Raises:
        ConfigError: a value cannot be parsed.
    """
    given = [(word, flag, value) for word, flag, value in options.horovodrun if flag.ssh]
    return [text for word, flag, value in given for text in (flag.ssh, _converted(word, flag, value))]


def asks_for_build(options: argparse.Namespace) -> bool:
    """Returns whether ``--check-build`` was given, which only prints a report and runs no job.

    Raises:
        ConfigError: as for `variables`.
    """
    variables(options)
    return any(_CHECK_BUILD in flag.names for _, flag, _ in options.horovodrun)


def _converted(word: str, flag: Flag, given: str) -> str:
    try:
        return flag.convert(given)
    except ValueError as error:
        legal = "a port, from 1 to 65535" if flag.ssh else "a number"
        raise ConfigError.illegal(word, given, legal) from error
