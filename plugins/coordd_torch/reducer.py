"""Reducing the gradients of one optimizer while backward still computes the rest.

Its one rule: no rank ever waits for a gradient that another does not have. Who has none takes part with zeros.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from coordd.errors import CoorddError
from coordd.handles import call_site
from coordd.messages import Kind, ReduceOp, Request
from coordd.operations import Operations, check_reducible
from coordd.process_sets import ProcessSet
from coordd.table import Entry, Site
from coordd_torch.compression import Compression, Compressor
from coordd_torch.tensors import borrow, view

__all__ = ["Gradient", "Reducer"]


_NOTHING = np.empty(0, np.uint8)
_current_task = torch._C._current_graph_task_id  # noqa: SLF001 - there is no public way; FSDP uses it, too


class Gradient:
    """One parameter's gradient, from backward to its reduction.

    It is its own handle towards the daemon: made once, not every step, and waited for together with all others.
    """

    def __init__(self, reducer: Reducer, name: str, parameter: torch.Tensor) -> None:
        self._reducer = reducer
        self._parameter = parameter
        self._zeros: torch.Tensor | None = None
        self._entry: Entry | None = None
        self._dtype: np.dtype[Any] | None = None
        self.name = name
        self.submitted = 0.0
        self.passes = 0
        self.started = False

    def ready(self, _: torch.Tensor) -> None:
        """Runs when backward has accumulated this gradient."""
        reducer = self._reducer
        if self.started or self.passes >= reducer.passes_per_step:
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
        gradient = self._parameter.grad
        if gradient is None:  # a hook of the user's has taken it away
            self.fill()
            return
        if self._reducer.sparse_as_dense and gradient.layout is not torch.strided:
            gradient = self._parameter.grad = gradient.to_dense()
        self._start(gradient, filler=False)

    def fill(self) -> None:
        """Takes part with zeros, if any rank has something for this parameter."""
        self._zeros = torch.zeros_like(self._parameter, requires_grad=False)
        self._start(self._zeros, filler=True)

    def settle(self) -> None:
        """Keeps the zeros that others' gradients were added to; without any, there still is no gradient."""
        if self._zeros is not None:
            if self.started:
                self._parameter.grad = self._zeros
            self._zeros = None

    def reset(self) -> None:
        """Gets ready for the next step."""
        self.passes = 0
        self.started = False
        if self._entry is not None:
            self._entry.array = _NOTHING  # the gradient's memory is the user's again
            self._entry.land = None

    def land(self, value: np.ndarray, convert: Callable[[np.ndarray], Any] | None) -> None:
        """Runs on the daemon's thread when the reduced gradient has arrived."""
        try:
            if convert is not None:
                convert(value)
        except Exception as error:  # noqa: BLE001 - the thread that waits gets it
            self._reducer.failed = self._reducer.failed or error
        self._reducer.landed()

    def resolve(self, result: object) -> None:
        """Runs on the daemon's thread when no rank had anything for this parameter."""
        self.started = result is not None
        self._reducer.landed()

    def fail(self, error: BaseException) -> None:
        """Runs on the daemon's thread when the reduction has failed."""
        self._reducer.failed = self._reducer.failed or error
        self._reducer.landed()

    def _start(self, gradient: torch.Tensor, *, filler: bool) -> None:
        reducer = self._reducer
        land = None
        if reducer.plain and gradient.is_cpu and gradient.layout is torch.strided:
            array = view(gradient)
        else:
            array, land = self._compressed(gradient)
        entry = self._entry
        if entry is None or entry.request.shape != array.shape or self._dtype != array.dtype:
            entry = self._entry = Entry(reducer.request(self.name, array), array, self)
            self._dtype = array.dtype
        entry.array = array
        entry.land = land
        entry.filler = filler
        entry.site = reducer.site
        self.submitted = time.monotonic()
        self.started = True
        reducer.submit(entry)

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
        self._operations = operations
        self.compression = compression
        self.plain = compression is Compression.none
        self.passes_per_step = passes_per_step
        self.sparse_as_dense = sparse_as_dense
        self._op = op
        self._predivide = predivide
        self._process_set = process_set
        self.expected: set[int] = set()
        self.skipped = False
        self.site: Site = None
        self.failed: BaseException | None = None
        # Each counter has one writer, so they need no lock: this thread starts, the daemon's lands.
        self._started = 0
        self._landed = 0
        self._all_landed = threading.Event()
        self._finished = False
        self._prefix = operations.namespace()
        self.gradients: list[Gradient] = []
        self._hooks: list[RemovableHandle] = []
        self._known: set[int] = set()
        self.adopt(parameters)

    def knows(self, parameter: torch.Tensor) -> bool:
        """Says whether this parameter's gradient is reduced."""
        return id(parameter) in self._known

    def adopt(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes parameters in: at the start, and those that are added or thawed later."""
        for name, parameter in parameters:
            gradient = Gradient(self, self._prefix + name, parameter)
            gradient.passes = 0 if parameter.grad is None else self.passes_per_step
            self.gradients.append(gradient)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(gradient.ready))
            self._known.add(id(parameter))
            self._finished = False

    def detach(self) -> None:
        """Takes the hooks off; for when the optimizer is gone."""
        for hook in self._hooks:
            hook.remove()

    def request(self, name: str, array: Any) -> Request:
        """Makes the request of one gradient, once."""
        scaled = self._predivide != 1.0
        check_reducible(array.dtype, self._op, scaled=scaled)
        return self._operations.request(
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
        self._finished = False
        self.site = call_site(sys._getframe(1))  # noqa: SLF001 - the documented way to the caller
        engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - there is no public way; FSDP uses it, too
        engine.queue_callback(lambda: self._end_of_backward(task))

    def _end_of_backward(self, task: int) -> None:
        self.expected.discard(task)
        if not any(gradient.started for gradient in self.gradients):
            return
        if not _nested():
            self._round(more=True)
        elif not self.expected:
            # Nobody may call us when the outer pass ends, for all parameters may lie in inner ones.
            self._land()

    def submit(self, entry: Entry) -> None:
        """Announces one gradient."""
        self._operations.daemon.submit(entry)
        self._started += 1

    def landed(self) -> None:
        """Counts one gradient that is done, one way or another; on the daemon's thread."""
        self._landed += 1
        if self._landed == self._started:
            self._all_landed.set()

    def _round(self, *, more: bool) -> None:
        """Reduces what has been accumulated and waits; no rank is left waiting for what another does not have.

        Parameters without a gradient here take part with zeros, if another rank has one. Where none has, the ranks ask
        each other whether any may still get one in this step, so that all of them make the same number of rounds.

        Args:
            more: whether this rank may make another backward pass in this step.
        """
        for gradient in self.gradients:
            if not gradient.started:
                if gradient.passes:
                    gradient.submit()
                else:
                    gradient.fill()
        self._land()
        for gradient in self.gradients:
            gradient.settle()
        self._finished = all(gradient.started for gradient in self.gradients) or not self._any(more)

    def _any(self, more: bool) -> bool:
        answer = self._operations.allreduce(
            np.array([more]),
            name=f"{self._prefix}another backward pass",
            op=ReduceOp.MAX,
            process_set=self._process_set,
        )
        return bool(answer.result()[0])

    def finish_step(self) -> None:
        """Makes sure that everything is reduced, on ranks with fewer backward passes than others, too."""
        while not self._finished:
            self._round(more=False)

    def reset(self) -> None:
        """Gets ready for the next step."""
        self._finished = False
        self.failed = None
        for gradient in self.gradients:
            gradient.reset()

    def drop(self) -> None:
        """Lets what is under way end, whatever comes of it, before its memory is used for something else."""
        self._wait()
        self.reset()

    def _land(self) -> None:
        """Waits for what was started; raises the error of what has failed."""
        self._wait()
        if self.failed is not None:
            error, self.failed = self.failed, None
            raise error

    def _wait(self) -> None:
        """Waits until everything that was started is done."""
        while self._landed < self._started:
            self._all_landed.clear()
            if self._landed < self._started:
                self._operations.daemon.hurry()
                self._all_landed.wait()


def _nested() -> bool:
    """Says whether this backward pass runs inside another one, as in reentrant checkpointing."""
    runs = 0
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to the callers
    while frame is not None:
        runs += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back
    return runs > 1
