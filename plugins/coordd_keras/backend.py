"""Reduction of gradients, which each Keras backend implements.

Ranks may use different backends, because all backends make the same operations.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import keras

from coordd.errors import ArgumentError

if TYPE_CHECKING:
    from coordd.gradients.consistency import Settings
    from coordd.gradients.settings import Choices

__all__ = ["Reduction", "check_backend", "reduction"]

_HOMES = {
    "tensorflow": ("coordd_keras.tensorflow_backend", "TensorFlowReduction"),
    "torch": ("coordd_keras.torch_backend", "TorchReduction"),
}


class Reduction(Protocol):
    """Reduces the gradients of one optimizer; one implementation per backend."""

    def release(self, variables: Sequence[Any]) -> None:
        """Releases variables from the optimizer that had them before."""
        ...

    def watch(self, variables: Sequence[Any], optimizer: Any) -> None:
        """Registers variables before their gradients are computed, for as long as their optimizer exists."""
        ...

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], settings: Settings) -> list[Any]:
        """Returns the reduced gradients of a step with these settings; None for a gradient that no rank has."""
        ...


def check_backend() -> None:
    """Rejects a Keras backend that coordd does not support.

    Raises:
        ArgumentError: the backend is neither TensorFlow nor PyTorch.
    """
    name = keras.backend.backend()
    if name not in _HOMES:
        text = f"Keras runs on {name!r} here, and coordd.keras on {' and '.join(map(repr, _HOMES))}: set KERAS_BACKEND"
        raise ArgumentError(text)


def reduction(choices: Choices, prefix: str) -> Reduction:
    """Returns a `Reduction` for the current Keras backend.

    Args:
        choices: the user's settings.
        prefix: prefix of the names of its operations; equal on all ranks, and different for each optimizer.
    """
    module, name = _HOMES[keras.backend.backend()]
    found: Reduction = getattr(importlib.import_module(module), name)(choices, prefix)
    return found
