"""What the cases need of a framework and its plugin. What is done for them is what a user would do."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from coordd import api

__all__ = ["ADAPTER", "NAMES", "Plugin", "Training", "init", "plugin", "shutdown"]

ADAPTER = "TEST_CONTRACT_ADAPTER"
NAMES = ("hidden", "out")
"""The parameters of the model that is trained: ``tanh(x @ hidden) @ out``."""

Tensor = Any


class Plugin(Protocol):
    """A framework and its plugin.

    Attributes:
        dtypes: of the framework's tensors, by NumPy's names, or those of `ml_dtypes`.
        shares: whether the view of a tensor is its memory; else it is a copy.
        writable: whether an operation may change a tensor through its view.
        adopts: whether a tensor that is made of an array has the array's memory.
        keeps: whether gradients that a user keeps stay as they are when the next step overwrites theirs.
        mends: whether a rank without a gradient gets that of the others; else all ranks are told that it lacks one.
        precision: the type in which it trains here.
        reductions: all functions that reduce a tensor, with ``name`` and ``op``; the first of them differentiable.
        allgather: takes a tensor and its ``name``, as do the others; differentiable.
        alltoall: gives each rank as many rows.
        broadcast: takes the root, too.
        reducescatter: takes ``op``, too.
    """

    dtypes: Sequence[str]
    shares: bool
    writable: bool
    adopts: bool
    keeps: bool
    mends: bool
    precision: str
    reductions: Sequence[Callable[..., Tensor]]
    allgather: Callable[..., Tensor]
    alltoall: Callable[..., Tensor]
    broadcast: Callable[..., Tensor]
    reducescatter: Callable[..., Tensor]

    def tensor(self, array: np.ndarray) -> Tensor:
        """Makes a tensor by the framework's own means."""
        ...

    def view(self, tensor: Tensor) -> np.ndarray:
        """Makes an array of a tensor, or of what an operation returns, by the plugin's means."""
        ...

    def back(self, array: np.ndarray) -> Tensor:
        """Makes a tensor of an array by the plugin's means."""
        ...

    def differentiated(
        self, function: Callable[[Tensor], Tensor], array: np.ndarray, upstream: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Calls a function; returns its result, and the gradient of ``array`` if ``upstream`` is that of the result."""
        ...

    def training(self, weights: Sequence[np.ndarray], rate: float) -> Training:
        """Begins to train the model by plain gradient descent on averages over the ranks; weights are `NAMES`'s."""
        ...


class Training(Protocol):
    """A model and its distributed optimizer."""

    def step(self, x: np.ndarray, wanted: np.ndarray, *, frozen: bool) -> Sequence[Tensor]:
        """Follows the gradients of the mean squared error.

        Args:
            x: this rank's part of the batch.
            wanted: what the model should make of it.
            frozen: whether ``out`` counts as a constant, so that this rank has no gradient for it.

        Returns:
            the reduced gradients, as the user gets them, without a copy.
        """
        ...

    def weights(self) -> list[np.ndarray]:
        """Returns what the weights are now."""
        ...


@functools.cache
def plugin() -> Plugin:
    """The one that this rank is for."""
    found: Plugin = importlib.import_module(os.environ[ADAPTER]).PLUGIN
    return found


def init() -> None:
    """Starts a rank before its first case, for which imports would take too long."""
    plugin()
    api.init()


def shutdown() -> None:
    """Ends it after the last."""
    api.shutdown()
