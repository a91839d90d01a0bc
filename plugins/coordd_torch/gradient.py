"""One parameter's gradient, from backward to its reduction: in a bucket, or on its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from coordd.errors import CoorddError
from coordd.table import Entry
from coordd_torch.tensors import view

if TYPE_CHECKING:
    from coordd_torch.bucket import Bucket
    from coordd_torch.reducer import Reducer

__all__ = ["Gradient"]

_NOTHING = np.empty(0, np.uint8)
_current_task = torch._C._current_graph_task_id  # noqa: SLF001 - there is no public way; FSDP uses it, too


class Gradient:
    """One parameter's gradient.

    Until it has a place in a bucket it is its own handle towards the daemon: made once, not every step, and waited for
    together with all others.
    """

    def __init__(self, reducer: Reducer, name: str, parameter: torch.Tensor) -> None:
        self._reducer = reducer
        self._zeros: torch.Tensor | None = None
        self._entry: Entry | None = None
        self._dtype: np.dtype[Any] | None = None
        self.parameter = parameter
        self.bucket: Bucket | None = None
        self.name = name
        self.submitted = 0.0
        self.passes = 0
        self.started = False

    @property
    def turn(self) -> tuple[int, int]:
        """The place in the plans at which it was last reduced on its own; equal on all ranks."""
        return self._entry.turn if self._entry is not None else (0, 0)

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
        """Starts the reduction of what has been accumulated, or brings it to its bucket."""
        reducer = self._reducer
        reducer.touched = True
        gradient = self.parameter.grad
        if gradient is not None and gradient.layout is not torch.strided and reducer.sparse_as_dense:
            gradient = self.parameter.grad = gradient.to_dense()
        bucket = self.bucket
        if bucket is not None and bucket.open:
            if gradient is not None:
                self.started = True
                bucket.take(self, gradient)
        elif gradient is None:  # a hook of the user's has taken it away
            self.fill()
        else:
            self._start(gradient, filler=False)

    def fill(self) -> None:
        """Takes part with zeros, if any rank has something for this parameter."""
        self._zeros = torch.zeros_like(self.parameter, requires_grad=False)
        self._start(self._zeros, filler=True)

    def settle(self) -> None:
        """Keeps the zeros that others' gradients were added to; without any, there still is no gradient."""
        if self._zeros is not None:
            if self.started:
                self.parameter.grad = self._zeros
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
        self._reducer.land(value, convert)

    def resolve(self, result: object) -> None:
        """Runs on the daemon's thread when no rank had anything for this parameter."""
        self.started = result is not None
        self._reducer.landed()

    def fail(self, error: BaseException) -> None:
        """Runs on the daemon's thread when the reduction has failed."""
        self._reducer.fail(error)

    def _start(self, gradient: torch.Tensor, *, filler: bool) -> None:
        reducer = self._reducer
        land = None
        if reducer.plain and gradient.is_cpu and gradient.layout is torch.strided:
            array = view(gradient)
        else:
            array, land = reducer.compressed(gradient)
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
