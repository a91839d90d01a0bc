"""Reduces the gradients of Keras on TensorFlow, of a graph or an eager step, that the optimizer gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordd.gradients.consistency import Settings
from coordd.gradients.settings import Choices
from coordd_tensorflow.exchange import Exchange

__all__ = ["TensorFlowReduction"]


class TensorFlowReduction:
    """Starts each bucket when its gradients are computed, then waits for all; see `coordd_tensorflow.exchange`."""

    def __init__(self, choices: Choices, prefix: str) -> None:
        self._exchange = Exchange(choices, prefix)

    def release(self, variables: Sequence[Any]) -> None:
        """Does nothing: an optimizer reduces the gradients that it gets."""

    def watch(self, variables: Sequence[Any], optimizer: Any) -> None:
        """Does nothing: the graph starts each bucket when its gradients are ready."""

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], settings: Settings) -> list[Any]:
        """Returns reduced gradients; None where no rank has one."""
        found: list[Any] = self._exchange.reduce(gradients, variables, settings)
        return found
