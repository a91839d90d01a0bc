"""What the ranks of one run have recorded, made one file of when the run is over.

One rule: whatever is wrong with recordings is told in a line, and changes nothing about how the run has ended.
"""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

__all__ = ["Recordings"]


class Recordings:
    """Those that a folder holds after a run and did not hold before."""

    def __init__(self, folder: Path) -> None:
        """Looks at what is there; the folder need not exist."""
        self._folder = folder
        self._before = self._files()

    def merged(self) -> str:
        """Makes one file of them; returns a sentence about it, or nothing where nothing was recorded."""
        try:
            return self._merged() if self._is_new() else ""
        except KeyboardInterrupt:
            return self._unmerged("interrupted")
        except Exception as error:  # noqa: BLE001 - the run has ended already, well or not
            return self._unmerged(str(error) or type(error).__name__)

    def unmerged(self) -> str:
        """Leaves them as they are; returns a sentence like `merged`."""
        return self._unmerged("there was no time") if self._is_new() else ""

    def _is_new(self) -> bool:
        return bool(self._files() - self._before)

    def _merged(self) -> str:
        from coordd.launch.timeline import collect  # reading recordings takes imports that most runs can do without

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
            with contextlib.suppress(OSError):  # somebody has taken it away
                about = path.stat()
                found.add((path.name, about.st_ino, about.st_mtime_ns))
        return found
