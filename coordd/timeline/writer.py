"""Writes one rank's tape to its file, once a second, on a thread of its own.

The file is a JSON array whose last bracket may be missing, one event a line: what has been written can be read whatever
happens to the process. Its one rule: no trouble with the file is trouble for the training.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from coordd.timeline.clock import Reading
from coordd.timeline.scribe import Scribe
from coordd.timeline.tape import Deck, Tape

__all__ = ["Sheet", "Writer", "rank_file"]

log = logging.getLogger("coordd")

_PERIOD = 1.0
_AT_ONCE = 64 << 10


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank records."""
    return folder / f"rank.{rank}.json"


class Writer:
    """One recording of one rank: takes its tape off the deck if it cannot go on."""

    def __init__(
        self, folder: Path, tape: Tape, deck: Deck, about: dict[str, Any], *, after: Writer | None = None
    ) -> None:
        """Starts to write.

        Args:
            folder: is made if it is not there.
            tape: what is written.
            deck: where the tape runs.
            about: says whose tape it is; with ``rank``, ``host`` and ``pid``.
            after: what has to end before.
        """
        self.path = rank_file(folder, about["rank"])
        self._tape = tape
        self._deck = deck
        self._about = about
        self._after = after
        self._scribe = Scribe(about["rank"])
        self._readings: list[Reading] = []
        self._ending = False
        self._told = 0
        self._thread = threading.Thread(target=self._run, name="coordd timeline", daemon=True)
        self._thread.start()

    def note(self, reading: Reading) -> None:
        """Writes down how far the clock is from rank 0's."""
        self._readings.append(reading)

    def end(self) -> None:
        """Ends the file, soon."""
        self._ending = True
        self._tape.filling.set()

    def join(self, seconds: float | None = None) -> None:
        """Waits until the file is complete, at most so long."""
        self._thread.join(seconds)

    def _run(self) -> None:
        if self._after is not None:
            self._after.join()
            self._after = None
        try:
            with Sheet(self.path) as sheet:
                sheet.write(self._scribe.header(self._about))
                sheet.flush()
                while not self._ending:
                    self._tape.filling.wait(_PERIOD)
                    self._write(sheet)
                self._write(sheet)
        except Exception as error:  # noqa: BLE001 - a disk that is full must not end a training
            if self._deck.tape is self._tape:
                self._deck.tape = None
            log.warning("the timeline ends here, the training goes on: %s", error)

    def _write(self, sheet: Sheet) -> None:
        while self._readings:
            sheet.write([self._scribe.reading(self._readings.pop(0))])
        for item in self._tape.drain():
            sheet.write(self._scribe.lines(item))
            time.sleep(0)  # who trains need not wait until all are written
        if (dropped := self._tape.dropped) > self._told:
            if not self._told:
                log.warning("the timeline cannot be written as fast as it grows: some of it is missing (%s)", self.path)
            sheet.write([self._scribe.dropped(dropped - self._told)])
            self._told = dropped
        sheet.flush()


class Sheet:
    """The file: new, and nobody else's."""

    def __init__(self, path: Path) -> None:
        """Makes it, in place of what was there.

        Raises:
            OSError: it cannot be made.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of an earlier run
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        self._data = bytearray(b"[")
        self._between = b"\n"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._data += b"\n]\n"
            self.flush()
        finally:
            os.close(self._file)

    def write(self, lines: Iterable[bytes]) -> None:
        """Adds events."""
        for line in lines:
            self._data += self._between + line
            self._between = b",\n"
        if len(self._data) > _AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Hands over to the operating system what has been added.

        Raises:
            OSError: it does not take it.
        """
        data, self._data = self._data, bytearray()
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
