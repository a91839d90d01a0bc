"""Writes one rank's event buffer to its file, once a second, on a thread of its own.

The file is a JSON array, one event per line, whose last bracket may be missing: written events stay readable whatever
happens to the process. One rule: problems with the file do not affect the training.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from coordd.monitoring.timeline.clock import Reading
from coordd.monitoring.timeline.scribe import Scribe
from coordd.ops.event_buffer import Deck, Tape

__all__ = ["Sheet", "Writer", "rank_file"]

log = logging.getLogger("coordd")

_PERIOD = 1.0
_AT_ONCE = 64 << 10


def rank_file(folder: Path, rank: int) -> Path:
    """Returns the path of a rank's recording."""
    return folder / f"rank.{rank}.json"


class Writer:
    """Writes one recording of one rank; on an error it removes its event buffer from the deck."""

    def __init__(
        self, folder: Path, tape: Tape, deck: Deck, about: dict[str, Any], *, after: Writer | None = None
    ) -> None:
        """Starts the writer's thread.

        Args:
            folder: folder of the file; created if it does not exist.
            tape: the event buffer to write.
            deck: the deck that holds the event buffer while recording.
            about: metadata of the recording, with ``rank``, ``host`` and ``pid``.
            after: an earlier writer that must end first.
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
        """Queues a clock reading to be written."""
        self._readings.append(reading)

    def end(self) -> None:
        """Makes the thread write the remaining items and close the file."""
        self._ending = True
        self._tape.filling.set()

    def join(self, seconds: float | None = None) -> None:
        """Waits until the file is complete, for at most ``seconds``."""
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
            time.sleep(0)  # releases the GIL, so that training need not wait until all items are written
        if (dropped := self._tape.dropped) > self._told:
            if not self._told:
                log.warning("the timeline cannot be written as fast as it grows: some of it is missing (%s)", self.path)
            sheet.write([self._scribe.dropped(dropped - self._told)])
            self._told = dropped
        sheet.flush()


class Sheet:
    """A new file that only this user can access."""

    def __init__(self, path: Path) -> None:
        """Creates the file, replacing an existing one.

        Raises:
            OSError: the file cannot be created.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # the file of an earlier run
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
        """Writes the added events to the file.

        Raises:
            OSError: the write fails.
        """
        data, self._data = self._data, bytearray()
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]
