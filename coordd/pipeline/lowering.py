"""Adds to a schedule what makes it run on many ranks: sends, receives, and the reductions of gradients. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from coordd.pipeline.action import DIRECTION, RECEIVES, Action, Kind
from coordd.pipeline.plan import Plan
from coordd.pipeline.simulate import simulate

__all__ = ["chain", "lower"]

Flows = Iterable[tuple[int, int]]
"""Which stage's results which later stage takes."""

_AFTER = {Kind.FORWARD: Kind.SEND_FORWARD, Kind.BACKWARD: Kind.SEND_BACKWARD, Kind.INPUT: Kind.SEND_BACKWARD}
_BEFORE = {Kind.FORWARD: Kind.RECV_FORWARD, Kind.BACKWARD: Kind.RECV_BACKWARD, Kind.INPUT: Kind.RECV_BACKWARD}
_LAST = frozenset({Kind.BACKWARD, Kind.WEIGHT})


def chain(stages: int) -> list[tuple[int, int]]:
    """The flows of stages that take what the one before gives, and nothing else."""
    return [(stage, stage + 1) for stage in range(stages - 1)]


def lower(plan: Plan, flows: Flows, *, tied: Collection[int] = ()) -> Plan:
    """Adds what moves.

    A receive stands where, if all passes took the same time, its sender would begin to make what is received; whoever
    needs it waits for it. So receives are under way before anything is sent, and there is an order of all actions in
    which each stands behind all that it waits for: no buffers are needed for the plan to end, whatever it costs. A
    reduction stands right after the last gradient that it is of, and overlaps what is left of the pipeline.

    Args:
        plan: what is computed.
        flows: which stage's results which later stage takes.
        tied: stages that share parameters with others.

    Raises:
        PlanError: it cannot be carried out.
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
    """For each stage those that take its results, and those whose results it takes."""
    later: list[list[int]] = [[] for _ in plan.placement]
    earlier: list[list[int]] = [[] for _ in plan.placement]
    for source, target in plan.flows:
        later[source].append(target)
        earlier[target].append(source)
    return later, earlier


def _moves(
    plan: Plan, action: Action, rank: int, kinds: Mapping[Kind, Kind], peers: Sequence[Sequence[int]]
) -> Iterator[Action]:
    """What a pass takes from other ranks, or gives them."""
    if action.kind in kinds:
        for peer in peers[action.stage]:
            if plan.rank(peer, action.microbatch) != rank:
                yield Action(action.stage, kinds[action.kind], action.microbatch, peer)


def _hoist(plan: Plan) -> Plan:
    """Moves receives up to where their senders begin to make what is received."""
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
    """Puts a reduction before each step, as early as may be."""
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
