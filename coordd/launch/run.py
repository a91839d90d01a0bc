"""`coordd run`: runs a job as the options say, and returns its exit code."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from coordd.config import Config
from coordd.host.cores import cores_here
from coordd.launch import horovodrun
from coordd.launch.build import build
from coordd.launch.job import Job, Program
from coordd.launch.logs import Logs
from coordd.launch.mpi_flavours import OPEN_MPI
from coordd.launch.plan import Plan
from coordd.launch.recordings import Recordings
from coordd.launch.scratch import scratch
from coordd.launch.screen import Screen, Sink

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Runs `coordd run`; returns the exit code.

    Raises:
        ConfigError: the options are invalid.
        LauncherError: no launcher can start that many ranks.
        OSError: the launcher cannot be started, or the output cannot be written.
    """
    if horovodrun.asks_for_build(options):
        sys.stdout.write(build())
        return 0
    plan = Plan.of(options, os.environ, cores_here())
    if options.dry_run:
        sys.stdout.write(f"{plan}\n")
        return 0
    with ExitStack() as stack:
        logs = Logs(options.output_dir) if options.output_dir else None
        if logs:
            stack.callback(logs.close)
        screen = Screen(_sink(sys.stdout), _sink(sys.stderr), prefix=options.prefix, logs=logs)
        job = Job(_program(plan, stack), size=plan.size, screen=screen, grace=options.grace_seconds)
        for note in plan.notes:
            job.note(note)
        folder = Config.load(plan.program.environment).timeline
        recordings = Recordings(Path(folder)) if folder else None
        verdict = job.run()
        if recordings and (told := recordings.unmerged() if verdict.hurried else recordings.merged()):
            job.note(told)
        if verdict.text:
            screen.say(f"coordd: {verdict.text}")
        return verdict.status


def _program(plan: Plan, stack: ExitStack) -> Program:
    """Returns the program to start; on this host Open MPI gets its own folders, removed when the stack closes."""
    program = plan.program
    if program.flavour is not OPEN_MPI or not plan.local:
        return program
    variables = stack.enter_context(scratch(program.environment))
    return dataclasses.replace(program, environment={**program.environment, **variables})


def _sink(file: TextIO) -> Sink:
    terminal = file.isatty()
    colour = terminal and "NO_COLOR" not in os.environ
    return Sink(file.buffer, terminal=terminal, colour=colour, columns=shutil.get_terminal_size().columns)
