"""One file per rank with what it wrote, finished lines only."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

__all__ = ["Logs"]


class Logs:
    """The files ``rank.<r>.log`` of a folder, opened when a rank first speaks; those of an earlier job are replaced."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder.

        Raises:
            OSError: it cannot be made.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._files: dict[int, BinaryIO] = {}

    def write(self, rank: int, line: bytes) -> None:
        """Appends a line, which can be read from the file at once."""
        if rank not in self._files:
            self._files[rank] = (self._folder / f"rank.{rank}.log").open("wb")
        self._files[rank].write(line + b"\n")
        self._files[rank].flush()

    def close(self) -> None:
        """Closes the files."""
        for file in self._files.values():
            file.close()
