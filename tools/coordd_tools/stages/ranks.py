"""Starts ranks that run one task, and reads their result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordd_tools.bench.group import GroupError, Launcher

__all__ = ["Outcome", "attempt", "run"]

_LIMIT_SECONDS = 900.0


@dataclass(frozen=True)
class Outcome:
    """The result of a task: the exit code, its stderr, and rank 0's result, None if it wrote none."""

    code: int
    said: str
    found: Any


def attempt(
    task: str, size: int, settings: Mapping[str, Any], *, variables: Mapping[str, str] | None = None
) -> Outcome:
    """Runs a task on ranks; it may fail.

    Args:
        task: the name of a module of `coordd_tools.stages.worker`.
        size: the number of ranks; a single one is started without a launcher.
        settings: arguments of the task; ``data_limit`` is the most bytes of memory that each rank may have.
        variables: added to the environment.
    """
    with tempfile.TemporaryDirectory(prefix="coordd-stages-") as directory:
        Path(directory, "settings.json").write_text(json.dumps(settings))
        worker = [sys.executable, "-m", "coordd_tools.stages.worker", task, directory]
        if size > 1:
            worker = Launcher.find().command(worker, size=size, cores=len(os.sched_getaffinity(0)))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
        ran = subprocess.run(
            worker, env=environment, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
        )
        found = Path(directory, "found.json")
        return Outcome(ran.returncode, ran.stderr, json.loads(found.read_text()) if found.exists() else None)


def run(task: str, size: int, settings: Mapping[str, Any], *, variables: Mapping[str, str] | None = None) -> Any:
    """Runs a task on ranks and returns its result.

    Raises:
        GroupError: a rank failed; the text ends with the task's stderr.
    """
    outcome = attempt(task, size, settings, variables=variables)
    if outcome.code:
        raise GroupError(f"{task} on {size} ranks exited with {outcome.code}:\n{outcome.said}", code=outcome.code)
    return outcome.found
