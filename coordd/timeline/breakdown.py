"""Where a step went: what the main thread computed, and what it waited for, moment by moment. Pure.

Its one rule: the parts of a step add up to it. While several operations are under way, data that moves counts before an
agreement that is sought, and that before a rank that has not come.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import NamedTuple, TypeVar

from coordd.timeline.journal import Journal, Operation
from coordd.timeline.spans import Span, length, minus, union, within
from coordd.timeline.steps import Step

__all__ = ["Breakdown", "Coming", "Part", "Piece", "breakdowns", "comings", "ways"]

Found = TypeVar("Found")


class Part(Enum):
    """What a main thread's time goes to."""

    COMPUTE = "compute"
    LATE = "late ranks"
    NEGOTIATION = "negotiation"
    TRANSFER = "transfer"
    REST = "other"


class Piece(NamedTuple):
    """Time that went to one thing; ``culprit`` is the rank that was waited for, -1 for none."""

    part: Part
    culprit: int
    spans: list[Span]


class Breakdown(NamedTuple):
    """One rank's step."""

    rank: int
    number: int
    step: Step
    pieces: list[Piece]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.step.until - self.step.since

    def spent(self, part: Part) -> float:
        """Seconds that went to something."""
        return sum(length(piece.spans) for piece in self.pieces if piece.part is part)

    @property
    def exposed(self) -> float:
        """Seconds of communication that nothing hid."""
        return self.seconds - self.spent(Part.COMPUTE)


class Coming(NamedTuple):
    """Who came last to an operation, when, and how long after the one before; ``rank`` is -1 if only one took part.

    ``agreed`` is when the last rank knew that all had come, or gave its word; before, no data moves.
    """

    rank: int
    at: float
    behind: float
    agreed: float


def comings(journals: Iterable[Journal]) -> dict[str, Coming]:
    """Says for each operation when all had come."""
    come: defaultdict[str, list[tuple[float, int, float]]] = defaultdict(list)
    for journal in journals:
        for operation in journal.operations:
            come[operation.key].append((operation.come, journal.rank, operation.queued))
    return {key: _coming(sorted(found)) for key, found in come.items()}


def _coming(found: Sequence[tuple[float, int, float]]) -> Coming:
    if len({rank for _, rank, _ in found}) == 1:  # nobody else has recorded it, or a rank has written to itself
        at, _, queued = found[0]
        return Coming(-1, at, 0.0, max(at, queued))
    at, rank, _ = found[-1]
    return Coming(rank, at, at - found[-2][0], max(at, *(queued for _, _, queued in found)))


def ways(operation: Operation, coming: Coming) -> dict[Part, Span]:
    """Says what an operation did on one rank, and when: wait for the last rank, seek an agreement, move.

    What was over before the last rank had come has waited for nobody: a small send, of which the network has a copy.
    """
    if operation.landed < coming.at:
        return {Part.TRANSFER: (operation.come, operation.landed)}
    return {
        Part.TRANSFER: (coming.agreed, operation.landed),
        Part.NEGOTIATION: (coming.at, coming.agreed),
        Part.LATE: (operation.come, coming.at),
    }


def breakdowns(journal: Journal, steps: Sequence[Step], come: dict[str, Coming]) -> Iterator[Breakdown]:
    """Takes one rank's steps apart."""
    waits = union(journal.waits)
    paused = _during(steps, waits, lambda wait: wait)
    flying = _during(steps, journal.operations, lambda operation: (operation.come, operation.landed))
    for number, (step, idle, flights) in enumerate(zip(steps, paused, flying, strict=True)):
        pieces = _pieces(step, within(idle, step.since, step.until), flights, come)
        yield Breakdown(journal.rank, number, step, pieces)


def _during(steps: Iterable[Step], found: Sequence[Found], span: Callable[[Found], Span]) -> Iterator[list[Found]]:
    """Finds for each of ascending steps what, of things that begin in ascending order, overlaps it."""
    coming = deque(found)
    alive: list[Found] = []
    for step in steps:
        while coming and span(coming[0])[0] < step.until:
            alive.append(coming.popleft())
        alive = [one for one in alive if span(one)[1] > step.since]
        yield alive


def _pieces(step: Step, waits: list[Span], flying: Sequence[Operation], come: dict[str, Coming]) -> list[Piece]:
    """Paints the waits: what is named first stays."""
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
