"""Pipeline schedules: pure functions from numbers to a `Plan`.

They define only the order of passes, and when optimizers step; `coordd.pipeline.lowering` adds sends, receives and
reductions. ``microbatches`` is the number for one replica; a step has this number for each rank of the widest stage.

Sources: GPipe (arXiv 1811.06965), PipeDream (SOSP 2019), PipeDream-2BW and its flush (arXiv 2006.09503), interleaving
(arXiv 2104.04473), eager 1F1B (arXiv 2211.05322), zero bubble (arXiv 2401.10241) and its V (arXiv 2405.15362).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from coordd.errors import ArgumentError
from coordd.pipeline.action import Action, Kind
from coordd.pipeline.plan import Plan
from coordd.pipeline.schedules.placement import Placement, fold, loop, spread
from coordd.pipeline.schedules.zero_bubble_v import order_v

__all__ = [
    "eager",
    "gpipe",
    "interleaved",
    "one_f_one_b",
    "pipedream",
    "two_buffered",
    "zero_bubble",
    "zero_bubble_far",
    "zero_bubble_far_lean",
    "zero_bubble_lean",
    "zero_bubble_v",
]

FORWARD, BACKWARD, INPUT, WEIGHT = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT

Order = Callable[[int, Sequence[int]], Iterator[Action]]
"""Yields the actions of a stage for the microbatches of one of its replicas."""


def gpipe(stages: int, microbatches: int, *, replicas: int | Sequence[int] = 1) -> Plan:
    """All forward, then all backward: idle for ``stages - 1`` passes each way, and all activations are live."""
    placement, count = _spread(stages, microbatches, replicas)

    def order(stage: int, mine: Sequence[int]) -> Iterator[Action]:
        for kind in (FORWARD, BACKWARD):
            yield from (Action(stage, kind, i) for i in mine)
        yield Action(stage, Kind.STEP)

    return _plan("gpipe", count, placement, order)


def one_f_one_b(stages: int, microbatches: int, *, replicas: int | Sequence[int] = 1) -> Plan:
    """PipeDream-Flush, one forward, one backward: idle as GPipe, but stage ``s`` keeps ``stages - s`` activations."""
    placement, count = _spread(stages, microbatches, replicas)

    def order(stage: int, mine: Sequence[int]) -> Iterator[Action]:
        yield from _alternate(stage, mine, _warm_up(placement, stage))
        yield Action(stage, Kind.STEP)

    return _plan("1f1b", count, placement, order)


def eager(stages: int, microbatches: int, *, replicas: int | Sequence[int] = 1) -> Plan:
    """1F1B with ``stages - 1 - s`` more forward passes in advance, so that messages overlap with computing.

    No rank waits for messages that take no longer than a pass; in exchange it keeps nearly twice the activations.
    """
    placement, count = _spread(stages, microbatches, replicas)

    def order(stage: int, mine: Sequence[int]) -> Iterator[Action]:
        yield from _alternate(stage, mine, 2 * _warm_up(placement, stage) - 1)
        yield Action(stage, Kind.STEP)

    return _plan("1f1b-eager", count, placement, order)


def pipedream(stages: int, microbatches: int, *, replicas: int | Sequence[int] = 1) -> Plan:
    """One forward, one backward, and a step after each backward.

    There is no idle time in between, in exchange for stale weights: microbatch ``t`` uses version ``t - (stages - 1 -
    s)`` of stage ``s``'s weights, in both directions.
    """
    placement, count = _spread(stages, microbatches, replicas)

    def order(stage: int, mine: Sequence[int]) -> Iterator[Action]:
        for action in _alternate(stage, mine, _warm_up(placement, stage)):
            yield action
            if action.kind is BACKWARD:
                yield Action(stage, Kind.STEP, action.microbatch)

    versions = [
        [max(0, i // len(ranks) + 1 - _warm_up(placement, stage)) for i in range(count)]
        for stage, ranks in enumerate(placement)
    ]
    return _plan("pipedream", count, placement, order, versions)


def two_buffered(stages: int, microbatches: int, *, steps: int = 1, replicas: int | Sequence[int] = 1) -> Plan:
    """One forward, one backward over several steps without a flush (2BW): gradients are those of the previous weights.

    Raises:
        ArgumentError: there are fewer microbatches than stages, so two versions of the weights would not suffice.
    """
    if microbatches < stages:
        raise ArgumentError(
            f"2bw needs as many microbatches as stages, not {microbatches} for {stages}: raise microbatches"
        )
    placement, count = _spread(stages, microbatches * steps, replicas)
    wide = count // steps

    def order(stage: int, mine: Sequence[int]) -> Iterator[Action]:
        each = len(mine) // steps
        for action in _alternate(stage, mine, _warm_up(placement, stage)):
            yield action
            if action.kind is BACKWARD and (done := mine.index(action.microbatch) + 1) % each == 0:
                yield Action(stage, Kind.STEP, done // each - 1)

    versions = [[i // wide - 1 for i in range(count)] for _ in placement]
    return _plan("2bw", count, placement, order, versions)


def interleaved(ranks: int, microbatches: int, *, chunks: int = 2, replicas: int = 1) -> Plan:
    """One forward, one backward with several stages on each rank: idle for a ``chunks``-th of the time of 1F1B.

    Microbatches pass through a rank's stages in groups of at least the number of ranks, so any number of them works.
    """
    groups = _groups(microbatches, max(1, microbatches // ranks))

    def order(rank: int) -> Iterator[Action]:
        mine = [rank + ranks * chunk for chunk in range(chunks)]
        forward = [Action(stage, FORWARD, i) for group in groups for stage in mine for i in group]
        backward = [Action(stage, BACKWARD, i) for group in groups for stage in reversed(mine) for i in group]
        ahead = 2 * (ranks - 1 - rank) + (chunks - 1) * len(groups[0]) + 1
        yield from _weave(forward, backward, ahead)
        yield from (Action(stage, Kind.STEP) for stage in mine)

    orders = [list(order(rank)) for rank in range(ranks)]
    return _replicate("interleaved", microbatches, loop(ranks, chunks, replicas=replicas), orders)


def zero_bubble(stages: int, microbatches: int, *, replicas: int = 1) -> Plan:
    """ZB-H1: gradients of weights fill the gaps, a third of which is left; every stage keeps ``stages`` activations."""
    orders = [_put_off(stage, microbatches, stages - stage, stage) for stage in range(stages)]
    return _replicate("zb-h1", microbatches, loop(stages, 1, replicas=replicas), orders)


def zero_bubble_far(stages: int, microbatches: int, *, replicas: int = 1) -> Plan:
    """ZB-H2: twice as many forward passes in advance, so that in steady state no rank waits for passes or for messages.

    A rank is idle only until the first microbatch reaches it, if there are ``2 * stages - 2`` microbatches and passes
    for inputs take at most twice as long as the others; every stage keeps ``2 * stages - 1`` activations.
    """
    orders = [_put_off(stage, microbatches, 2 * (stages - stage) - 1, 2 * stage) for stage in range(stages)]
    return _replicate("zb-h2", microbatches, loop(stages, 1, replicas=replicas), orders)


def zero_bubble_lean(stages: int, microbatches: int, *, replicas: int = 1) -> Plan:
    """ZB-H1's time and memory with few split passes, because two halves cost more than one whole pass.

    For any number of microbatches, only the first ``stage`` ones, whose gradients other ranks wait for while they have
    nothing else to do, and the last ``stages - 1`` are split. Deferred weight gradients fill the gaps at the end.
    """
    orders = [_put_off_few(stage, stages, microbatches, stages - stage, stage) for stage in range(stages)]
    return _replicate("zb-lean", microbatches, loop(stages, 1, replicas=replicas), orders)


def zero_bubble_far_lean(stages: int, microbatches: int, *, replicas: int = 1) -> Plan:
    """ZB-H2's memory, and its time unless passes for inputs take much longer than the others, with few split passes."""
    orders = [_put_off_few(stage, stages, microbatches, 2 * (stages - stage) - 1, 2 * stage) for stage in range(stages)]
    return _replicate("zb-h2-lean", microbatches, loop(stages, 1, replicas=replicas), orders)


