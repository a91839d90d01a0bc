"""Starts the jobs: each runs architectures until one of them ends it, and the next job runs the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from coordd_tools.bench.group import Launcher

__all__ = ["GIVEN", "Result", "results"]

GIVEN = ("built", "builder")
_LOOK_SECONDS = 0.2
_TAIL = 2000
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Result:
    """Result of one architecture.

    Attributes:
        name: of the architecture.
        stages: number of stages, one for each rank.
        given: ``built`` or ``builder``.
        outcome: ``match``, or one of ``differs``, ``refused``, ``error`` and ``job failed`` with the message.
        layers: number of layers found; 0 if none.
        way: how the model was captured.
        seconds: to create the pipeline and train.
    """

    name: str
    stages: int
    given: str
    outcome: str
    layers: int = 0
    way: str = ""
    seconds: float = 0.0


def results(names: Sequence[str], stages: Sequence[int], *, seconds: float) -> Iterator[Result]:
    """Yields each result when its architecture has finished.

    Args:
        names: of the architectures.
        stages: each is the number of ranks of a job.
        seconds: time limit for one architecture, after which its job is terminated.
    """
    for size in stages:
        open_ = [(name, given) for name in names for given in GIVEN]
        while open_:
            for result in _job(tuple(open_), size, seconds):
                open_.remove((result.name, result.given))
                yield result


def _job(tasks: Sequence[tuple[str, str]], size: int, seconds: float) -> Iterator[Result]:
    """Yields the results of a job until all tasks are done, or a task kills the job or hangs."""
    with tempfile.TemporaryDirectory(prefix="coordd-architectures-") as directory:
        Path(directory, "tasks.json").write_text(json.dumps(tasks))
        found = Path(directory, "found.jsonl")
        found.touch()
        worker = [sys.executable, "-m", "coordd_tools.architectures.worker", directory]
        command = Launcher.find().command(worker, size=size, cores=len(os.sched_getaffinity(0)))
        log = Path(directory, "log")
        with log.open("w") as stream, _started(command, stream) as process:
            done = 0
            since = time.monotonic()
            while True:
                ended = process.poll() is not None
                lines = found.read_text().splitlines()
                for line in lines[done:]:
                    since = time.monotonic()
                    yield Result(**json.loads(line))
                done = len(lines)
                late = time.monotonic() - since > seconds
                if ended or late:
                    break
                time.sleep(_LOOK_SECONDS)
        if done < len(tasks):
            why = f"nothing came for {seconds:.0f} s" if late else log.read_text()[-_TAIL:]
            yield Result(tasks[done][0], size, tasks[done][1], f"job failed: {why}")


@contextmanager
def _started(command: Sequence[str], stream: IO[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the launcher; on exit, ends it and its ranks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, stdout=stream, stderr=stream) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(_GRACE_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
