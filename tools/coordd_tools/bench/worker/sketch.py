"""Minimal data-parallel training on one host, as a yardstick for an engine that also has to be safe.

Gradients are views of memory that all ranks see. Hooks count them; a thread reduces its slice of each bucket that all
ranks have filled, one chunk at a time, and writes the mean to every rank. Shared counters show the progress of each
rank.

Left out: names, shapes that differ, parameters without gradients, gradients that users replace, failures, stalls,
several hosts, other types, other operations, and ranks that stop.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from coordd.transport.shared_memory.segments import attach, nameless
from coordd_tools.bench.worker.models import LEARNING_RATE

if TYPE_CHECKING:
    from mpi4py import MPI

    from coordd_tools.bench.worker.rank import Rank

__all__ = ["Sketch"]

_BUCKET_BYTES = 4 << 20
_PIECE = 32 << 10
_AWAKE_SECONDS, _NAP_SECONDS = 100e-6, 50e-6
_ALIGNMENT = 16


class Sketch:
    """The engine of this file."""

    name = "sketch"
    exchanges = True

    def start(self, rank: Rank) -> None:
        """Takes the communicator of the ranks."""
        self._comm = rank.comm

    def stop(self) -> None:
        """Does nothing: the threads wait forever and end with the process."""

    def prepare(self, model: nn.Module, *, label: str) -> tuple[nn.Module, Optimizer]:  # noqa: ARG002
        """Moves the model's gradients into shared memory."""
        return model, _SketchSGD(list(model.parameters()), self._comm)


class _SketchSGD(SGD):
    """An SGD optimizer that keeps gradients in shared memory and waits for the exchange before each step."""

    def __init__(self, parameters: Sequence[Tensor], comm: MPI.Comm) -> None:
        super().__init__(parameters, lr=LEARNING_RATE)
        self._exchange = _Exchange(parameters, comm)

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002, FBT001, FBT002 - torch's signature
        """Zeroes the gradients in place."""
        super().zero_grad(set_to_none=False)

    def step(self, closure: Any = None) -> Any:
        """Waits for the exchange, then updates the parameters."""
        self._exchange.done.acquire()
        return super().step(closure)


class _Exchange:
    """The shared memory, and the thread that reduces in it."""

    def __init__(self, parameters: Sequence[Tensor], comm: MPI.Comm) -> None:
        self._rank, self._size = comm.rank, comm.size
        sizes = [-(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT for parameter in parameters]
        self._memory = _shared(comm, sum(sizes), np.dtype(np.float32))
        self._counts = [words.data for words in _shared(comm, 1 << 12, np.dtype(np.int64))]
        self._buckets: list[range] = []
        self._missing: list[int] = []
        self._ready = threading.Semaphore(0)
        self.done = threading.Semaphore(0)
        flat, stop, left = torch.from_numpy(self._memory[self._rank]), sum(sizes), 0
        end = stop
        for parameter, size in zip(reversed(parameters), reversed(sizes), strict=True):
            stop -= size
            left += 1
            parameter.grad = flat[stop : stop + parameter.numel()].view_as(parameter)
            parameter.register_post_accumulate_grad_hook(self._counter(len(self._buckets)))
            if 4 * (end - stop) >= _BUCKET_BYTES or stop == 0:
                self._buckets.append(range(stop, end))
                self._missing.append(left)
                end, left = stop, 0
        self._wanted = list(self._missing)
        threading.Thread(target=self._run, daemon=True).start()

    def _counter(self, bucket: int) -> Any:
        def count(_: Tensor) -> None:
            self._missing[bucket] -= 1
            if not self._missing[bucket]:
                self._missing[bucket] = self._wanted[bucket]
                self._ready.release()

        return count

    def _run(self) -> None:
        mine, last = self._counts[self._rank], 2 * len(self._buckets) - 1
        step = 0
        while True:
            step += 1
            for number, bucket in enumerate(self._buckets):
                self._ready.acquire()
                mine[2 * number] = step
                self._wait(2 * number, step)
                self._reduce(bucket)
                mine[2 * number + 1] = step
            self._wait(last, step)
            self.done.release()

    def _wait(self, word: int, step: int) -> None:
        """Waits until all ranks have reached a step: spins briefly, then naps, as other ranks may need this core."""
        since = time.perf_counter()
        while any(counts[word] < step for counts in self._counts):
            if time.perf_counter() - since < _AWAKE_SECONDS:
                os.sched_yield()
            else:
                time.sleep(_NAP_SECONDS)

    def _reduce(self, bucket: range) -> None:
        """Averages this rank's slice of a bucket, one chunk at a time."""
        low = bucket.start + len(bucket) * self._rank // self._size
        high = bucket.start + len(bucket) * (self._rank + 1) // self._size
        for start in range(low, high, _PIECE):
            first, *others = (memory[start : min(start + _PIECE, high)] for memory in self._memory)
            for other in others:
                np.add(first, other, out=first)
            np.multiply(first, 1.0 / self._size, out=first)
            for other in others:
                other[...] = first


def _shared(comm: MPI.Comm, count: int, dtype: np.dtype[Any]) -> list[np.ndarray]:
    """Returns zeroed arrays in shared memory, one per rank; they live as long as the process."""
    size = count * dtype.itemsize
    descriptor = nameless(size)
    arrays = [attach(pid, opened, size).view(dtype) for pid, opened in comm.allgather((os.getpid(), descriptor))]
    comm.Barrier()
    os.close(descriptor)
    return arrays
