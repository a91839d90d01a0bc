"""Progress: one line on rank 0's standard output per finished block, which the parent shows as a bar."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

__all__ = ["Progress"]

_MARK = "bench-progress "


@dataclass(frozen=True)
class Progress:
    """Progress of a group: ``done`` blocks of ``total``, and what comes next."""

    done: int
    total: int
    what: str

    def line(self) -> str:
        """Returns the message as a line with a prefix that no other output has by chance."""
        return _MARK + json.dumps(asdict(self))

    @classmethod
    def read(cls, line: str) -> Progress | None:
        """Parses a line; ``None`` if it is other output, for example of a library."""
        return cls(**json.loads(line.removeprefix(_MARK))) if line.startswith(_MARK) else None
