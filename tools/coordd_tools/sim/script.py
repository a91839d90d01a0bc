"""The training scripts of the simulated ranks: rounds of named tensors, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import msgspec

from coordd.ops.messages import Kind, ReduceOp, Request
from coordd_tools.sim.swarm import Swarm

__all__ = ["ROOTLESS", "Part", "Round", "Script", "write"]

_KINDS = [kind for kind in Kind if kind is not Kind.JOIN]
_DTYPES = ("float32", "float64", "bfloat16", "int64")
_ATTRIBUTES = ("operation", "dtype", "shape", "reduction", "scale factors", "root rank")
_MISMATCHES, _CONTRADICTIONS, _FILLERS, _SKIPPED, _RESHAPED, _OTHER_LINES = 0.15, 0.15, 0.5, 0.2, 0.2, 0.2
_STEADY = (0.0, 0.01, 0.05)
_UNEVEN = 0.3
ROOTLESS = "root rank of nobody"


@dataclass(frozen=True)
class Part:
    """One rank's submission in a round, and the line of its script that makes it."""

    request: Request
    line: int
    filler: bool


@dataclass(frozen=True, eq=False)
class Round:
    """One use of a name: each member submits its part once.

    ``quarrel`` is the attribute on which the parts disagree; empty if they agree. ``absent`` ranks have no part,
    because they join before it, with the round ``join``. ``refusers`` refuse their part, or leave the collective call
    that contains it by an error. Not all ranks need to submit a ``free`` round, and they may wait in any order.
    """

    number: int
    name: str
    parts: dict[int, Part]
    quarrel: str
    absent: frozenset[int] = frozenset()
    join: Round | None = None
    refusers: frozenset[int] = frozenset()
    free: bool = False

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks that have a part."""
        return tuple(self.parts)

    @property
    def void(self) -> bool:
        """Whether all parts are placeholders."""
        return all(part.filler for part in self.parts.values())


@dataclass(frozen=True)
class Script:
    """All steps, each rank's order of submission, and the ranks that leave early, by step and number of rounds."""

    steps: tuple[tuple[Round, ...], ...]
    orders: tuple[tuple[tuple[Round, ...], ...], ...]
    leavers: dict[int, tuple[int, int]]


def write(rng: Random, size: int, swarm: Swarm, *, steps: int) -> Script:
    """Draws a script."""
    return _Author(rng, size, swarm).write(steps)


def _layers(turns: list[Round]) -> list[list[Round]]:
    """Splits a step so that no rank has a name twice: within a step ranks submit in any order without waiting."""
    layers: list[list[Round]] = [[]]
    for turn in turns:
        same = [
            number
            for number, layer in enumerate(layers)
            if any(other.name == turn.name and not other.parts.keys().isdisjoint(turn.parts) for other in layer)
        ]
        place = same[-1] + 1 if same else 0
        if place == len(layers):
            layers.append([])
        layers[place].append(turn)
    return layers


