"""How much each microbatch of a batch counts, and its part of what a framework has. Pure but for what it is given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from coordd.errors import ArgumentError

__all__ = ["Batch", "Take", "Weigh"]

Weigh = Callable[[Any, Any], Any]
"""Says of a microbatch's inputs and targets how much its loss counts, as one number."""

Take = Callable[[Any, slice], Any]
"""Takes some rows of all tensors in a value."""


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
            take: takes the rows of a microbatch.
            steps: how many steps are taken, with equally many microbatches each.
            named: makes of inputs the values by name that stages take.
            weigh: says how much a microbatch counts; by default as much as it has rows.
            summed: whether the losses of microbatches are added up as they are.

        Raises:
            ArgumentError: a weight is negative, infinite or no number.
        """
        self._inputs = inputs
        self._targets = targets
        self._parts = parts
        self._take = take
        self._values = named(inputs)
        self._each = len(parts) // steps
        self._weigh = weigh
        self._summed = summed
        self._amounts = [self.amount(part) for part in parts]

    @property
    def count(self) -> int:
        """How many microbatches there are."""
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
        """The model's inputs, by name."""
        found: dict[str, Any] = self._take(self._values, self._parts[microbatch])
        return found

    def targets(self, microbatch: int) -> Any:
        """What the loss compares with."""
        return self.targets_of(self._parts[microbatch])

    def targets_of(self, part: slice) -> Any:
        """The same for some rows."""
        return self._take(self._targets, part)

    def amount(self, part: slice) -> float:
        """How much some rows count.

        Raises:
            ArgumentError: that is negative, infinite or no number.
        """
        if self._weigh is None:
            return int(part.stop - part.start)
        amount = float(self._weigh(self._take(self._inputs, part), self.targets_of(part)))
        if not 0 <= amount < math.inf:
            raise ArgumentError(f"a microbatch cannot have a weight of {amount:g}: weight= must return 0 or more")
        return amount

    def weight(self, microbatch: int) -> float:
        """By what its loss is multiplied in its step."""
        if self._summed:
            return 1.0
        first = microbatch // self._each * self._each
        return self._amounts[microbatch] / (sum(self._amounts[first : first + self._each]) or 1.0)

    def share(self, microbatch: int) -> float:
        """By what its loss is multiplied in the loss of the batch."""
        if self._summed:
            return 1.0
        return self._amounts[microbatch] / (sum(self._amounts) or 1.0)

    @property
    def shares(self) -> list[tuple[slice, float]]:
        """The rows of each microbatch, and how much of the batch it is."""
        return [(part, self.share(number)) for number, part in enumerate(self._parts)]
