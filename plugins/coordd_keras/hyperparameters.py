"""Reads the hyperparameters in a Keras optimizer's configuration, to compare them between ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from numbers import Real
from typing import Any

import keras

from coordd.gradients.value_check import UNSEEN

__all__ = ["Hyperparameters"]

_OWN = frozenset({"name", "learning_rate"})
"""Excluded keys: each rank numbers names on its own, and a learning rate may be a variable or a schedule."""


class Hyperparameters:
    """Hyperparameters of one optimizer, or of the inner optimizer of a `LossScaleOptimizer`."""

    def __init__(self, optimizer: Any) -> None:
        """Keeps a weak reference to the optimizer."""
        self._optimizer = weakref.ref(optimizer)  # graphs may outlive it

    def current(self) -> Any:
        """Returns the learning rate (for a schedule: the step number) as a scalar tensor; None if it is a function."""
        optimizer = self._plain()
        rate = getattr(optimizer, "_learning_rate", None)
        if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            rate = optimizer.iterations
        return keras.ops.convert_to_tensor(rate) if isinstance(rate, keras.Variable) else None

    def read(self, current: Any) -> Iterator[tuple[str, Any]]:
        """Yields all hyperparameters by name; the learning rate comes first, from the value that `current` had."""
        optimizer = self._plain()
        if optimizer is None:
            return
        yield "learning_rate", UNSEEN if current is None else self._rate(optimizer, current)
        for name, value in sorted(_configuration(optimizer).items()):
            if name not in _OWN and (value is None or isinstance(value, (str, Real))):
                yield name, value

    def _plain(self) -> Any:
        found = self._optimizer()
        while isinstance(found, keras.optimizers.LossScaleOptimizer):
            found = found.inner_optimizer
        return found

    def _rate(self, optimizer: Any, current: Any) -> Any:
        rate = optimizer._learning_rate  # noqa: SLF001 - the public one is a tensor of the present step
        if not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            return float(current)
        try:
            return float(rate(keras.ops.convert_to_tensor(int(current), optimizer.iterations.dtype)))
        except Exception:  # noqa: BLE001 - a user's schedule need not work outside of a step
            return UNSEEN


def _configuration(optimizer: Any) -> dict[str, Any]:
    try:
        found: dict[str, Any] = optimizer.get_config()
    except Exception:  # noqa: BLE001 - a user's optimizer need not implement it
        return {}
    return found
