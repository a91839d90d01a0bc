"""Lowers a schedule to many ranks: adds sends, receives, and the reductions of gradients. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from coordd.pipeline.action import DIRECTION, RECEIVES, Action, Kind
from coordd.pipeline.plan import Plan
from coordd.pipeline.simulate import simulate

__all__ = ["chain", "lower"]

Flows = Iterable[tuple[int, int]]
"""Pairs of stages: the second takes the results of the first."""

_AFTER = {Kind.FORWARD: Kind.SEND_FORWARD, Kind.BACKWARD: Kind.SEND_BACKWARD, Kind.INPUT: Kind.SEND_BACKWARD}
_BEFORE = {Kind.FORWARD: Kind.RECV_FORWARD, Kind.BACKWARD: Kind.RECV_BACKWARD, Kind.INPUT: Kind.RECV_BACKWARD}
_LAST = frozenset({Kind.BACKWARD, Kind.WEIGHT})


def chain(stages: int) -> list[tuple[int, int]]:
    """Returns the flows of a chain: each stage takes only the results of the previous stage."""
    return [(stage, stage + 1) for stage in range(stages - 1)]


def lower(plan: Plan, flows: Flows, *, tied: Collection[int] = ()) -> Plan:
    """Adds sends, receives and reductions to a plan.

    A receive is placed where, if all passes took the same time, its sender would begin to compute the result; the pass
    that needs it waits for it. So receives are posted before anything is sent, and there is an order of all actions in
    which each comes after all actions that it waits for: the plan ends without any buffers, whatever the costs. A
    reduction comes right after the last gradient that it includes, and overlaps the rest of the pipeline.

    Args:
        plan: the passes and steps.
        flows: pairs of stages: the second takes the results of the first.
        tied: stages that share parameters with others.

    Raises:
        PlanError: the plan cannot be executed.
    """
    plan = replace(plan, flows=tuple(flows))
    later, earlier = _neighbours(plan)

    def moved(rank: int) -> Iterator[Action]:
        for action in _reduced(plan, rank, tied):
            givers, takers = (earlier, later) if action.kind is Kind.FORWARD else (later, earlier)
            yield from _moves(plan, action, rank, _BEFORE, givers)
            yield action
            yield from _moves(plan, action, rank, _AFTER, takers)

    return _hoist(replace(plan, actions=tuple(tuple(moved(rank)) for rank in range(len(plan.actions)))))


def _neighbours(plan: Plan) -> tuple[list[list[int]], list[list[int]]]:
    """Returns, for each stage, the stages that take its results, and the stages whose results it takes."""
    later: list[list[int]] = [[] for _ in plan.placement]
    earlier: list[list[int]] = [[] for _ in plan.placement]
    for source, target in plan.flows:
        later[source].append(target)
        earlier[target].append(source)
    return later, earlier


def _moves(
    plan: Plan, action: Action, rank: int, kinds: Mapping[Kind, Kind], peers: Sequence[Sequence[int]]
) -> Iterator[Action]:
    """Yields the receives or sends of a pass from or to other ranks."""
    if action.kind in kinds:
        for peer in peers[action.stage]:
            if plan.rank(peer, action.microbatch) != rank:
                yield Action(action.stage, kinds[action.kind], action.microbatch, peer)


def _hoist(plan: Plan) -> Plan:
    """Moves receives up to where their senders begin to compute the result."""
    begins = {
        (span.action.stage, DIRECTION[span.action.kind], span.action.microbatch): span.begin
        for mine in simulate(plan).spans
        for span in mine
    }

    def hoisted(actions: Iterable[Action]) -> Iterator[Action]:
        receives = [action for action in actions if action.kind in RECEIVES]
        receives.sort(key=lambda action: begins[action.peer, DIRECTION[action.kind], action.microbatch], reverse=True)
        for action in actions:
            begin = begins.get((action.stage, DIRECTION.get(action.kind, ""), action.microbatch), 0.0)
            while (
                receives and begins[receives[-1].peer, DIRECTION[receives[-1].kind], receives[-1].microbatch] <= begin
            ):
                yield receives.pop()
            if action.kind not in RECEIVES:
                yield action

    return replace(plan, actions=tuple(tuple(hoisted(actions)) for actions in plan.actions))


def _reduced(plan: Plan, rank: int, tied: Collection[int]) -> list[Action]:
    """Inserts a reduction before each step, as early as possible."""
    out: list[Action] = []
    last: dict[int, int] = {}
    for action in plan.actions[rank]:
        if action.kind is Kind.STEP and (action.stage in tied or len(plan.placement[action.stage]) > 1):
            place = last.pop(action.stage)
            out.insert(place, action._replace(kind=Kind.REDUCE))
            last = {stage: at + (at > place) for stage, at in last.items()}
        out.append(action)
        if action.kind in _LAST:
            last[action.stage] = len(out)
    return out
