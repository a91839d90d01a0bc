"""Simulates a plan: whether it ends, how long it takes, when ranks are idle, and how much memory it needs. Pure.

Ranks are processes that wait only for messages, so the result does not depend on the order in which they are simulated:
each rank is followed until it waits, and again when the awaited message is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from coordd.errors import CoorddError
from coordd.pipeline.action import COMPUTE, DIRECTION, RECEIVES, SENDS, Action, Kind
from coordd.pipeline.plan import Plan

__all__ = ["Costs", "PlanError", "Span", "Timeline", "simulate"]

_FREES = frozenset({Kind.BACKWARD, Kind.WEIGHT})
_MADE_BY = {Kind.SEND_FORWARD: Kind.FORWARD, Kind.SEND_BACKWARD: Kind.INPUT}
_PARTS = {
    Kind.FORWARD: (Kind.FORWARD,),
    Kind.BACKWARD: (Kind.INPUT, Kind.WEIGHT),
    Kind.INPUT: (Kind.INPUT,),
    Kind.WEIGHT: (Kind.WEIGHT,),
}
_FIRST = {Kind.INPUT: Kind.FORWARD, Kind.WEIGHT: Kind.INPUT}
_SHOWN = 4

_Channel = tuple[int, int, int, int]
"""The source rank and its stage, and the target rank and its stage."""

_Message = tuple[int, int, int]
"""The source stage, the target stage, and the microbatch."""


class PlanError(CoorddError):
    """A plan that cannot be executed; the text says which ranks wait for each other, or which action is impossible."""


@dataclass(frozen=True)
class Costs:
    """Costs of the actions of each stage, in seconds and bytes; by default one second for each pass.

    Attributes:
        forward: seconds of a forward pass, by stage.
        inward: seconds of the part of a backward pass that computes the gradients of the inputs.
        weight: seconds of its other part, the gradients of the weights.
        transfer: seconds from one stage to another, by pair; 0 if a pair is missing.
        volume: bytes from one stage to another, by pair, in each direction.
        activation: bytes that a microbatch keeps between its passes, by stage.
        reduce: seconds of the reduction of a stage's gradients.
    """

    forward: Sequence[float]
    inward: Sequence[float]
    weight: Sequence[float]
    transfer: Mapping[tuple[int, int], float] = field(default_factory=dict)
    volume: Mapping[tuple[int, int], int] = field(default_factory=dict)
    activation: Sequence[float] = ()
    reduce: Sequence[float] = ()

    @classmethod
    def even(cls, stages: int, *, forward: float = 1.0, inward: float = 1.0, weight: float = 1.0) -> Costs:
        """Returns equal costs for all stages, which keep one unit of memory per microbatch."""
        return cls([forward] * stages, [inward] * stages, [weight] * stages, activation=[1.0] * stages)

    def seconds(self, action: Action) -> float:
        """Returns the seconds for which an action keeps its rank busy."""
        match action.kind:
            case Kind.FORWARD:
                return self.forward[action.stage]
            case Kind.BACKWARD:
                return self.inward[action.stage] + self.weight[action.stage]
            case Kind.INPUT:
                return self.inward[action.stage]
            case Kind.WEIGHT:
                return self.weight[action.stage]
            case _:
                return 0.0


class Span(NamedTuple):
    """The begin and the end of an action, in seconds."""

    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Timeline of an executed plan.

    Attributes:
        spans: for each rank its passes, in order.
        peaks: for each rank the most bytes of live activations.
        volume: bytes sent between ranks.
        makespan: when the last rank finished, in seconds.
        steps: for each rank its waits for shared gradients and weight updates, if measured; not counted in the makespan
            unless passes follow.
    """

    spans: tuple[tuple[Span, ...], ...]
    peaks: tuple[float, ...]
    volume: int
    makespan: float
    steps: tuple[tuple[Span, ...], ...] = ()

    @property
    def step(self) -> float:
        """The most seconds that any rank spent in steps."""
        return max((sum(span.end - span.begin for span in mine) for mine in self.steps), default=0.0)

    def busy(self, rank: int) -> float:
        """Returns the seconds that a rank computed."""
        return sum(span.end - span.begin for span in self.spans[rank])

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which they did not compute."""
        busy = sum(map(self.busy, range(len(self.spans))))
        return 1 - busy / (self.makespan * len(self.spans)) if self.makespan else 0.0


def simulate(plan: Plan, costs: Costs | None = None, *, depth: int | None = None) -> Timeline:
    """Executes a lowered plan in virtual time.

    Args:
        plan: with its sends and receives; see `lower`.
        costs: of its actions; by default one second for each pass.
        depth: number of messages that a channel holds before their receives are posted; beyond it the sender waits.
            None for no limit, 0 for a sender that waits until the receive is posted.

    Raises:
        PlanError: the plan cannot be executed: a result is used before it is there, an action is done twice or not at
            all, or ranks wait for each other for ever.
    """
    run = _Run(plan, costs or Costs.even(plan.stages), depth)
    ready = list(range(len(plan.actions)))
    while ready:
        ready += run.follow(ready.pop())
    run.check_end()
    return run.timeline()


class _Run:
    """The state of a plan's execution."""

    def __init__(self, plan: Plan, costs: Costs, depth: int | None) -> None:
        self._plan = plan
        self._costs = costs
        self._depth = depth
        ranks = range(len(plan.actions))
        self._place = [0 for _ in ranks]
        self._clock = [0.0 for _ in ranks]
        self._spans: list[list[Span]] = [[] for _ in ranks]
        self._live = [0.0 for _ in ranks]
        self._peaks = [0.0 for _ in ranks]
        self._volume = 0
        self._done: set[tuple[int, Kind, int]] = set()
        self._posted: dict[_Message, float] = {}
        self._sent: dict[_Message, float] = {}
        self._waited: dict[tuple[int, str, int], list[_Message]] = {}
        self._held: dict[_Channel, int] = {}
        self._reduced: dict[tuple[int, int], float] = {}
        self._waiting: dict[object, int] = {}

    def follow(self, rank: int) -> Iterator[int]:
        """Follows a rank until it waits or is done; yields the ranks that can then continue."""
        actions = self._plan.actions[rank]
        while self._place[rank] < len(actions):
            action = actions[self._place[rank]]
            wanted, given = self._attempt(rank, action)
            if wanted is not None:
                self._waiting[wanted] = rank
                return
            self._place[rank] += 1
            if given in self._waiting:
                yield self._waiting.pop(given)

    def check_end(self) -> None:
        """Raises `PlanError` if a rank waits for ever, or a microbatch was not processed."""
        stuck = [rank for rank, actions in enumerate(self._plan.actions) if self._place[rank] < len(actions)]
        if stuck:
            told = [f"rank {rank} at {self._plan.actions[rank][self._place[rank]]}" for rank in stuck[:_SHOWN]]
            more = f" and {len(stuck) - _SHOWN} more ranks" if len(stuck) > _SHOWN else ""
            raise PlanError(f"the plan {self._plan.name} never ends: {', '.join(told)}{more} wait for each other")
        wanted = {Kind.FORWARD, Kind.WEIGHT} & {kind for _, kind, _ in self._done}
        for stage in range(self._plan.stages):
            for microbatch in range(self._plan.microbatches):
                if not wanted or any((stage, kind, microbatch) not in self._done for kind in wanted):
                    raise PlanError(
                        f"the plan {self._plan.name} leaves microbatch {microbatch} undone in stage {stage}"
                    )

    def timeline(self) -> Timeline:
        """Returns the timeline of the execution."""
        return Timeline(tuple(map(tuple, self._spans)), tuple(self._peaks), self._volume, max(self._clock, default=0.0))

    def _attempt(self, rank: int, action: Action) -> tuple[object, object]:
        """Executes an action if possible; returns the event that it waits for, and the event that it provides."""
        if action.kind in COMPUTE:
            return self._compute(rank, action)
        if action.kind in SENDS:
            return self._send(rank, action)
        if action.kind in RECEIVES:
            return self._receive(rank, action)
        return self._settle(rank, action)

    def _compute(self, rank: int, action: Action) -> tuple[object, object]:
        stage, kind, microbatch, _ = action
        messages = self._waited.get((stage, DIRECTION[kind], microbatch), [])
        for message in messages:
            if message not in self._sent:
                return message, None
        for message in messages:
            self._clock[rank] = max(self._clock[rank], self._arrival(message))
        self._demand(self._plan.rank(stage, microbatch) == rank, rank, action, "it has no business with it")
        for part in _PARTS[kind]:
            self._demand((stage, part, microbatch) not in self._done, rank, action, "it was done before")
            self._demand(
                part is Kind.FORWARD or (stage, _FIRST[part], microbatch) in self._done, rank, action, "it is too early"
            )
            self._done.add((stage, part, microbatch))
        begin = self._clock[rank]
        self._clock[rank] += self._costs.seconds(action)
        self._spans[rank].append(Span(action, begin, self._clock[rank]))
        self._remember(rank, action)
        return None, None

    def _remember(self, rank: int, action: Action) -> None:
        """Updates the live activations."""
        size = self._costs.activation[action.stage] if self._costs.activation else 0.0
        if action.kind is Kind.FORWARD:
            self._live[rank] += size
            self._peaks[rank] = max(self._peaks[rank], self._live[rank])
        elif action.kind in _FREES:
            self._live[rank] -= size

    def _send(self, rank: int, action: Action) -> tuple[object, object]:
        stage, kind, microbatch, peer = action
        self._demand((stage, _MADE_BY[kind], microbatch) in self._done, rank, action, "there is nothing to send yet")
        message = (stage, peer, microbatch)
        if self._depth is not None and message not in self._posted:
            channel = self._channel(message)
            held = self._held.get(channel, 0)
            if held >= self._depth:
                return ("room", channel), None
            self._held[channel] = held + 1
        self._sent[message] = self._clock[rank]
        self._volume += self._costs.volume.get(_pair(message), 0)
        return None, message

    def _receive(self, rank: int, action: Action) -> tuple[object, object]:
        stage, kind, microbatch, peer = action
        message = (peer, stage, microbatch)
        self._posted[message] = self._clock[rank]
        self._waited.setdefault((stage, DIRECTION[kind], microbatch), []).append(message)
        if self._depth is None:
            return None, None
        channel = self._channel(message)
        if message in self._sent:
            self._held[channel] -= 1
        return None, ("room", channel)

    def _channel(self, message: _Message) -> _Channel:
        source, target, microbatch = message
        return self._plan.rank(source, microbatch), self._plan.rank(target, microbatch), source, target

    def _arrival(self, message: _Message) -> float:
        """Returns when a message arrives: its transfer starts once it is sent and its receive is posted."""
        return max(self._sent[message], self._posted[message]) + self._costs.transfer.get(_pair(message), 0.0)

    def _settle(self, rank: int, action: Action) -> tuple[None, None]:
        """Starts a reduction, or waits for one before the optimizer's step."""
        if action.kind is Kind.REDUCE:
            seconds = self._costs.reduce[action.stage] if self._costs.reduce else 0.0
            self._reduced[rank, action.stage] = self._clock[rank] + seconds
        else:
            self._clock[rank] = max(self._clock[rank], self._reduced.pop((rank, action.stage), 0.0))
        return None, None

    def _demand(self, fact: object, rank: int, action: Action, text: str) -> None:
        if not fact:
            raise PlanError(f"the plan {self._plan.name} has rank {rank} do {action}, but {text}")


def _pair(message: _Message) -> tuple[int, int]:
    source, target, _ = message
    return min(source, target), max(source, target)
