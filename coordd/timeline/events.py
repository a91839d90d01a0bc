"""The events of a trace, in the JSON that Perfetto and chrome://tracing read, and how a tape becomes events.

Its one rule: in one row nothing overlaps, for viewers draw that wrongly. What would, gets another row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from coordd.fusion import size
from coordd.messages import Request
from coordd.timeline.clock import Reading
from coordd.timeline.tape import Cycle, Delivery, Item, Passage, Pause

__all__ = ["CYCLE", "PHASES", "WAIT", "Event", "Scribe", "seconds"]

PHASES = ("NEGOTIATE", "QUEUE", "FUSE", "UNFUSE")
"""The phases around an operation, which lies before the last and is called by its kind."""
WAIT, CYCLE = "WAIT", "CYCLE"

_MOST_ROWS = 1000
"""Names that have a row of their own; what comes later shares rows."""
_WAITS, _DAEMON, _TENSORS = range(3)


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


class Scribe:
    """Turns one rank's items into events; remembers which rows there are."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._rows: dict[tuple[int, str], list[tuple[int, float]]] = {}
        self._tids = 0

    def header(self, about: dict[str, Any]) -> Iterator[Event]:
        """Says whose events follow."""
        name = f"rank {self._rank} ({about['host']}, pid {about['pid']})"
        yield self._told("process_name", {"name": name})
        yield self._told("process_sort_index", {"sort_index": self._rank})
        yield self._told("coordd", about)

    def reading(self, reading: Reading) -> Event:
        """Writes down how far the clock is from rank 0's."""
        return self._told("clock", {"at": reading.at, "offset": reading.offset, "doubt": reading.doubt})

    def dropped(self, count: int) -> Event:
        """Writes down how much is missing."""
        return self._told("dropped", {"items": count})

    def events(self, item: Item) -> Iterator[Event]:
        """Writes down what the tape has noted."""
        match item:
            case Passage():
                yield from self._passage(item)
            case Delivery(word, name, peer, nbytes, since, until):
                args = {"peer": peer, "bytes": nbytes}
                yield from self._phases(name, [(word.upper(), since, until, args)])
            case Pause(thread, name, since, until):
                yield from self._row(_WAITS, f"waits of {_written(thread)}", [(WAIT, since, until, {"for": name})])
            case Cycle(since):
                for event in self._row(_DAEMON, "daemon", [(CYCLE, since, since, {})]):
                    yield event if event.ph == "M" else Event(CYCLE, "i", event.pid, event.tid, event.ts, s="t")

    def _passage(self, passage: Passage) -> Iterator[Event]:
        marks = passage.marks
        queued, started, landed = marks[0], marks[1], marks[-1]
        moving, moved = (marks[2], marks[-2]) if len(marks) > 3 else (landed, landed)
        operation = ":".join(map(str, passage.spot))
        for request, submitted in passage.cargo:
            args = {"op": operation, "of": len(passage.cargo)}
            what = {"bytes": size(request), "dtype": request.dtype, "shape": request.shape}
            kind = request.kind.name
            edges = (submitted, queued, started, moving, moved, landed)
            names = (*PHASES[:3], kind, PHASES[3])
            spans = [
                (name, since, until, args | what if name == kind else args)
                for name, since, until in zip(names, edges, edges[1:], strict=False)
            ]
            yield from self._phases(_group(request), spans)

    def _phases(self, name: str, spans: list[tuple[str, float, float, dict[str, Any]]]) -> Iterator[Event]:
        known = (_TENSORS, name) in self._rows or len(self._rows) < _MOST_ROWS
        yield from self._row(_TENSORS, name if known else "others", spans)

    def _row(self, group: int, name: str, spans: list[tuple[str, float, float, dict[str, Any]]]) -> Iterator[Event]:
        """Finds a row in which nothing lies in this place yet, and yields the events in it."""
        lanes = self._rows.setdefault((group, name), [])
        since, until = spans[0][1], spans[-1][2]
        place = next((place for place, (_, end) in enumerate(lanes) if end <= since), len(lanes))
        if place == len(lanes):
            self._tids += 1
            lanes.append((self._tids, 0.0))
            title = name if not place else f"{name} ({place + 1})"
            yield self._told("thread_name", {"name": title}, self._tids)
            yield self._told("thread_sort_index", {"sort_index": group * 100_000 + self._tids}, self._tids)
        tid, _ = lanes[place]
        lanes[place] = tid, until
        for what, begin, end, args in spans:
            yield Event(
                what, "X", self._rank, tid, _microseconds(begin), _microseconds(max(0.0, end - begin)), args=args
            )

    def _told(self, name: str, args: dict[str, Any], tid: int = 0) -> Event:
        return Event(name, "M", self._rank, tid, args=args)


def seconds(microseconds: float) -> float:
    """The time of an event, in seconds."""
    return microseconds / 1e6


def _group(request: Request) -> str:
    """The row of a tensor; those without a name share some."""
    return f"{request.kind.name.lower()} without a name" if request.transient else request.name


def _written(name: str) -> str:
    """Spells out what is not Unicode, which a thread may be called."""
    return name.encode(errors="backslashreplace").decode()


def _microseconds(moment: float) -> float:
    return round(moment * 1e6, 3)
