"""The timeline recordings of one run, merged into one file when the run is over.

One rule: a problem with the recordings is reported in one line and does not change the outcome of the run.
"""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

__all__ = ["Recordings"]


class Recordings:
    """The recordings that a run adds to a folder."""

    def __init__(self, folder: Path) -> None:
        """Lists the recordings that exist before the run; the folder need not exist."""
        self._folder = folder
        self._before = self._files()

    def merged(self) -> str:
        """Merges the recordings into one file; returns a sentence about it, or "" without new recordings."""
        try:
            return self._merged() if self._is_new() else ""
        except KeyboardInterrupt:
            return self._unmerged("interrupted")
        except Exception as error:  # noqa: BLE001 - the run has ended already, well or not
            return self._unmerged(str(error) or type(error).__name__)

    def unmerged(self) -> str:
        """Leaves the recordings unmerged; returns a sentence about it, or "" without new recordings."""
        return self._unmerged("there was no time") if self._is_new() else ""

    def _is_new(self) -> bool:
        return bool(self._files() - self._before)

    def _merged(self) -> str:
        from coordd.launch.timeline import collect  # its imports are slow, and most runs do not need them

        traces, target = collect(self._folder)
        size = traces[0].about["size"]
        whose = f"{len(traces)} of {size} ranks" if len(traces) < size else "all ranks"
        how = f"for https://ui.perfetto.dev; '{self._command}' says where a step went"
        return f"the timeline of {whose}: {target}, {how}"

    def _unmerged(self, reason: str) -> str:
        return f"the timeline is not merged ({reason}): '{self._command}' does it"

    @property
    def _command(self) -> str:
        return f"coordd timeline {shlex.quote(str(self._folder))}"

    def _files(self) -> set[tuple[str, int, int]]:
        found = set()
        for path in self._folder.glob("rank.*.json"):
            with contextlib.suppress(OSError):  # it was removed meanwhile
                about = path.stat()
                found.add((path.name, about.st_ino, about.st_mtime_ns))
        return found
