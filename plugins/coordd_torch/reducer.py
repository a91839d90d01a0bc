"""Reducing the gradients of one optimizer while backward still computes the rest.

Its one rule: no rank ever waits for a gradient that another does not have. Who has none takes part with zeros.

In the first step every gradient is reduced on its own. Then all ranks know the same order, that of the plans, and the
gradients move into buckets.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from coordd.handles import call_site
from coordd.messages import Kind, ReduceOp, Request
from coordd.operations import Operations, check_reducible
from coordd.process_sets import ProcessSet
from coordd.table import Entry, Site
from coordd_torch.bucket import Bucket, partition
from coordd_torch.compression import Compression, Compressor
from coordd_torch.devices import overlaps
from coordd_torch.gradient import Gradient
from coordd_torch.tensors import borrow, empty_common

__all__ = ["Reducer"]

_LAST_BUCKET_BYTES = 1 << 20


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
        self.touched = False
        """Whether this backward pass has made a gradient."""
        self._prefix = operations.namespace()
        self._buckets: list[Bucket] = []
        self._loose: list[Gradient] = []
        self._adrift: list[Gradient] = []
        self._moving: list[Gradient] = []
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
            self._loose.append(gradient)
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
        self.touched = self._finished = False
        self.site = call_site(sys._getframe(1))  # noqa: SLF001 - the documented way to the caller
        engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - there is no public way; FSDP uses it, too
        engine.queue_callback(lambda: self._end_of_backward(task))

    def _end_of_backward(self, task: int) -> None:
        self.expected.discard(task)
        if not self.touched:
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

    def memory(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """Makes a flat tensor of a parameter's type and device; on a CPU in memory that all ranks of the host see."""
        if like.device.type != "cpu":
            return torch.zeros(count, dtype=like.dtype, device=like.device)
        return empty_common(count, dtype=like.dtype, daemon=self._operations.daemon)

    def compressed(self, gradient: torch.Tensor) -> tuple[np.ndarray, Callable[[np.ndarray], torch.Tensor]]:
        """Makes what travels instead of a gradient, and what puts it back."""
        small, context = self.compression.compress(gradient)
        array, back = borrow(small)

        def land(finished: np.ndarray) -> torch.Tensor:
            result = self.compression.decompress(back(finished), context)
            return gradient if result is gradient else gradient.copy_(result)

        return array, land

    def land(self, value: np.ndarray, convert: Callable[[np.ndarray], Any] | None) -> None:
        """Takes over what has arrived; on the daemon's thread."""
        try:
            if convert is not None:
                convert(value)
        except Exception as error:  # noqa: BLE001 - the thread that waits gets it
            self.failed = self.failed or error
        self.landed()

    def fail(self, error: BaseException) -> None:
        """Notes the first failure; on the daemon's thread."""
        self.failed = self.failed or error
        self.landed()

    def landed(self) -> None:
        """Counts what is done, one way or another; on the daemon's thread."""
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
        first = all(bucket.open for bucket in self._buckets) and not self._adrift
        for bucket in self._buckets:
            bucket.close()
        alone = [*self._loose, *self._adrift]
        for gradient in alone:
            if not gradient.started:
                if gradient.passes:
                    gradient.submit()
                else:
                    gradient.fill()
        self._land()
        for gradient in alone:
            gradient.settle()
        if first:
            self._adrift = [gradient for bucket in self._buckets for gradient in bucket.settle()]
            self._moving = [gradient for gradient in self._loose if gradient.started]
        missing = [gradient for gradient in (*self._loose, *self._adrift) if not gradient.started]
        self._finished = not missing or not self._any(more)

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
        for gradient in (*self._loose, *self._adrift):
            gradient.reset()
        for bucket in self._buckets:
            bucket.reset()
        self._adrift = []
        if self._moving:
            self._move_in()

    def _move_in(self) -> None:
        """Gives the gradients that were reduced on their own places in buckets, in the order of the plans."""
        moving, self._moving = sorted(self._moving, key=lambda gradient: gradient.turn), []
        self._loose = [gradient for gradient in self._loose if gradient not in moving]
        config = self._operations.daemon.config
        early = config.overlap and all(overlaps(gradient.parameter.device.type) for gradient in moving)
        limit = int(config.fusion_mb * (1 << 20)) if early else sys.maxsize
        for group in partition(moving, limit=limit, last=min(limit, _LAST_BUCKET_BYTES)):
            self._buckets.append(Bucket(self, f"{self._prefix}bucket.{len(self._buckets)}", group, early=early))

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
