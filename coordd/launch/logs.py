"""One log file per rank with its output, finished lines only."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

__all__ = ["Logs"]


class Logs:
    """The files ``rank.<r>.log`` of a folder; each is opened, and an older one replaced, at the rank's first output."""

    def __init__(self, folder: Path) -> None:
        """Creates the folder.

        Raises:
            OSError: the folder cannot be created.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[int, BinaryIO] = {}

    def write(self, rank: int, line: bytes) -> None:
        """Appends a line and flushes the file."""
        if rank not in self._files:
            self._files[rank] = (self._folder / f"rank.{rank}.log").open("wb")
        self._files[rank].write(line + b"\n")
        self._files[rank].flush()

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()
