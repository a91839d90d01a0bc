"""Reducing the gradients of one optimizer while backward still computes the rest.

Its one rule: no rank ever waits for a gradient that another does not have. Who has none takes part with zeros.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import numpy as np
import torch

from coordd.errors import CoorddError
from coordd.handles import Handle, call_site, wait_all
from coordd.messages import Kind, ReduceOp, Request
from coordd.operations import Operations, check_reducible
from coordd.process_sets import ProcessSet
from coordd.table import Site
from coordd_torch.compression import Compression, Compressor
from coordd_torch.tensors import borrow, view

__all__ = ["Gradient", "Reducer"]


_current_task = torch._C._current_graph_task_id  # noqa: SLF001 - there is no public way; FSDP uses it, too


class Gradient:
    """One parameter's gradient, from backward to its reduction."""

    def __init__(self, reducer: Reducer, name: str, parameter: torch.Tensor) -> None:
        self._reducer = reducer
        self.name = name
        self.parameter = parameter
        self.passes = 0
        self.handle: Handle[Any] | None = None
        self._zeros: torch.Tensor | None = None
        self._request: Request | None = None
        self._dtype: Any = None

    def ready(self, _: torch.Tensor) -> None:
        """Runs when backward has accumulated this gradient."""
        reducer = self._reducer
        if self.passes >= reducer.passes_per_step or self.handle is not None:
            text = (
                "Gradients were computed more than backward_passes_per_step times before call to step() "
                f"({self.name!r}, {reducer.passes_per_step}). Increase backward_passes_per_step to accumulate "
                "gradients locally."
            )
            raise CoorddError(text)
        self.passes += 1
        task = _current_task()
        if task not in reducer.expected:
            reducer.expect_end_of_backward(task)
        if self.passes == reducer.passes_per_step:
            self.submit()

    def submit(self) -> None:
        """Starts the reduction of what has been accumulated."""
        gradient = self.parameter.grad
        if gradient is None:  # a hook of the user's has taken it away
            self.fill()
            return
        if self._reducer.sparse_as_dense and gradient.layout is not torch.strided:
            gradient = self.parameter.grad = gradient.to_dense()
        self._start(gradient, filler=False)

    def fill(self) -> None:
        """Takes part with zeros, if any rank has something for this parameter."""
        self._zeros = torch.zeros_like(self.parameter, requires_grad=False)
        self._start(self._zeros, filler=True)

    def settle(self) -> bool:
        """Waits for the result, if there is to be one; forgets an operation that no rank had anything for.

        Returns:
            whether this step has a result.
        """
        handle = self.handle
        if handle is None:
            return False
        if handle.result() is None:
            self.handle = None
        elif self._zeros is not None:
            self.parameter.grad = self._zeros
        self._zeros = None
        return self.handle is not None

    def reset(self) -> None:
        """Gets ready for the next step."""
        self.passes = 0
        self.handle = self._zeros = None

    def _start(self, gradient: torch.Tensor, *, filler: bool) -> None:
        reducer = self._reducer
        land = None
        if reducer.plain and gradient.is_cpu and gradient.layout is torch.strided:
            array = view(gradient)
        else:
            array, land = self._compressed(gradient)
        request = self._request
        if request is None or request.shape != array.shape or self._dtype is not array.dtype:
            request, self._dtype = reducer.request(self.name, array), array.dtype
            self._request = request
        self.handle = reducer.operations.submit(request, array, land, filler, reducer.site)

    def _compressed(self, gradient: torch.Tensor) -> tuple[np.ndarray, Callable[[np.ndarray], torch.Tensor]]:
        """Makes what travels instead of a gradient, and what puts it back."""
        compression = self._reducer.compression
        small, context = compression.compress(gradient)
        array, back = borrow(small)

        def land(finished: np.ndarray) -> torch.Tensor:
            result = compression.decompress(back(finished), context)
            return gradient if result is gradient else gradient.copy_(result)

        return array, land


class Reducer:
    """All gradients of one optimizer."""

    def __init__(
        self,
        operations: Operations,
        parameters: Iterable[tuple[str, torch.Tensor]],
        *,
        compression: type[Compressor],
        passes_per_step: int,
        op: ReduceOp,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.operations = operations
        self.compression = compression
        self.plain = compression is Compression.none
        self.passes_per_step = passes_per_step
        self.sparse_as_dense = sparse_as_dense
        self._op = op
        self._predivide = predivide
        self._process_set = process_set
        self.expected: set[int] = set()
        self._finished = False
        self.skipped = False
        self.site: Site = None
        prefix = operations.namespace()
        self.gradients = [Gradient(self, prefix + name, parameter) for name, parameter in parameters]
        for gradient in self.gradients:
            gradient.parameter.register_post_accumulate_grad_hook(gradient.ready)

    def request(self, name: str, array: Any) -> Request:
        """Makes the request of one gradient, once."""
        scaled = self._predivide != 1.0
        check_reducible(array.dtype, self._op, scaled=scaled)
        return self.operations.request(
            Kind.ALLREDUCE,
            name,
            array,
            self._process_set,
            op=self._op,
            prescale=1.0 / self._predivide,
            postscale=self._predivide,
        )

    def expect_end_of_backward(self, task: int) -> None:
        """Has autograd call us when the backward pass with this number ends."""
        self.expected.add(task)
        self.site = call_site(sys._getframe(1))  # noqa: SLF001 - the documented way to the caller
        engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - there is no public way; FSDP uses it, too
        engine.queue_callback(lambda: self._end_of_backward(task))

    def _end_of_backward(self, task: int) -> None:
        self.expected.discard(task)
        if not _nested() and any(gradient.handle is not None for gradient in self.gradients):
            self.finish()

    def finish(self) -> None:
        """Reduces what this step has accumulated and waits; no rank is left waiting for what another does not have.

        Parameters without a gradient here take part with zeros, if another rank has one; if none has, they keep none.
        """
        for gradient in self.gradients:
            if gradient.handle is None:
                if gradient.passes:
                    gradient.submit()
                else:
                    gradient.fill()
        wait_all([gradient.handle for gradient in self.gradients if gradient.handle is not None])
        settled = [gradient.settle() for gradient in self.gradients]
        self._finished = all(settled)

    def finish_step(self) -> None:
        """Makes sure that everything is reduced."""
        if not self._finished:
            self.finish()

    def reset(self) -> None:
        """Gets ready for the next step."""
        self._finished = False
        for gradient in self.gradients:
            gradient.reset()

    def drop(self) -> None:
        """Lets what is under way end, whatever comes of it, before its memory is used for something else."""
        if not self._finished:
            for gradient in self.gradients:
                if gradient.handle is not None:
                    gradient.handle.wait()
        self.reset()


def _nested() -> bool:
    """Says whether this backward pass runs inside another one, as in reentrant checkpointing."""
    runs = 0
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to the callers
    while frame is not None:
        runs += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back
    return runs > 1
