"""Reads one rank's timeline file; truncated or damaged lines are skipped and counted.

One rule: the file is read line by line and never held in memory, because a timeline may be long.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from coordd.errors import TimelineError
from coordd.monitoring.timeline.clock import Reading
from coordd.monitoring.timeline.events import Event

__all__ = ["Trace", "find", "offset"]

_decode = msgspec.json.Decoder(Event).decode


class Trace:
    """The recording of one rank.

    Attributes:
        about: metadata: ``rank``, ``size``, ``host``, ``pid``, ``job``, and the start time ``began``.
        dropped: number of items that were dropped because the file could not be written fast enough.
        damaged: number of lines that are not events.
        first: start of the first event, in microseconds of rank 0's clock; infinite without events.
    """

    def __init__(self, path: Path) -> None:
        """Scans a file for its metadata.

        Raises:
            TimelineError: the file does not say which rank has written it.
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
        """The rank that has written the file."""
        return int(self.about["rank"])

    @property
    def doubt(self) -> float:
        """Maximum error of the times in seconds; infinite if the clock was never compared with rank 0's."""
        return max((reading.doubt for reading in self._readings), default=math.inf)

    @property
    def guessed(self) -> bool:
        """Whether the clock was never compared with rank 0's."""
        return not self._readings

    def guess(self, origin: Trace) -> None:
        """If the clock was never compared, assumes that the two hosts' wall clocks agree."""
        if self.guessed:
            mine, other = self.about, origin.about
            self._guess = (mine["began"] - mine["clock"]) - (other["began"] - other["clock"])
            self.first += self._guess * 1e6

    def events(self) -> Iterator[Event]:
        """Yields the events, with times on rank 0's clock."""
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
    """Returns the seconds to add at a time: interpolated between two readings, else that of the nearest reading."""
    place = bisect_right(readings, at, key=lambda reading: reading.at)
    before, after = readings[max(0, place - 1)], readings[min(place, len(readings) - 1)]
    if after.at <= before.at:
        return before.offset
    part = (at - before.at) / (after.at - before.at)
    return before.offset + min(1.0, max(0.0, part)) * (after.offset - before.offset)


def find(folder: Path) -> list[Trace]:
    """Reads the files of the job that wrote to a folder last, sorted by rank; unusable files are left out.

    Raises:
        TimelineError: there are no files, or no usable ones.
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
