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

        Raises:
            ArgumentError: a weight is negative, infinite or no number.
        """
        self._inputs = inputs
        self._targets = targets
        self._parts = parts
        self._take = take
        self._values = named(inputs)
        self._each = len(parts) // steps
        self._amounts = [self._amount(number, weigh) for number in range(len(parts))]

    @property
    def count(self) -> int:
        """How many microbatches there are."""
        return len(self._parts)

    def inputs(self, microbatch: int) -> dict[str, Any]:
        """The model's inputs, by name."""
        found: dict[str, Any] = self._take(self._values, self._parts[microbatch])
        return found

    def targets(self, microbatch: int) -> Any:
        """What the loss compares with."""
        return self._take(self._targets, self._parts[microbatch])

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
        amount = float(weigh(self._take(self._inputs, part), self.targets(microbatch)))
        if not 0 <= amount < math.inf:
            raise ArgumentError(f"a microbatch cannot have a weight of {amount:g}: weight= must return 0 or more")
        return amount
