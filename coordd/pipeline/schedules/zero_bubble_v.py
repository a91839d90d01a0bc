"""Greedy scheduler of ZB-V (zero-bubble V): in every tick each rank runs the most preferred pass that is ready. Pure.

A rank has a stage on the way down and one on the way back. With passes of equal length, six per rank and microbatch,
this finds plans that are idle for ``ranks - 1`` ticks, the minimum possible, and never keeps more activations than 1F1B
does on its first rank. The idea is from arXiv 2405.15362; the preferences were found by trying all orders of them on
small pipelines.
"""

from __future__ import annotations

from collections.abc import Iterator

from coordd.pipeline.action import Action, Kind

__all__ = ["order_v"]

FORWARD, INPUT, WEIGHT = Kind.FORWARD, Kind.INPUT, Kind.WEIGHT

_THERE, _BACK = 0, 1
_PREFERENCES = (
    (FORWARD, _BACK),
    (INPUT, _THERE),
    (WEIGHT, _THERE),
    (INPUT, _BACK),
    (FORWARD, _THERE),
    (WEIGHT, _BACK),
)


def order_v(ranks: int, microbatches: int) -> list[list[Action]]:
    """Orders the passes of ``2 * ranks`` stages; rank ``r`` has stages ``r`` and ``2 * ranks - 1 - r``.

    Returns:
        For each rank its actions; they end with a step of both its stages.
    """
    board = _Board(2 * ranks, microbatches)
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    while any(len(order) < 6 * microbatches for order in orders):
        moves = [board.choose(rank) for rank in range(ranks)]
        for order, action in zip(orders, moves, strict=True):
            if action is not None:
                board.enter(action)
                order.append(action)
    for rank, order in enumerate(orders):
        order += [Action(stage, Kind.STEP) for stage in board.stages(rank)]
    return orders


class _Board:
    """Progress of each stage: the number of completed passes of each kind, in the order of microbatches."""

    def __init__(self, stages: int, microbatches: int) -> None:
        self._last = stages - 1
        self._microbatches = microbatches
        self._done = {kind: [0] * stages for kind in (FORWARD, INPUT, WEIGHT)}

    def stages(self, rank: int) -> tuple[int, int]:
        """Returns the two stages of a rank."""
        return rank, self._last - rank

    def choose(self, rank: int) -> Action | None:
        """Returns the most preferred pass that a rank can run now; None if there is none."""
        return next(self._possible(rank), None)

    def enter(self, action: Action) -> None:
        """Records a completed pass."""
        self._done[action.kind][action.stage] += 1

    def _possible(self, rank: int) -> Iterator[Action]:
        for kind, way in _PREFERENCES:
            stage = self.stages(rank)[way]
            microbatch = self._done[kind][stage]
            if microbatch < self._microbatches and self._ready(kind, stage, microbatch):
                yield Action(stage, kind, microbatch)

    def _ready(self, kind: Kind, stage: int, microbatch: int) -> bool:
        done = self._done
        if kind is FORWARD:
            return self._live(stage) <= self._last and (stage == 0 or done[FORWARD][stage - 1] > microbatch)
        if kind is INPUT:
            return done[FORWARD][stage] > microbatch and (stage == self._last or done[INPUT][stage + 1] > microbatch)
        return done[INPUT][stage] > microbatch

    def _live(self, stage: int) -> int:
        """Returns the number of activations that the rank of a stage keeps."""
        return sum(self._done[FORWARD][mine] - self._done[WEIGHT][mine] for mine in (stage, self._last - stage))
