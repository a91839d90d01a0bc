"""A batch cut into microbatches, and the weight of each microbatch's loss. Pure except for the given functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from coordd.errors import ArgumentError

__all__ = ["Batch", "Take", "Weigh"]

Weigh = Callable[[Any, Any], Any]
"""Returns how much the loss of a microbatch, given as inputs and targets, counts, as one number."""

Take = Callable[[Any, slice], Any]
"""Selects some rows of all tensors in a value."""


class Batch:
    """Inputs and targets of a step, cut into microbatches."""

    def __init__(  # noqa: PLR0913 - what a step is made of
        self,
        inputs: Any,
        targets: Any,
        parts: Sequence[slice],
        *,
        take: Take,
        steps: int = 1,
        named: Callable[[Any], dict[str, Any]],
        weigh: Weigh | None = None,
        summed: bool = False,
    ) -> None:
        """Takes a batch.

        Args:
            inputs: of the model.
            targets: of the loss.
            parts: the rows of each microbatch.
            take: selects the rows of a microbatch.
            steps: number of optimizer steps, with equally many microbatches each.
            named: converts inputs to the values by name that stages take.
            weigh: returns how much a microbatch counts; by default its number of rows.
            summed: whether the losses of microbatches are added up unweighted.

        Raises:
            ArgumentError: a weight is negative, infinite or not a number.
        """
        self._inputs = inputs
        self._targets = targets
        self._parts = parts
        self._take = take
        self._values = named(inputs)
        self._each = len(parts) // steps
        self._weigh = weigh
        self._summed = summed
        self._rows = [float(part.stop - part.start) for part in parts]
        self._amounts = [self.amount(part) for part in parts]

    @property
    def count(self) -> int:
        """Number of microbatches."""
        return len(self._parts)

    @property
    def given(self) -> Any:
        """The inputs as they were given."""
        return self._inputs

    @property
    def parts(self) -> Sequence[slice]:
        """The rows of each microbatch."""
        return self._parts

    def inputs(self, microbatch: int) -> dict[str, Any]:
        """Returns the model's inputs of a microbatch, by name."""
        found: dict[str, Any] = self._take(self._values, self._parts[microbatch])
        return found

    def targets(self, microbatch: int) -> Any:
        """Returns the targets of a microbatch."""
        return self.targets_of(self._parts[microbatch])

    def targets_of(self, part: slice) -> Any:
        """Returns the targets of some rows."""
        return self._take(self._targets, part)

    def amount(self, part: slice) -> float:
        """Returns how much some rows count.

        Raises:
            ArgumentError: the weight is negative, infinite or not a number.
        """
        if self._weigh is None:
            return int(part.stop - part.start)
        amount = float(self._weigh(self._take(self._inputs, part), self.targets_of(part)))
        if not 0 <= amount < math.inf:
            raise ArgumentError(f"a microbatch cannot have a weight of {amount:g}: weight= must return 0 or more")
        return amount

    def weight(self, microbatch: int) -> float:
        """Returns the factor of a microbatch's loss in the loss of its step."""
        if self._summed:
            return 1.0
        return self._part(self._amounts, microbatch)

    def by_rows(self, microbatch: int) -> float:
        """Returns a microbatch's part of the rows of its step, the factor of a loss that is a mean of rows."""
        return self._part(self._rows, microbatch)

    def _part(self, amounts: Sequence[float], microbatch: int) -> float:
        first = microbatch // self._each * self._each
        return amounts[microbatch] / (sum(amounts[first : first + self._each]) or 1.0)

    def share(self, microbatch: int) -> float:
        """Returns the factor of a microbatch's loss in the loss of the batch."""
        if self._summed:
            return 1.0
        return self._amounts[microbatch] / (sum(self._amounts) or 1.0)

    def share_by_rows(self, microbatch: int) -> float:
        """Returns a microbatch's part of the rows of the batch."""
        return self._rows[microbatch] / sum(self._rows)

    def counted(self, microbatch: int) -> float:
        """Returns for how many rows a microbatch counts in means over several batches.

        If no microbatch of the batch has a weight, its loss is zero, and all its rows count.
        """
        return self.share(microbatch) * sum(self._rows) if any(self._amounts) else self._rows[microbatch]

    @property
    def shares(self) -> list[tuple[slice, float]]:
        """The rows of each microbatch, and its share of the batch."""
        return [(part, self.share(number)) for number, part in enumerate(self._parts)]
