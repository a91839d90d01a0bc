"""The user's options for the gradients of one optimizer that `coordd.gradients.reducer` reduces."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from coordd.errors import ArgumentError
from coordd.gradients.bucketing import Grouping
from coordd.host.world import World
from coordd.ops.checks import finite
from coordd.ops.messages import ReduceOp
from coordd.ops.process_sets import ProcessSet, global_process_set

__all__ = ["Choices"]

_COMBINE = frozenset({ReduceOp.AVERAGE, ReduceOp.AVERAGE_PRESENT, ReduceOp.SUM})


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The user's options for the gradients of one optimizer; equal on all ranks.

    Attributes:
        op: the reduction.
        process_set: the ranks that take part.
        predivide: divides gradients before the sum, and multiplies them afterwards.
        compression: the framework's compression object.
        sparse_as_dense: whether sparse gradients are converted to dense ones.
        grouping: which gradients the user wants together.

    Raises:
        ArgumentError: the options do not fit together.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    process_set: ProcessSet = global_process_set
    predivide: float = 1.0
    compression: Any = None
    sparse_as_dense: bool = False
    grouping: Grouping = field(default_factory=lambda: Grouping(kind=()))

    def __post_init__(self) -> None:
        finite(self.predivide, "gradient_predivide_factor", above=0)
        if self.predivide != 1.0 and self.op is not ReduceOp.AVERAGE:
            text = "gradient_predivide_factor not supported with op != Average"
            raise ArgumentError(text)
        if self.op not in _COMBINE:
            text = f"gradients are averaged or added up here, not combined by {self.op.name.capitalize()}: choose op"
            raise ArgumentError(text)

    def exchanges(self, world: World) -> bool:
        """Returns whether this rank reduces its gradients with other ranks."""
        members = self.process_set.ranks or range(world.size)
        return len(members) > 1 and world.rank in members
