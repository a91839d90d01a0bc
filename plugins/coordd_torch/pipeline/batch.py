"""A batch as the microbatches that stages ask for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from coordd.errors import ArgumentError

__all__ = ["Batch", "rows_of"]


def rows_of(values: Any) -> int:
    """Finds how many rows a batch has: the first dimension of all its tensors that have one.

    Raises:
        ArgumentError: there is no such tensor, or they differ.
    """
    lengths = {len(leaf) for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.dim()}
    if len(lengths) != 1:
        told = ", ".join(map(str, sorted(lengths))) or "none"
        raise ArgumentError(
            f"the tensors of a batch must have equally many rows to be cut into microbatches, not {told}"
        )
    return lengths.pop()


class Batch:
    """Inputs and targets of a step, cut into microbatches."""

    def __init__(
        self,
        inputs: Any,
        targets: Any,
        parts: Sequence[slice],
        *,
        steps: int = 1,
        named: Callable[[Any], dict[str, Any]],
    ) -> None:
        """Takes a batch.

        Args:
            inputs: of the model.
            targets: of the loss.
            parts: the rows of each microbatch.
            steps: how many steps are taken, with equally many microbatches each.
            named: makes of a microbatch's inputs the values by name that stages take.
        """
        self._inputs = inputs
        self._targets = targets
        self._parts = parts
        self._named = named
        self._each = len(parts) // steps

    @property
    def count(self) -> int:
        """How many microbatches there are."""
        return len(self._parts)

    def inputs(self, microbatch: int) -> dict[str, Any]:
        """The model's inputs, by name."""
        return self._named(_rows(self._inputs, self._parts[microbatch]))

    def targets(self, microbatch: int) -> Any:
        """What the loss compares with."""
        return _rows(self._targets, self._parts[microbatch])

    def weight(self, microbatch: int) -> float:
        """Its part of the rows of its step."""
        first = microbatch // self._each * self._each
        return self._length(microbatch) / sum(map(self._length, range(first, first + self._each)))

    def share(self, microbatch: int) -> float:
        """Its part of the rows of the batch."""
        return self._length(microbatch) / sum(map(self._length, range(len(self._parts))))

    def _length(self, microbatch: int) -> int:
        part = self._parts[microbatch]
        return int(part.stop - part.start)


def _rows(values: Any, part: slice) -> Any:
    return pytree.tree_map(lambda leaf: leaf[part] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf, values)
