"""Merges all ranks' files into one for Perfetto and chrome://tracing: each process is a rank, each row a tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from coordd.monitoring.timeline.events import Event
from coordd.monitoring.timeline.trace import Trace

__all__ = ["merge", "merged"]

_encode = msgspec.json.Encoder().encode
_OURS = {"clock", "coordd", "dropped"}


def merge(traces: Sequence[Trace], target: Path) -> None:
    """Writes the merged file atomically.

    Raises:
        OSError: the file cannot be written.
    """
    draft = target.with_suffix(".part")
    try:
        with draft.open("wb") as file:
            between = b"[\n"
            for event in merged(traces):
                file.write(between + _encode(event))
                between = b",\n"
            file.write(b"\n]\n" if between == b",\n" else b"[]\n")
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def merged(traces: Sequence[Trace]) -> Iterator[Event]:
    """Yields the events of all ranks, rank by rank; times are in microseconds since the first event."""
    first = min(trace.first for trace in traces)
    start = first if math.isfinite(first) else 0.0
    for trace in traces:
        for event in trace.events():
            if event.ph == "M":
                if event.name not in _OURS:
                    yield event
            else:
                event.ts = round(event.ts - start, 3)
                yield event