class _Author:
    """Draws one script; remembers the present shape of the tensors."""

    def __init__(self, rng: Random, size: int, swarm: Swarm) -> None:
        self._rng = rng
        self._size = size
        self._swarm = swarm
        self._number = 0
        self._dtypes = rng.sample(_DTYPES, rng.randint(1, 3))
        self._leavers: dict[int, tuple[int, int]] = {}
        self._variety = rng.choice(_STEADY) if swarm.steady else 1.0
        self._tensors = [self._tensor(f"t{index}") for index in range(rng.randint(1, 8))]
        if swarm.steady:
            self._tensors += [self._gradient(f"g{index}") for index in range(rng.randint(1, 5))]
        if swarm.shared_names:
            self._tensors += [
                msgspec.structs.replace(tensor, members=self._members()) for tensor in self._tensors if rng.randrange(2)
            ]

    def write(self, steps: int) -> Script:
        if self._swarm.leave:
            chosen = self._rng.sample(range(self._size), self._rng.randint(1, self._size - 1))
            self._leavers = {rank: (self._rng.randrange(steps), self._rng.randint(0, 4)) for rank in chosen}
        written = tuple(tuple(layer) for _ in range(steps) for layer in _layers(self._step()))
        orders = tuple(tuple(self._order(step, rank) for rank in range(self._size)) for step in written)
        if self._swarm.join and not (self._leavers or self._swarm.contradiction):
            orders = tuple(self._uneven(order) if self._rng.random() < _UNEVEN else order for order in orders)
        return Script(written, orders, self._leavers)

    def _uneven(self, orders: tuple[tuple[Round, ...], ...]) -> tuple[tuple[Round, ...], ...]:
        """Turns a step into one in which ranks join, each after some of its rounds, unless the step has a mismatch."""
        if any(turn.quarrel for order in orders for turn in order):
            return orders
        kept = [order[: self._rng.randint(0, len(order))] for order in orders]
        self._number += 1
        request = Request(Kind.JOIN, f"join.noname.{self._number}", transient=True)
        parts = {rank: Part(request, self._line(request), filler=False) for rank in range(self._size)}
        join = Round(self._number, request.name, parts, "")
        rounds = {turn: self._shrunk(turn, kept, join) for order in kept for turn in order}
        return tuple((*(rounds[turn] for turn in order), join) for order in kept)

    def _shrunk(self, turn: Round, kept: list[tuple[Round, ...]], join: Round) -> Round:
        """Returns the round without the ranks that joined before it; a broadcast whose root has joined fails."""
        absent = frozenset(rank for rank in turn.parts if turn not in kept[rank])
        parts = {rank: part for rank, part in turn.parts.items() if rank not in absent}
        request = next(iter(parts.values())).request
        rootless = request.kind is Kind.BROADCAST and request.root in absent
        return Round(turn.number, turn.name, parts, ROOTLESS if rootless else "", absent, join)

    def _step(self) -> list[Round]:
        found = []
        for index, tensor in enumerate(self._tensors):
            if self._chance(_SKIPPED):
                continue
            if self._swarm.reshape and self._chance(_RESHAPED):
                self._tensors[index] = msgspec.structs.replace(tensor, shape=self._shape(tensor.kind))
            found.append(self._round(self._tensors[index]))
        once = self._rng.randint(0, 2) if self._swarm.transients else 0
        return found + [self._round(self._tensor(f"noname.{self._number}", transient=True)) for _ in range(once)]

    def _order(self, step: tuple[Round, ...], rank: int) -> tuple[Round, ...]:
        """Returns the order in which a rank submits a step."""
        mine = [turn for turn in step if rank in turn.parts]
        return tuple(self._rng.sample(mine, len(mine)) if self._swarm.reorder else mine)

    def _round(self, tensor: Request) -> Round:
        self._number += 1
        quarrel = ""
        if self._swarm.contradiction and self._chance(_CONTRADICTIONS):
            requests = self._opposed(tensor)
            quarrel = "process set" if requests else ""
        if not quarrel:
            requests = {rank: self._own(tensor) for rank in tensor.members or range(self._size)}
            if self._swarm.mismatch and len(requests) > 1 and self._chance(_MISMATCHES):
                quarrel = self._rng.choice(_ATTRIBUTES)
                for rank in self._rng.sample([*requests], self._rng.randint(1, len(requests) - 1)):
                    requests[rank] = self._altered(requests[rank], quarrel)
        fillers = self._swarm.fillers and self._chance(_FILLERS)
        everybody = self._rng.random() < _FILLERS
        parts = {
            rank: Part(request, self._line(request), fillers and (everybody or self._rng.random() < _FILLERS))
            for rank, request in sorted(requests.items())
        }
        return Round(self._number, tensor.name, parts, quarrel)

    def _chance(self, usual: float) -> bool:
        """Draws a yes or no; in a steady run, a change from one step to the next is rare."""
        return self._rng.random() < usual * self._variety

    def _gradient(self, name: str) -> Request:
        """Returns a tensor as most training scripts have."""
        dtype = self._rng.choice(self._dtypes)
        return Request(Kind.ALLREDUCE, name, dtype, self._shape(Kind.ALLREDUCE))

    def _tensor(self, name: str, *, transient: bool = False) -> Request:
        kind = self._rng.choices(_KINDS, [6, 1, 1, 1, 1, 1])[0]
        return Request(
            kind,
            name,
            self._rng.choice(self._dtypes),
            self._shape(kind),
            op=self._rng.choice((ReduceOp.SUM, ReduceOp.MAX)),
            root=self._rng.randrange(self._size) if kind is Kind.BROADCAST else -1,
            prescale=self._rng.choice((1.0, 0.5)),
            members=self._members() if self._swarm.sets else (),
            transient=transient,
        )

    def _shape(self, kind: Kind) -> tuple[int, ...]:
        least = 1 if kind in {Kind.ALLGATHER, Kind.ALLTOALL, Kind.REDUCESCATTER} else 0
        return tuple(self._rng.randint(0, 4) for _ in range(self._rng.randint(least, 2)))

    def _members(self) -> tuple[int, ...]:
        members = tuple(sorted(self._rng.sample(range(self._size), self._rng.randint(1, self._size))))
        return () if len(members) == self._size else members

    def _own(self, tensor: Request) -> Request:
        """Returns a request of one rank's own; the first dimensions of an allgather differ."""
        shape = tensor.shape
        if tensor.kind is Kind.ALLGATHER:
            shape = (self._rng.randint(0, 4), *shape[1:])
        return msgspec.structs.replace(tensor, shape=shape)

    def _line(self, request: Request) -> int:
        other = self._swarm.lines and self._rng.random() < _OTHER_LINES
        return sum(request.name.encode()) + 1000 * other

    def _opposed(self, tensor: Request) -> dict[int, Request]:
        """Draws two process sets with at least two common members, which disagree on the tensor's set."""
        ranks = [rank for rank in range(self._size) if rank not in self._leavers]
        if len(ranks) < 3:
            return {}
        common = self._rng.sample(ranks, self._rng.randint(2, len(ranks) - 1))
        rest = [rank for rank in ranks if rank not in common]
        one = self._rng.sample(rest, self._rng.randint(0, len(rest)))
        other = [rank for rank in rest if rank not in one]
        if not one and not other:
            return {}
        split = self._rng.randint(1, len(common) - 1)
        views = ((common[:split] + one, one), (common[split:] + other, other))
        return {rank: self._viewed(tensor, [*common, *own]) for ranks, own in views for rank in ranks}

    def _viewed(self, tensor: Request, ranks: list[int]) -> Request:
        members = () if len(ranks) == self._size else tuple(sorted(ranks))
        return msgspec.structs.replace(self._own(tensor), members=members)

    def _altered(self, request: Request, attribute: str) -> Request:
        """Returns the same request with another value of one attribute."""
        replace = msgspec.structs.replace
        match attribute:
            case "operation":
                others = [kind for kind in (Kind.ALLREDUCE, Kind.BROADCAST, Kind.BARRIER) if kind is not request.kind]
                return replace(request, kind=self._rng.choice(others))
            case "dtype":
                return replace(request, dtype="int8")
            case "shape":
                return replace(request, shape=(*request.shape, 7))
            case "reduction":
                return replace(request, op=ReduceOp.MIN)
            case "scale factors":
                return replace(request, postscale=1 + 1e-9)
            case _:
                return replace(request, root=request.root + 1)