def zero_bubble_v(ranks: int, microbatches: int, *, replicas: int = 1) -> Plan:
    """ZB-V: two stages on each rank, one down and one back up; the memory of 1F1B with hardly any idle time."""
    return _replicate("zb-v", microbatches, fold(ranks, replicas=replicas), order_v(ranks, microbatches))


def _spread(stages: int, microbatches: int, replicas: int | Sequence[int]) -> tuple[Placement, int]:
    placement = spread(stages, replicas)
    count = microbatches * max(map(len, placement))
    for stage, ranks in enumerate(placement):
        if count % len(ranks):
            raise ArgumentError(
                f"{count} microbatches cannot be dealt out to the {len(ranks)} replicas of stage {stage}: "
                f"make microbatches a multiple of it"
            )
    return placement, count


def _plan(name: str, count: int, placement: Placement, order: Order, versions: Sequence[Sequence[int]] = ()) -> Plan:
    actions: list[tuple[Action, ...]] = [()] * sum(map(len, placement))
    for stage, ranks in enumerate(placement):
        for replica, rank in enumerate(ranks):
            actions[rank] = tuple(order(stage, range(replica, count, len(ranks))))
    return Plan(name, count, placement, tuple(actions), tuple(map(tuple, versions)))


def _replicate(name: str, microbatches: int, placement: Placement, orders: Sequence[Sequence[Action]]) -> Plan:
    """Gives each replica the same order, with microbatches of its own."""
    replicas = len(placement[0])
    actions = tuple(
        tuple(_deal(action, replica, replicas) for action in order) for replica in range(replicas) for order in orders
    )
    return Plan(name, microbatches * replicas, placement, actions)


