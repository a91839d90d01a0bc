"""Keras stages on PyTorch: an autograd graph for each microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from coordd_keras.pipeline.autodiff import Call, Computation, Result
from coordd_torch.pipeline.codec import TorchCodec
from coordd_torch.pipeline.weights import Weights

__all__ = ["TorchAutodiff", "make"]


class TorchAutodiff:
    """Implements `coordd_keras.pipeline.autodiff.Autodiff` for PyTorch."""

    def __init__(self, computation: Computation, variables: Sequence[Any]) -> None:
        self._parameters = [variable.value for variable in variables]
        self.codec = TorchCodec(torch.device(keras.src.backend.torch.core.get_device()))
        self.weights = Weights(self._parameters)
        self._compute = computation

    def prepare(self, call: Call) -> None:
        """Lets Keras create its variables."""
        self._compute.prepare(self._tensors(call))

    def run(self, call: Call) -> Result:
        """Runs a forward pass without recording it."""
        with torch.no_grad():
            return self._compute(self._tensors(call))

    def record(self, call: Call, entering: Sequence[int]) -> tuple[Result, list[torch.Tensor]]:
        """Runs a forward pass from detached inputs."""
        call = self._tensors(call)
        values = list(call.values)
        for place in entering:
            values[place] = values[place].detach().requires_grad_()
        with torch.enable_grad():
            found = self._compute(call._replace(values=values))
        return found, [values[place] for place in entering]

    def back(self, kept: list[torch.Tensor], roots: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
        """Runs backward, once for each graph."""
        reached = [(root, given) for root, given in roots if root.requires_grad]
        sources = [*kept, *self._parameters]
        if not (reached and sources):
            return [None] * len(kept), [None] * len(self._parameters)
        ends = [root for root, _ in reached]
        given = [torch.as_tensor(each, dtype=root.dtype, device=root.device) for root, each in reached]
        found = list(torch.autograd.grad(ends, sources, given, allow_unused=True))
        return found[: len(kept)], found[len(kept) :]

    @contextmanager
    def seeded(self, seed: int | None) -> Iterator[None]:
        """Seeds PyTorch's generators, which dropout draws from, inside the context, and restores them after it."""
        if seed is None:
            yield
            return
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            yield

    def stepping(self) -> AbstractContextManager[None]:
        """Keeps version counters, so that other microbatches' graphs run backward with their saved weights."""
        return _unsafe_preserve_version_counter(tuple(self._parameters))

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function unchanged: Keras calls PyTorch's operations one by one."""
        return function

    def _tensors(self, call: Call) -> Call:
        def made(value: Any) -> Any:
            return keras.ops.convert_to_tensor(value)

        targets = None if call.targets is None else keras.tree.map_structure(made, call.targets)
        return call._replace(values=list(map(made, call.values)), targets=targets)


def make(computation: Computation, variables: Sequence[Any]) -> TorchAutodiff:
    """Returns the `TorchAutodiff` of a stage."""
    return TorchAutodiff(computation, variables)
