"""Gradients of Keras on TensorFlow: those of a graph or an eager step, which the optimizer is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordd.choices import Choices
from coordd.consistency import Settings
from coordd_tensorflow.exchange import Exchange

__all__ = ["TensorFlowReduction"]


class TensorFlowReduction:
    """Starts each bucket as soon as its gradients are computed, then awaits all; see `coordd_tensorflow.exchange`."""

    def __init__(self, choices: Choices, prefix: str) -> None:
        self._exchange = Exchange(choices, prefix)

    def release(self, variables: Sequence[Any]) -> None:
        """Does nothing: an optimizer reduces what it is given."""

    def watch(self, variables: Sequence[Any], optimizer: Any) -> None:
        """Does nothing: the graph says when gradients are there."""

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], settings: Settings) -> list[Any]:
        """Returns reduced gradients; None where no rank has one."""
        found: list[Any] = self._exchange.reduce(gradients, variables, settings)
        return found
