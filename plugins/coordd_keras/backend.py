"""What Keras's backends do each in its own way: gradients on their way to the other ranks and back.

Ranks may have different backends: what travels between them is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import keras

from coordd.errors import ArgumentError

if TYPE_CHECKING:
    from coordd.gradients import Choices

__all__ = ["Reduction", "reduction"]


class Reduction(Protocol):
    """How the gradients of one optimizer are reduced."""

    def watch(self, variables: Sequence[Any]) -> None:
        """Hears of the variables, before their gradients are computed."""
        ...

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns reduced gradients; None where no rank has one."""
        ...


def reduction(choices: Choices, prefix: str) -> Reduction:
    """Makes the one for the backend that Keras runs on.

    Args:
        choices: what the user wants.
        prefix: of the names of its operations; equal on all ranks and of no other optimizer.

    Raises:
        ArgumentError: there is none.
    """
    name = keras.backend.backend()
    if name == "tensorflow":
        from coordd_keras.tensorflow_backend import TensorFlowReduction

        return TensorFlowReduction(choices, prefix)
    if name == "torch":
        from coordd_keras.torch_backend import TorchReduction

        return TorchReduction(choices, prefix)
    text = f"Keras runs on {name!r} here, and coordd.keras on 'tensorflow' and 'torch': set KERAS_BACKEND"
    raise ArgumentError(text)
