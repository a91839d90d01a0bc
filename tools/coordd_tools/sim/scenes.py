"""Parts of a script in which ranks refuse a call or an operation, or wait for operations in different orders.

After a deadlock some ranks have given up operations that others have yet to submit. So all ranks synchronise before
they continue, as real scripts must: they repeat a barrier of its own name until it succeeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from random import Random

from coordd.negotiation.group_names import names_in_group, refused_names
from coordd.ops.arguments import places
from coordd.ops.messages import Kind, Request
from coordd_tools.sim.letters import Letter
from coordd_tools.sim.script import Part, Round, Script
from coordd_tools.sim.swarm import Swarm, aside

__all__ = ["Call", "Crossing", "Scenes", "draw", "in_phases", "with_refusals"]

_REFUSED, _UNREAD = 0.1, 0.5
_SENT, _RECEIVED, _AWAITED, _LARGE = 0.85, 0.9, 0.7, 0.5

_PATIENCE = 1.2
"""Mean seconds after which a wait is broken off."""

Members = tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """A collective call: its rounds, and the members that leave it with an error, by the number of rounds before."""

    call: str
    members: Members
    rounds: tuple[Round, ...]
    refusals: dict[int, int]


@dataclass(frozen=True)
class Crossing:
    """Rounds, sends and receives that each rank issues in an order of its own, with waits after some of them.

    Attributes:
        orders: by rank, its rounds and messages, and whether it waits for each before it continues.
        limits: by rank and round, seconds after which an exception breaks the wait off.
        threads: ranks on which another thread submits the rounds after the first.
        agreement: the barrier that all ranks repeat until it succeeds.
        refused: by rank, the name that it refuses instead of submitting it; ranks that refuse nothing are left out.
        members: the process set of the refused operation.
        unread: ranks that only poll, and ask for no error before they continue with the barrier.
    """

    orders: tuple[tuple[tuple[Round | Letter, bool], ...], ...]
    limits: dict[tuple[int, Round | Letter], float]
    threads: frozenset[int]
    agreement: Round
    refused: dict[int, str] = field(default_factory=dict)
    members: Members = ()
    unread: frozenset[int] = frozenset()


Scene = Call | Crossing


@dataclass(frozen=True)
class Scenes:
    """The scenes by step they follow, and, by rank, the last messages of the job, some of them to ranks that leave."""

    after: dict[int, Scene] = field(default_factory=dict)
    last: tuple[tuple[tuple[Letter, bool], ...], ...] = ()


def draw(rng: Random, size: int, swarm: Swarm, script: Script) -> Scenes:
    """Draws scenes for a script; none if ranks leave early, and none with deadlocks if ranks poll."""
    if script.leavers:
        return Scenes()
    author = _Author(rng, size, sum(len(step) for step in script.steps) * 2 + 1000)
    found: dict[int, Scene] = {}
    for step in range(len(script.orders)):
        if swarm.calls and rng.random() < 0.4:
            found[step] = author.call()
        elif swarm.crossings and swarm.blocks and not swarm.polling and rng.random() < 0.6:
            found[step] = author.joins() if rng.random() < 0.3 else author.crossing()
    if swarm.refusals:
        side = aside(rng)
        refusing = _Author(side, size, author.number)
        for step in range(len(script.orders)):
            if step not in found and side.random() < 0.2:
                found[step] = refusing.refusal()
    seeds = aside(rng)
    writer, reader = Random(seeds.random()), Random(seeds.random())  # noqa: S311 - repeatable, like all of it
    found = _lettered(writer, size, swarm, found)
    found = _partly_unread(reader, size, found) if swarm.unread else found
    return Scenes(found, _last(writer, size) if swarm.letters and swarm.blocks and not swarm.polling else ())


def _last(rng: Random, size: int) -> tuple[tuple[tuple[Letter, bool], ...], ...]:
    """Draws sends and receives for the time before ranks leave; some ends never do their part."""
    nothing = Round(-1, "", {}, "")
    written = _with_letters(rng, size, Crossing(((),) * size, {}, frozenset(), nothing))
    return tuple(tuple((each, waits) for each, waits in order if isinstance(each, Letter)) for order in written.orders)


def _lettered(rng: Random, size: int, swarm: Swarm, found: dict[int, Scene]) -> dict[int, Scene]:
    """Adds sends and receives to crossings, except where ranks poll: nothing would end an unmatched receive there."""
    if not (swarm.letters and swarm.blocks) or swarm.polling:
        return found
    crossings = {step: scene for step, scene in found.items() if isinstance(scene, Crossing)}
    return found | {step: _with_letters(rng, size, scene) for step, scene in crossings.items()}


def _partly_unread(rng: Random, size: int, found: dict[int, Scene]) -> dict[int, Scene]:
    """Makes some ranks ask for no errors in the crossings."""
    return {
        step: replace(scene, unread=frozenset(rank for rank in range(size) if rng.random() < _UNREAD))
        if isinstance(scene, Crossing)
        else scene
        for step, scene in found.items()
    }


def _with_letters(rng: Random, size: int, crossing: Crossing) -> Crossing:
    """Inserts sends and receives on ranks without a second submitting thread; some ends never do their part."""
    orders = [[*order] for order in crossing.orders]
    ranks = [rank for rank in range(size) if rank not in crossing.threads]
    for number in range(rng.randint(1, 4) if len(ranks) > 1 else 0):
        sender, receiver = rng.sample(ranks, 2)
        letter = Letter(f"m{crossing.agreement.number}.{number}", sender, receiver, large=rng.random() < _LARGE)
        if rng.random() < _SENT:
            orders[sender].insert(rng.randint(0, len(orders[sender])), (letter, rng.random() < _AWAITED))
        if rng.random() < _RECEIVED:
            orders[receiver].insert(rng.randint(0, len(orders[receiver])), (letter, rng.random() < _AWAITED))
    return replace(crossing, orders=tuple(map(tuple, orders)))


def with_refusals(rng: Random, script: Script) -> Script:
    """Makes ranks refuse their parts of some rounds of a script, except joins and rounds with a mismatch."""
    changed: dict[Round, Round] = {}
    for turn in dict.fromkeys(chain.from_iterable(chain.from_iterable(script.orders))):
        if not turn.quarrel and turn.name[:4] != "join" and rng.random() < _REFUSED:
            chosen = rng.sample(turn.members, min(len(turn.members), rng.choice((1, 1, 1, 2, 3))))
            changed[turn] = replace(turn, refusers=frozenset(chosen))
    orders = tuple(tuple(tuple(changed.get(turn, turn) for turn in mine) for mine in step) for step in script.orders)
    return replace(script, orders=orders)


def in_phases(rng: Random, script: Script) -> Script:
    """Divides the tensors of a script among its phases, as a program has that trains and evaluates in turn.

    Names that occur once belong to no phase.
    """
    length, phases = rng.randint(4, 12), rng.choice((2, 2, 3))
    names = Counter(turn.name for step in script.steps for turn in step)
    phase = {name: rng.randrange(phases) if count > 1 else None for name, count in sorted(names.items())}

    def belongs(turn: Round, step: int) -> bool:
        return phase.get(turn.name) in {None, step // length % phases}

    steps = tuple(tuple(turn for turn in each if belongs(turn, step)) for step, each in enumerate(script.steps))
    orders = tuple(
        tuple(tuple(turn for turn in mine if belongs(turn, step)) for mine in each)
        for step, each in enumerate(script.orders)
    )
    return replace(script, steps=steps, orders=orders)


class _Author:
    """Draws scenes; counts rounds and calls."""

    def __init__(self, rng: Random, size: int, number: int) -> None:
        self._rng = rng
        self._size = size
        self.number = number
        self._calls = 0

    def call(self) -> Call:
        """Draws a call; in a steady call the operations are repeated under the same names."""
        self._calls += 1
        members = self._members()
        name = f"{self._calls}({members})" if members else str(self._calls)
        ranks = members or tuple(range(self._size))
        chosen = self._rng.sample(ranks, self._rng.choice((0, 1, 1, 1, 2)))
        steady = self._rng.random() < 0.4
        names = [f"s{number}" if steady else f"c{self._calls}.{number}" for number in range(self._rng.randint(1, 3))]
        told = names * (self._rng.randint(1, 5) if steady else 1)
        last = f"agreement.{self._calls}"
        rounds = [
            self._round(_request(one, members, call=name, transient=one == last or not steady), refusers=chosen)
            for one in (*told, last)
        ]
        refusals = {rank: self._rng.randrange(len(rounds)) for rank in sorted(chosen)}
        return Call(name, ranks, tuple(rounds), refusals)

    def crossing(self) -> Crossing:
        """Draws rounds in equal or different orders by rank; some waits are broken off, some ranks have threads."""
        mark, known = self.number, self._rng.random() < 0.5
        rounds = [
            self._round(
                _request(f"x{index}" if known else f"x{mark}.{index}", self._members(), transient=not known), free=True
            )
            for index in range(self._rng.randint(2, 4))
        ]
        orders, limits = list[tuple[tuple[Round | Letter, bool], ...]](), dict[tuple[int, Round | Letter], float]()
        reorder, patience = self._rng.random() < 0.7, self._rng.random() < 0.6
        for rank in range(self._size):
            mine = [turn for turn in rounds if rank in turn.parts]
            mine = self._rng.sample(mine, len(mine)) if reorder else mine
            orders.append(tuple((turn, self._rng.random() < 0.7) for turn in mine))
            for turn in mine if patience else ():
                if self._rng.random() < 0.6:
                    limits[rank, turn] = self._rng.expovariate(1 / _PATIENCE)
        threads = frozenset(rank for rank in range(self._size) if self._rng.random() < 0.15)
        found = Crossing(tuple(orders), limits, threads, self._agreement(mark))
        return self._partly_refused(found, rounds) if self._rng.random() < 0.3 else found

    def _partly_refused(self, crossing: Crossing, rounds: list[Round]) -> Crossing:
        """Makes one rank refuse one of the rounds, before it submits the others."""
        turn = self._rng.choice(rounds)
        refuser = self._rng.choice(turn.members)
        changed = replace(turn, refusers=frozenset([refuser]))
        orders = tuple(
            tuple((changed if one is turn else one, waits) for one, waits in mine if rank != refuser or one is not turn)
            for rank, mine in enumerate(crossing.orders)
        )
        limits = {(rank, changed if one is turn else one): limit for (rank, one), limit in crossing.limits.items()}
        members = turn.parts[refuser].request.members
        return replace(crossing, orders=orders, limits=limits, refused={refuser: turn.name}, members=members)

    def joins(self) -> Crossing:
        """Draws process sets, each joined by some of its members; never all ranks, whose barrier comes after."""
        mark = self.number
        rounds: list[Round] = []
        chosen: dict[int, Round] = {}
        for rank in self._rng.sample(range(self._size), self._rng.randint(2, self._size)):
            fitting = [turn for turn in rounds if rank in turn.parts]
            if not fitting or self._rng.random() < 0.5:
                others = [other for other in range(self._size) if other != rank]
                members = tuple(sorted([rank, *self._rng.sample(others, self._rng.randint(0, self._size - 2))]))
                if all(members != turn.members for turn in rounds):
                    name = f"join.noname.{mark}({members})"
                    fitting = [self._round(Request(Kind.JOIN, name, members=members, transient=True), free=True)]
                    rounds += fitting
            if fitting:
                chosen[rank] = fitting[-1]
        orders = tuple(((chosen[rank], True),) if rank in chosen else () for rank in range(self._size))
        return Crossing(orders, {}, frozenset(), self._agreement(mark))

    def refusal(self) -> Crossing:
        """Draws an operation that some members refuse and the others announce."""
        return self._rng.choices([self.group, self.refused_join, self.refused_elsewhere], [3, 1, 1])[0]()

    def group(self) -> Crossing:
        """Draws a group of operations that some members refuse, unnamed or steady; its size may differ by rank."""
        mark, members = self.number, self._members()
        ranks = members or tuple(range(self._size))
        steady, alike = self._rng.random() < 0.5, self._rng.random() < 0.5
        base = f"group({members})" if steady else f"allreduce.noname.{mark}"
        chosen = self._rng.sample(ranks, self._rng.choice((0, 1, 1) if alike else (1, 1, 2)))
        common = self._rng.randint(1, 3)
        rounds: dict[str | None, Round] = {}
        orders: list[tuple[tuple[Round, bool], ...]] = []
        refused = {}
        for rank in range(self._size):
            size = common if alike else self._rng.randint(1, 3)
            names = places(base, size) if steady else names_in_group(base, [None] * size)
            if rank in chosen:
                (refused[rank],) = refused_names([str(name) for name in names])
            mine = names if rank in {*ranks} - {*chosen} else []
            for name in mine:
                if name not in rounds:
                    request = _request(str(name), members, transient=not steady)
                    rounds[name] = self._round(request, refusers=chosen, free=True)
            orders.append(tuple((rounds[name], False) for name in mine))
        return Crossing(tuple(orders), {}, frozenset(), self._agreement(mark), refused, members)

    def refused_join(self) -> Crossing:
        """Draws a process set that some members refuse to join, and the others join."""
        mark, members = self.number, self._members()
        ranks = members or tuple(range(self._size))
        chosen = self._rng.sample(ranks, self._rng.choice((1, 1, 2)))
        request = Request(Kind.JOIN, f"join.noname.{mark}({members})", members=members, transient=True)
        turn = self._round(request, refusers=chosen, free=True)
        orders = tuple(((turn, True),) if rank in {*ranks} - {*chosen} else () for rank in range(self._size))
        refused = dict.fromkeys(chosen, request.name)
        return Crossing(orders, {}, frozenset(), self._agreement(mark), refused, members)

    def refused_elsewhere(self) -> Crossing:
        """Draws an operation that one rank refuses with another process set than the other ranks submit it with."""
        mark, ranks = self.number, range(self._size)
        refuser, *common = self._rng.sample(ranks, 2)
        sets = [{refuser, *common, *self._rng.sample(ranks, self._rng.randrange(self._size))} for _ in range(2)]
        announced, refused = (() if len(each) == self._size else tuple(sorted(each)) for each in sets)
        name = f"e{announced}{refused}" if self._rng.random() < 0.5 else f"e{mark}"
        request = _request(name, announced, transient=name == f"e{mark}")
        turn = self._round(request, refusers=[refuser], free=True)
        orders = tuple(((turn, True),) if rank in sets[0] - {refuser} else () for rank in ranks)
        return Crossing(orders, {}, frozenset(), self._agreement(mark), {refuser: name}, refused)

    def _agreement(self, mark: int) -> Round:
        return self._round(Request(Kind.BARRIER, f"agree{mark}", transient=True), free=True)

    def _members(self) -> Members:
        members = tuple(sorted(self._rng.sample(range(self._size), self._rng.randint(2, self._size))))
        return () if len(members) == self._size else members

    def _round(self, request: Request, *, refusers: Sequence[int] = (), free: bool = False) -> Round:
        self.number += 1
        part = Part(request, sum(request.name.encode()), filler=False)
        parts = dict.fromkeys(request.members or range(self._size), part)
        return Round(self.number, request.name, parts, "", refusers=frozenset(refusers), free=free)


def _request(name: str, members: Members, *, call: str = "", transient: bool = True) -> Request:
    return Request(Kind.ALLREDUCE, name, "float32", (2,), members=members, transient=transient, call=call)
