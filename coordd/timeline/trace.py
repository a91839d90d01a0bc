"""One rank's file, read as far as it goes: what was cut off or damaged is left out, and counted.

Its one rule: it is read line by line and never held in memory, for a timeline may be long.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from coordd.errors import TimelineError
from coordd.timeline.clock import Reading
from coordd.timeline.events import Event

__all__ = ["Trace", "find", "offset"]

_decode = msgspec.json.Decoder(Event).decode


class Trace:
    """What one rank has recorded.

    Attributes:
        about: who it is: ``rank``, ``size``, ``host``, ``pid``, ``job``, and when it ``began``.
        dropped: items that were never written, because there were too many.
        damaged: lines that are no events.
        first: when its first event begins, in microseconds of rank 0's clock; infinite if there is none.
    """

    def __init__(self, path: Path) -> None:
        """Looks a file through.

        Raises:
            TimelineError: it is not the file of a rank.
        """
        self.path = path
        self.about: dict[str, Any] = {}
        self.dropped = self.damaged = 0
        self._readings: list[Reading] = []
        self._guess = 0.0
        first = math.inf
        for event in self._events(count=True):
            if event.ph == "M":
                self._note(event)
            else:
                first = min(first, event.ts)
        if "rank" not in self.about:
            raise TimelineError(path, "it does not say which rank has written it")
        self.first = first + self._microseconds(first)

    @property
    def rank(self) -> int:
        """Whose it is."""
        return int(self.about["rank"])

    @property
    def doubt(self) -> float:
        """Seconds by which its times may be off, at most."""
        return max((reading.doubt for reading in self._readings), default=math.inf)

    @property
    def guessed(self) -> bool:
        """Whether its clock was never compared with rank 0's."""
        return not self._readings

    def guess(self, origin: Trace) -> None:
        """Where the clocks were never compared, takes the two hosts' time of day for equal."""
        if self.guessed:
            mine, other = self.about, origin.about
            self._guess = (mine["began"] - mine["clock"]) - (other["began"] - other["clock"])
            self.first += self._guess * 1e6

    def events(self) -> Iterator[Event]:
        """Yields its events, in the time of rank 0's clock."""
        for event in self._events():
            if event.ph != "M":
                event.ts += self._microseconds(event.ts)
            yield event

    def _events(self, *, count: bool = False) -> Iterator[Event]:
        with self.path.open("rb") as lines:
            for line in lines:
                text = line.strip().lstrip(b"[,").rstrip(b",")
                try:
                    if text not in {b"", b"]"}:
                        yield _decode(text)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    self.damaged += count

    def _note(self, event: Event) -> None:
        match event.name:
            case "coordd":
                self.about = event.args
            case "clock":
                self._readings.append(Reading(**event.args))
            case "dropped":
                self.dropped += event.args["items"]

    def _microseconds(self, ts: float) -> float:
        return (offset(self._readings, ts / 1e6) if self._readings else self._guess) * 1e6


def offset(readings: Sequence[Reading], at: float) -> float:
    """The seconds to add at a time: between two readings on a line, outside as at the nearest."""
    place = bisect_right(readings, at, key=lambda reading: reading.at)
    before, after = readings[max(0, place - 1)], readings[min(place, len(readings) - 1)]
    if after.at <= before.at:
        return before.offset
    part = (at - before.at) / (after.at - before.at)
    return before.offset + min(1.0, max(0.0, part)) * (after.offset - before.offset)


def find(folder: Path) -> list[Trace]:
    """Reads the files of the job that has written last to a folder, by rank; those that do not say whose are left out.

    Raises:
        TimelineError: there are none, or none can be used.
    """
    paths = sorted(folder.glob("rank.*.json"), key=lambda path: path.stat().st_mtime)
    if not paths:
        raise TimelineError(folder, "no rank has recorded anything there")
    traces = []
    for path in paths:
        try:
            traces.append(Trace(path))
        except TimelineError as error:
            refusal = error
    if not traces:
        raise refusal
    job = traces[-1].about.get("job")
    found = sorted((trace for trace in traces if trace.about.get("job") == job), key=lambda trace: trace.rank)
    for trace in found:
        trace.guess(found[0])
    return found
