"""Folders for Open MPI's files of a job, which `coordd run` removes however the job ended.

Open MPI removes its session folder and its shared memory segments itself, unless its daemon is killed. Their names do
not identify the job reliably, so each job gets folders of its own. A launcher that is killed cannot remove them: the
next launcher removes the folders whose lock no process holds.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

__all__ = ["scratch"]

_PREFIX = "coordd-run-"
_LOCK = "lock"
_ATTEMPTS = 5
_MEMORY = Path("/dev/shm")  # noqa: S108 - where Open MPI keeps segments by default
_SESSION = ("PRTE_MCA_prte_tmpdir_base",)  # from version 5 on; earlier ones do not read it
_SEGMENTS = ("OMPI_MCA_btl_sm_backing_directory", "OMPI_MCA_osc_sm_backing_directory")


@contextmanager
def scratch(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Creates the folders, and removes them at exit.

    Args:
        environment: environment of the MPI launcher; variables that the user has set there are kept.

    Yields:
        variables for the MPI launcher. If a folder cannot be created, its variables are left out.
    """
    with ExitStack() as stack:
        found: dict[str, str] = {}
        for base, names in ((Path(_temporary(environment)), _SESSION), (_MEMORY, _SEGMENTS)):
            free = [name for name in names if name not in environment]
            if free and (folder := stack.enter_context(_folder(base))):
                found |= dict.fromkeys(free, folder)
        yield found


def _temporary(environment: Mapping[str, str]) -> str:
    return environment.get("TMPDIR", "") or tempfile.gettempdir()


@contextmanager
def _folder(base: Path) -> Iterator[str]:
    """Creates a folder that only this user can access, locked while the job runs; yields "" if that fails."""
    made = None
    with contextlib.suppress(OSError):
        _remove_abandoned(base)
        made = _make(base)
    if made is None:
        yield ""
        return
    folder, lock = made
    try:
        yield str(folder)
    finally:
        try:
            _remove(folder)
        finally:
            os.close(lock)


def _remove(folder: Path) -> None:
    """Removes a folder, its lock file last: if this process is killed meanwhile, the next launcher still finds it."""
    with contextlib.suppress(OSError):
        for each in sorted(folder.iterdir()):
            if each.name != _LOCK and each.is_dir():
                shutil.rmtree(each, ignore_errors=True)
            elif each.name != _LOCK:
                each.unlink(missing_ok=True)
    if [each.name for each in folder.glob("*")] == [_LOCK]:
        shutil.rmtree(folder, ignore_errors=True)


def _make(base: Path) -> tuple[Path, int] | None:
    for _ in range(_ATTEMPTS):
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        if (lock := _locked(folder, os.O_CREAT)) is not None:
            return folder, lock
    return None  # other launchers took the lock each time, because the folder looked abandoned


def _locked(folder: Path, flags: int = 0) -> int | None:
    """Takes a folder's lock; returns its close-on-exec descriptor, or None if another process holds the lock."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _remove_abandoned(base: Path) -> None:
    """Removes this user's folders whose launchers were killed."""
    for folder in sorted(base.glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):
            if folder.lstat().st_uid == os.geteuid() and (lock := _locked(folder)) is not None:
                _remove(folder)
                os.close(lock)
