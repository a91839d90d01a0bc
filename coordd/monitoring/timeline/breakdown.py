"""Breaks a step's time down into compute and waiting, by cause. Pure.

One rule: the parts of a step add up to its duration. While several operations are in flight, transfer takes precedence
over negotiation, and negotiation over waiting for a late rank.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple, TypeVar

from coordd.monitoring.timeline.journal import Journal, Operation
from coordd.monitoring.timeline.spans import Span, length, minus, union, within
from coordd.monitoring.timeline.steps import Step

__all__ = ["Breakdown", "Coming", "Part", "Piece", "breakdowns", "comings", "ways"]

Found = TypeVar("Found")


class Part(Enum):
    """Categories of the main thread's time."""

    COMPUTE = "compute"
    LATE = "late ranks"
    NEGOTIATION = "negotiation"
    TRANSFER = "transfer"
    REST = "other"


class Piece(NamedTuple):
    """The time spans of one category; ``culprit`` is the rank that was waited for, -1 for none."""

    part: Part
    culprit: int
    spans: list[Span]


class Breakdown(NamedTuple):
    """The breakdown of one step of one rank."""

    rank: int
    number: int
    step: Step
    pieces: list[Piece]

    @property
    def seconds(self) -> float:
        """Duration of the step in seconds."""
        return self.step.until - self.step.since

    def spent(self, part: Part) -> float:
        """Returns the seconds that went to a category."""
        return sum(length(piece.spans) for piece in self.pieces if piece.part is part)

    @property
    def exposed(self) -> float:
        """Seconds of communication that compute did not hide."""
        return self.seconds - self.spent(Part.COMPUTE)


class Coming(NamedTuple):
    """The rank that came last to an operation, at which time, and how many seconds after the rank before it.

    ``rank`` is -1 if only one rank took part. ``agreed`` is when the last rank knew that all ranks had come, or voted;
    no data moves before that. Times are in seconds.
    """

    rank: int
    at: float
    behind: float
    agreed: float


def comings(journals: Iterable[Journal]) -> dict[str, Coming]:
    """Returns the last arrival at each operation, by the operation's key."""
    come: defaultdict[str, list[tuple[float, int, float]]] = defaultdict(list)
    for journal in journals:
        for operation in journal.operations:
            come[operation.key].append((operation.come, journal.rank, operation.queued))
    return {key: _coming(sorted(found)) for key, found in come.items()}


def _coming(found: Sequence[tuple[float, int, float]]) -> Coming:
    if len({rank for _, rank, _ in found}) == 1:  # only one rank has recorded it, or a rank has sent to itself
        at, _, queued = found[0]
        return Coming(-1, at, 0.0, max(at, queued))
    at, rank, _ = found[-1]
    return Coming(rank, at, at - found[-2][0], max(at, *(queued for _, _, queued in found)))


def ways(operation: Operation, coming: Coming) -> dict[Part, Span]:
    """Returns the spans of an operation on one rank: waiting for the last rank, negotiation, transfer.

    An operation that completed before the last rank came did not wait for it: a small send, whose payload the network
    has buffered.
    """
    if operation.landed < coming.at:
        return {Part.TRANSFER: (operation.come, operation.landed)}
    return {
        Part.TRANSFER: (coming.agreed, operation.landed),
        Part.NEGOTIATION: (coming.at, coming.agreed),
        Part.LATE: (operation.come, coming.at),
    }


def breakdowns(journal: Journal, steps: Sequence[Step], come: dict[str, Coming]) -> Iterator[Breakdown]:
    """Yields the breakdown of each of one rank's steps."""
    waits = union(journal.waits)
    paused = _during(steps, waits, lambda wait: wait)
    flying = _during(steps, journal.operations, lambda operation: (operation.come, operation.landed))
    for number, (step, idle, flights) in enumerate(zip(steps, paused, flying, strict=True)):
        pieces = _pieces(step, within(idle, step.since, step.until), flights, come)
        yield Breakdown(journal.rank, number, step, pieces)


def _during(steps: Iterable[Step], found: Sequence[Found], span: Callable[[Found], Span]) -> Iterator[list[Found]]:
    """Yields for each step the items that overlap it; steps and items are sorted by their start."""
    coming = deque(found)
    alive: list[Found] = []
    for step in steps:
        while coming and span(coming[0])[0] < step.until:
            alive.append(coming.popleft())
        alive = [one for one in alive if span(one)[1] > step.since]
        yield alive


def _pieces(step: Step, waits: list[Span], flying: Sequence[Operation], come: dict[str, Coming]) -> list[Piece]:
    """Assigns the waits of a step to categories; each moment goes to the first category that covers it."""
    layers: dict[tuple[Part, int], list[Span]] = {(Part.TRANSFER, -1): [], (Part.NEGOTIATION, -1): []}
    for operation in flying:
        there = come[operation.key]
        for part, way in ways(operation, there).items():
            culprit = there.rank if part is Part.LATE else -1
            layers.setdefault((part, culprit), []).append(way)
    pieces = [Piece(Part.COMPUTE, -1, minus([(step.since, step.until)], waits))]
    left = waits
    for (part, culprit), spans in layers.items():
        rest = minus(left, union(spans))
        pieces.append(Piece(part, culprit, minus(left, rest)))
        left = rest
    return [*pieces, Piece(Part.REST, -1, left)]
