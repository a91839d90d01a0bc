"""A batch as the microbatches that stages ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from coordd.errors import ArgumentError

__all__ = ["Batch", "Weigh", "joined", "lengths", "rows_of", "taken"]

Weigh = Callable[[Any, Any], float | torch.Tensor]
"""Says of a microbatch's inputs and targets how much its loss counts."""


def rows_of(values: Any) -> int:
    """Finds how many rows a batch has: the first dimension of all its tensors that have one.

    Raises:
        ArgumentError: there is no such tensor, or they differ.
    """
    found = lengths(values)
    if len(found) != 1:
        told = ", ".join(map(str, found)) or "none"
        raise ArgumentError(
            f"the tensors of a batch must have equally many rows to be cut into microbatches, not {told}"
        )
    return found[0]


def joined(parts: Sequence[Any], rows: Sequence[int]) -> Any:
    """Puts the outputs of microbatches together again: tensors by their rows, all else in lists.

    Args:
        parts: the output of each.
        rows: how many rows each has.

    Raises:
        ArgumentError: the first dimension of a tensor is not that of the rows.
    """

    def whole(path: pytree.KeyPath, *leaves: Any) -> Any:
        if not (isinstance(leaves[0], torch.Tensor) and leaves[0].dim()):
            return list(leaves)
        if [len(leaf) for leaf in leaves] != list(rows):
            raise ArgumentError(
                f"output{pytree.keystr(path)} has shape {tuple(leaves[0].shape)} for {rows[0]} rows, so its first "
                "dimension is not that of the rows, and those of microbatches cannot be joined: let the model put the "
                "rows first"
            )
        return torch.cat(leaves)

    return pytree.tree_map_with_path(whole, *parts)


def lengths(values: Any) -> list[int]:
    """Lists the first dimensions of all tensors that have one, each once."""
    leaves = pytree.tree_leaves(values)
    return sorted({len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()})


def taken(values: Any, part: slice | torch.Tensor) -> Any:
    """Takes some rows of all tensors that have rows."""
    return pytree.tree_map(lambda leaf: leaf[part] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf, values)


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
        weigh: Weigh | None = None,
    ) -> None:
        """Takes a batch.

        Args:
            inputs: of the model.
            targets: of the loss.
            parts: the rows of each microbatch.
            steps: how many steps are taken, with equally many microbatches each.
            named: makes of inputs the values by name that stages take.
            weigh: says how much a microbatch counts; by default as much as it has rows.

        Raises:
            ArgumentError: a weight is negative, infinite or no number.
        """
        self._inputs = inputs
        self._targets = targets
        self._parts = parts
        self._values = named(inputs)
        self._each = len(parts) // steps
        self._amounts = [self._amount(number, weigh) for number in range(len(parts))]

    @property
    def count(self) -> int:
        """How many microbatches there are."""
        return len(self._parts)

    def inputs(self, microbatch: int) -> dict[str, Any]:
        """The model's inputs, by name."""
        found: dict[str, Any] = taken(self._values, self._parts[microbatch])
        return found

    def targets(self, microbatch: int) -> Any:
        """What the loss compares with."""
        return taken(self._targets, self._parts[microbatch])

    def weight(self, microbatch: int) -> float:
        """How much of its step it is."""
        first = microbatch // self._each * self._each
        return self._amounts[microbatch] / (sum(self._amounts[first : first + self._each]) or 1.0)

    def share(self, microbatch: int) -> float:
        """How much of the batch it is."""
        return self._amounts[microbatch] / (sum(self._amounts) or 1.0)

    @property
    def shares(self) -> list[tuple[slice, float]]:
        """The rows of each microbatch, and how much of the batch it is."""
        return [(part, self.share(number)) for number, part in enumerate(self._parts)]

    def _amount(self, microbatch: int, weigh: Weigh | None) -> float:
        part = self._parts[microbatch]
        if weigh is None:
            return int(part.stop - part.start)
        amount = float(weigh(taken(self._inputs, part), self.targets(microbatch)))
        if not 0 <= amount < math.inf:
            raise ArgumentError(f"a microbatch cannot have a weight of {amount:g}: weight= must return 0 or more")
        return amount
