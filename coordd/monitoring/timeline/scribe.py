"""Formats the items of an event buffer as JSON trace events.

One rule: events in one row do not overlap, because viewers draw overlaps wrongly. An event that would overlap gets
another row.
"""

from __future__ import annotations

from typing import Any

import msgspec

from coordd.monitoring.timeline.clock import Reading
from coordd.monitoring.timeline.events import CYCLE, PHASES, WAIT, Event
from coordd.negotiation.fusion import size
from coordd.ops.event_buffer import Cycle, Delivery, Item, Passage, Pause, Spot
from coordd.ops.messages import Request

__all__ = ["Scribe"]

_MOST_ROWS = 4096
"""Maximum number of names with rows of their own; later names share rows."""
_WAITS, _DAEMON, _TENSORS = range(3)

_encode = msgspec.json.Encoder().encode


class Scribe:
    """Formats one rank's items as JSON events, and keeps track of the rows in use."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._rows: dict[tuple[int, str], list[tuple[int, float]]] = {}
        self._tids = 0
        self._new: list[bytes] = []
        self._about: dict[str, tuple[Request, str]] = {}

    def header(self, about: dict[str, Any]) -> list[bytes]:
        """Returns the metadata events that describe the rank."""
        name = f"rank {self._rank} ({about['host']}, pid {about['pid']})"
        told: dict[str, dict[str, Any]] = {
            "process_name": {"name": name},
            "process_sort_index": {"sort_index": self._rank},
            "coordd": about,
        }
        return [self._told(word, args) for word, args in told.items()]

    def reading(self, reading: Reading) -> bytes:
        """Formats a clock reading."""
        return self._told("clock", reading._asdict())

    def dropped(self, count: int) -> bytes:
        """Formats the number of dropped items."""
        return self._told("dropped", {"items": count})

    def lines(self, item: Item) -> list[bytes]:
        """Formats an item, with the metadata events of new rows before it."""
        match item:
            case Passage():
                lines = self._passage(item)
            case Delivery(word, name, peer, spot, nbytes, since, until):
                tid = self._row(_TENSORS, name, since, until)
                args = {"op": f"message {_operation(spot)}", "peer": peer, "bytes": nbytes}
                lines = [self._span(word.upper(), tid, since, until, args)]
            case Pause(thread, name, since, until):
                tid = self._row(_WAITS, f"waits of {_written(thread)}", since, until)
                lines = [self._span(WAIT, tid, since, until, {"for": name})]
            case Cycle(since):
                tid = self._row(_DAEMON, "daemon", since, since)
                lines = [_encode(Event(CYCLE, "i", self._rank, tid, _microseconds(since), s="t"))]
        new, self._new = self._new, []
        return new + lines

    def _passage(self, passage: Passage) -> list[bytes]:
        """Formats the phases of each tensor of a bucket; text that the tensors share is formatted once for speed."""
        marks, cargo = passage.marks, passage.cargo
        moving, moved = (marks[2], marks[-2]) if len(marks) > 3 else (marks[-1], marks[-1])
        queued, landed = marks[0], marks[-1]
        negotiate, queue, fuse, unfuse = PHASES
        kind = cargo[0][0].kind.name
        edges = {queue: (queued, marks[1]), fuse: (marks[1], moving), kind: (moving, moved), unfuse: (moved, landed)}
        queue, fuse, kind, unfuse = (self._opened(name, *edge) for name, edge in edges.items())
        operation = _operation(passage.spot)
        end = f',"args":{{"op":"{operation}"}}}}'
        last = f',"args":{{"op":"{operation}","of":{len(cargo)}}}}}'
        lines = []
        for request, submitted in cargo:
            tid = self._row(_TENSORS, _group(request), submitted, landed)
            about = f',"args":{{"op":"{operation}",{self._described(request)}}}}}'
            first = self._opened(negotiate, submitted, queued)
            text = (
                f"{first}{tid}{end},\n{queue}{tid}{end},\n{fuse}{tid}{end},\n{kind}{tid}{about},\n{unfuse}{tid}{last}"
            )
            lines.append(text.encode())
        return lines

    def _opened(self, name: str, since: float, until: float) -> str:
        """Returns the beginning of a phase's event, up to its row."""
        dur = max(0.0, until - since)
        return f'{{"name":"{name}","ph":"X","ts":{1e6 * since:.3f},"dur":{1e6 * dur:.3f},"pid":{self._rank},"tid":'

    def _described(self, request: Request) -> str:
        """Returns size, dtype and shape of a tensor as JSON text, cached until the request changes."""
        known, text = self._about.get(request.name, (None, ""))
        if known is not request:
            what = {"bytes": size(request), "dtype": request.dtype, "shape": request.shape}
            text = _encode(what).decode()[1:-1]
            if request.name in self._about or len(self._about) < _MOST_ROWS:
                self._about[request.name] = request, text
        return text

    def _row(self, group: int, name: str, since: float, until: float) -> int:
        """Returns a row of a name that is free at ``since``, and occupies it until ``until``."""
        key = (group, name)
        if key not in self._rows and len(self._rows) >= _MOST_ROWS:
            key = (group, "others")
        lanes = self._rows.setdefault(key, [])
        for place, (tid, end) in enumerate(lanes):
            if end <= since:
                lanes[place] = tid, until
                return tid
        tid = self._tids = self._tids + 1
        lanes.append((tid, until))
        title = key[1] if len(lanes) == 1 else f"{key[1]} ({len(lanes)})"
        self._new.append(self._told("thread_name", {"name": title}, tid))
        self._new.append(self._told("thread_sort_index", {"sort_index": group * 100_000 + tid}, tid))
        return tid

    def _span(self, name: str, tid: int, since: float, until: float, args: dict[str, Any]) -> bytes:
        dur = _microseconds(max(0.0, until - since))
        return _encode(Event(name, "X", self._rank, tid, _microseconds(since), dur, args=args))

    def _told(self, name: str, args: dict[str, Any], tid: int = 0) -> bytes:
        return _encode(Event(name, "M", self._rank, tid, args=args))


def _operation(spot: Spot) -> str:
    """Returns the id of an operation, which is equal on all ranks."""
    return ":".join(map(str, spot))


def _group(request: Request) -> str:
    """Returns the name of a tensor's row; unnamed tensors share rows by kind."""
    return f"{request.kind.name.lower()} without a name" if request.transient else request.name


def _written(name: str) -> str:
    """Escapes characters of a thread's name that cannot be encoded."""
    return name.encode(errors="backslashreplace").decode()


def _microseconds(moment: float) -> float:
    return round(moment * 1e6, 3)
