"""Recordings of ranks that never were: two buckets a step, and a rank that comes late."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from coordd.monitoring.timeline.clock import Reading
from coordd.monitoring.timeline.events import Event
from coordd.monitoring.timeline.scribe import Scribe
from coordd.monitoring.timeline.writer import Sheet, rank_file
from coordd.ops.event_buffer import Item, Passage, Pause
from coordd.ops.messages import Kind, Request

__all__ = ["BEGIN", "STEP", "events", "passage", "record", "training"]

BEGIN = 1000.0
STEP = 0.100

_MS = 1e-3


def passage(number: int, come: float, **times: Any) -> Passage:
    """A bucket of two tensors that were submitted at a time and 1 ms before."""
    names = times.get("names", ("g0", "g1"))
    queued = times.get("queued", come + _MS)
    marks = [queued, queued + 0.1 * _MS, queued + 0.2 * _MS, times["landed"] - 0.1 * _MS, times["landed"]]
    cargo = [(Request(Kind.ALLREDUCE, name, "float32", (250_000,)), come) for name in names]
    cargo[0] = cargo[0][0], come - _MS
    return Passage((number, number), marks, cargo)


def training(rank: int, *, steps: int = 8, late: float = 0.0) -> Iterator[Item]:
    """In each step 60 ms of computing, and ``late`` more on rank 1; all have come: 1 ms to agree, 10 to transfer."""
    for step in range(steps):
        start = BEGIN + step * STEP
        there = start + 0.060 + late
        come = there if rank == 1 else start + 0.060
        landed = there + 11 * _MS
        yield passage(step + 1, come, queued=there + _MS, landed=landed)
        yield Pause("MainThread", "gradients", come, landed)


def events(scribe: Scribe, *items: Item) -> list[Event]:
    """What is written down of items."""
    lines = [line for item in items for line in scribe.lines(item)]
    return msgspec.json.decode(b"[" + b",".join(lines) + b"]", type=list[Event])


def record(folder: Path, rank: int, items: Iterable[Item], **about: Any) -> Path:
    """Writes a rank's file, in the time of a clock that is ``ahead`` of rank 0's; returns its path."""
    ahead = about.pop("ahead", 0.0)
    readings = about.pop("readings", [Reading(0.0, -ahead, 1e-5)])
    who = {"rank": rank, "size": 2, "host": "here", "pid": 10 + rank, "job": "a job", "began": math.pi, "clock": ahead}
    path, scribe = rank_file(folder, rank), Scribe(rank)
    with Sheet(path) as sheet:
        sheet.write(scribe.header(who | about))
        sheet.write(map(scribe.reading, readings))
        for item in items:
            sheet.write(scribe.lines(_shifted(item, ahead)))
    return path


def _shifted(item: Item, ahead: float) -> Item:
    match item:
        case Passage(spot, marks, cargo):
            return Passage(spot, [mark + ahead for mark in marks], [(what, since + ahead) for what, since in cargo])
        case Pause(thread, name, since, until):
            return Pause(thread, name, since + ahead, until + ahead)
        case _:
            raise AssertionError
