"""What Keras's backends do each in its own way: gradients on their way to the other ranks and back.

Ranks may have different backends: what travels between them is the same.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import keras

from coordd.errors import ArgumentError

if TYPE_CHECKING:
    from coordd.choices import Choices
    from coordd.consistency import Settings

__all__ = ["Reduction", "check_backend", "reduction"]

_HOMES = {
    "tensorflow": ("coordd_keras.tensorflow_backend", "TensorFlowReduction"),
    "torch": ("coordd_keras.torch_backend", "TorchReduction"),
}


class Reduction(Protocol):
    """How the gradients of one optimizer are reduced."""

    def release(self, variables: Sequence[Any]) -> None:
        """Takes variables from the optimizer that had them before."""
        ...

    def watch(self, variables: Sequence[Any], optimizer: Any) -> None:
        """Hears of the variables, before their gradients are computed, for as long as there is their optimizer."""
        ...

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], settings: Settings) -> list[Any]:
        """Returns reduced gradients for a step with these settings; None where no rank has one."""
        ...


def check_backend() -> None:
    """Refuses what Keras can run on and coordd cannot.

    Raises:
        ArgumentError: it is neither TensorFlow nor PyTorch.
    """
    name = keras.backend.backend()
    if name not in _HOMES:
        text = f"Keras runs on {name!r} here, and coordd.keras on {' and '.join(map(repr, _HOMES))}: set KERAS_BACKEND"
        raise ArgumentError(text)


def reduction(choices: Choices, prefix: str) -> Reduction:
    """Makes the one for the backend that Keras runs on.

    Args:
        choices: what the user wants.
        prefix: of the names of its operations; equal on all ranks and of no other optimizer.
    """
    module, name = _HOMES[keras.backend.backend()]
    found: Reduction = getattr(importlib.import_module(module), name)(choices, prefix)
    return found