def _deal(action: Action, replica: int, replicas: int) -> Action:
    return action if action.microbatch < 0 else action._replace(microbatch=action.microbatch * replicas + replica)


def _put_off(stage: int, microbatches: int, ahead: int, behind: int) -> list[Action]:
    """One forward, one backward, with weight gradients deferred by ``behind`` microbatches."""
    order = [Action(stage, FORWARD, i) for i in range(min(ahead, microbatches))]
    for i in range(microbatches):
        order.append(Action(stage, INPUT, i))
        if i >= behind:
            order.append(Action(stage, WEIGHT, i - behind))
        if i + ahead < microbatches:
            order.append(Action(stage, FORWARD, i + ahead))
    order += [Action(stage, WEIGHT, i) for i in range(max(0, microbatches - behind), microbatches)]
    return [*order, Action(stage, Kind.STEP)]


def _put_off_few(stage: int, stages: int, microbatches: int, ahead: int, behind: int) -> list[Action]:
    """One forward, one backward; split only for the first ``behind`` microbatches and the last ``stages - 1``."""
    order, owed = [Action(stage, FORWARD, i) for i in range(min(ahead, microbatches))], deque[int]()
    for i in range(microbatches):
        if stage and (i < behind or i > microbatches - stages):
            owed.append(i)
            order.append(Action(stage, INPUT, i))
            if len(owed) > behind:
                order.append(Action(stage, WEIGHT, owed.popleft()))
        else:
            order.append(Action(stage, BACKWARD, i))
        if i + ahead < microbatches:
            order.append(Action(stage, FORWARD, i + ahead))
    return [*order, *(Action(stage, WEIGHT, i) for i in owed), Action(stage, Kind.STEP)]


def _warm_up(placement: Placement, stage: int) -> int:
    """Returns the number of forward passes of a rank before its first backward pass."""
    return -(-sum(map(len, placement[stage:])) // len(placement[stage]))


def _alternate(stage: int, mine: Sequence[int], ahead: int) -> Iterator[Action]:
    return _weave([Action(stage, FORWARD, i) for i in mine], [Action(stage, BACKWARD, i) for i in mine], ahead)


def _weave(forward: Sequence[Action], backward: Sequence[Action], ahead: int) -> Iterator[Action]:
    """Yields ``ahead`` forward actions, then backward and forward in turn, then the rest."""
    yield from forward[:ahead]
    for place, action in enumerate(backward):
        yield action
        if ahead + place < len(forward):
            yield forward[ahead + place]


def _groups(count: int, groups: int) -> list[range]:
    """Cuts a range into groups of nearly equal sizes, larger ones first."""
    bounds = [-(-count * group // groups) for group in range(groups + 1)]
    return [range(bounds[group], bounds[group + 1]) for group in range(groups)]
