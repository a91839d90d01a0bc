"""The events of a trace, in the format that Perfetto and chrome://tracing read. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["CYCLE", "PHASES", "WAIT", "Event"]

PHASES = ("NEGOTIATE", "QUEUE", "FUSE", "UNFUSE")
"""The phases around an operation; the operation itself comes before the last one and is named by its kind."""
WAIT, CYCLE = "WAIT", "CYCLE"


class Event(msgspec.Struct, omit_defaults=True):
    """One event; ``ts`` and ``dur`` in microseconds, ``pid`` a rank, ``tid`` a row."""

    name: str
    ph: str
    pid: int
    tid: int
    ts: float = 0.0
    dur: float | None = None
    s: str = ""
    args: dict[str, Any] = {}
