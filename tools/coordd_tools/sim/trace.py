"""The events of a run, line by line, and a digest that compares two runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from coordd_tools.sim.agenda import Agenda

__all__ = ["Trace"]


class Trace:
    """Collects lines, computes their digest, and passes them to `show`."""

    def __init__(self, agenda: Agenda, show: Callable[[str], None] | None = None) -> None:
        """Starts empty.

        Args:
            agenda: the clock.
            show: called with each line.
        """
        self._agenda = agenda
        self._digest = hashlib.sha256()
        self._show = show

    def note(self, who: str, what: object) -> None:
        """Adds a line."""
        line = f"{self._agenda.now * 1e3:11.4f} ms  {who:<11} {what}"
        self._digest.update(line.encode())
        if self._show is not None:
            self._show(line)

    @property
    def digest(self) -> str:
        """Sixteen characters that are equal for equal runs."""
        return self._digest.hexdigest()[:16]
