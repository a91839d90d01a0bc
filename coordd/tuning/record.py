"""Autotune records on disk: all trials, the best settings, and the model, world size and host they apply to.

An unusable record is reported and kept until a new one replaces it; it never stops a job.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from coordd.errors import CoorddError
from coordd.tuning.autotune import Progress
from coordd.tuning.key import Key
from coordd.tuning.settings import Space

__all__ = ["FORMAT", "Record", "RecordError", "folder", "host_kind", "latest", "path_for", "written"]

FORMAT = 1
_CPUINFO = Path("/proc/cpuinfo")


class RecordError(CoorddError):
    """A record that cannot be used."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"the autotune record {path} {reason}")


class _Format(msgspec.Struct):
    format: int


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of an autotune record file."""

    key: Key
    space: Space
    progress: Progress
    format: int = FORMAT

    @classmethod
    def load(cls, path: Path) -> Record:
        """Reads a record.

        Raises:
            FileNotFoundError: the file does not exist.
            RecordError: the file cannot be read, is not a record, or has another format version.
        """
        try:
            text = path.read_bytes()
            found = msgspec.json.decode(text, type=_Format).format
            if found != FORMAT:
                raise RecordError(path, f"has format {found}, and this version reads format {FORMAT}")
            return msgspec.json.decode(text, type=cls)
        except FileNotFoundError:
            raise
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError, CoorddError) as error:
            raise error if isinstance(error, RecordError) else RecordError(path, f"cannot be read: {error}") from error

    def save(self, path: Path) -> None:
        """Writes the record atomically: a concurrent reader gets either the old record or this one.

        Raises:
            OSError: the file cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        text = msgspec.json.format(msgspec.json.encode(self), indent=1)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                file.write(text + b"\n")
                file.close()
                Path(file.name).replace(path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise


def folder(environment: Mapping[str, str]) -> Path:
    """Returns the folder of the records: ``$XDG_CACHE_HOME/coordd/tune``, by default below ``~/.cache``."""
    cache = environment.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    return (Path(cache) if os.path.isabs(cache) else _home() / ".cache") / "coordd" / "tune"  # noqa: PTH117


def _home() -> Path:
    """Returns the home folder, or the temporary folder where a container runs under a user ID without one."""
    try:
        return Path.home()
    except RuntimeError:
        return Path(tempfile.gettempdir())


def path_for(key: Key, chosen: str, environment: Mapping[str, str]) -> Path:
    """Returns the path of a search's record: the file the user chose, or one named after the key."""
    return Path(chosen) if chosen else folder(environment) / f"{key.digest}.json"


def written(where: Path) -> dict[Path, int]:
    """Returns the modification time, in nanoseconds since 1970, of each record in a folder, or of one record file."""
    found = where.glob("*.json") if where.is_dir() else [where]
    return {path: path.stat().st_mtime_ns for path in found if path.is_file()}


def latest(now: Mapping[Path, int], before: Mapping[Path, int]) -> Path | None:
    """Returns the most recently written record that is new or has changed since `before`, or None."""
    return max((path for path in now if now[path] != before.get(path)), key=now.__getitem__, default=None)


def host_kind() -> str:
    """Describes this host's speed: its number of hardware threads and its processor model."""
    return f"{os.cpu_count()} x {_processor()}"


def _processor() -> str:
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
