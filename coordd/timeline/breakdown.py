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

__all__ = ["Breakdown", "Coming", "Part", "Piece", "breakdowns", "comings"]

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
    return {key: _coming(sorted(found)) for key, found in come.items() if key}


def _coming(found: Sequence[tuple[float, int, float]]) -> Coming:
    at, rank, _ = found[-1]
    agreed = max(at, *(queued for _, _, queued in found))
    return Coming(rank, at, at - found[-2][0], agreed) if len(found) > 1 else Coming(-1, at, 0.0, agreed)


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
    moving: list[Span] = []
    seeking: list[Span] = []
    missing: dict[int, list[Span]] = {}
    for operation in flying:
        there = come.get(operation.key, Coming(-1, operation.come, 0.0, operation.queued))
        moving.append((there.agreed, operation.landed))
        seeking.append((there.at, there.agreed))
        missing.setdefault(there.rank, []).append((operation.come, there.at))
    layers = [(Part.TRANSFER, -1, moving), (Part.NEGOTIATION, -1, seeking)]
    layers += [(Part.LATE, rank, spans) for rank, spans in missing.items()]
    pieces = [Piece(Part.COMPUTE, -1, minus([(step.since, step.until)], waits))]
    left = waits
    for part, culprit, spans in layers:
        rest = minus(left, union(spans))
        pieces.append(Piece(part, culprit, minus(left, rest)))
        left = rest
    return [*pieces, Piece(Part.REST, -1, left)]
