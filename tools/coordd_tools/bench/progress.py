"""Progress: one line on rank 0's standard output per block done, which the parent turns into a bar."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["Progress"]

_MARK = "bench-progress "


@dataclass(frozen=True)
class Progress:
    """How far a group is: ``done`` blocks of ``total``, and what comes next."""

    done: int
    total: int
    what: str

    def line(self) -> str:
        """Writes the message as a line that nothing else prints by chance."""
        return _MARK + json.dumps(asdict(self))

    @classmethod
    def read(cls, line: str) -> Progress | None:
        """Reads a line; ``None`` if it is something else, such as what a library printed."""
        return cls(**json.loads(line.removeprefix(_MARK))) if line.startswith(_MARK) else None
