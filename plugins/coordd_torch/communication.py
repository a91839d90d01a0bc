"""Communication settings of one optimizer's gradients: process set, reduction, and compression."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from coordd.daemon.operations import Operations
from coordd.errors import ArgumentError
from coordd.gradients.discard_step import tell
from coordd.ops.arguments import check_reducible
from coordd.ops.handles import Handle
from coordd.ops.messages import Kind, ReduceOp, Request
from coordd.ops.process_sets import ProcessSet
from coordd_torch.compression import NoneCompressor
from coordd_torch.compression_stats import reduced
from coordd_torch.compressor import Compressor
from coordd_torch.tensors import borrow, empty_common

__all__ = ["Channel", "check_combines", "share"]

_SAMPLE = 16
"""The compression error is measured on one of this many tensors, if measuring it takes an extra decompression."""
_AVERAGES = frozenset({ReduceOp.AVERAGE, ReduceOp.AVERAGE_PRESENT})
_MEANS = _AVERAGES | {ReduceOp.SUM}


class Channel:
    """Communication settings that all gradients of one optimizer share; builds their requests."""

    def __init__(
        self,
        operations: Operations,
        *,
        prefix: str,
        compressor: Compressor,
        op: ReduceOp,
        predivide: float,
        process_set: ProcessSet,
    ) -> None:
        """Stores the settings; arguments as in `DistributedOptimizer`."""
        self._operations = operations
        self.daemon = operations.daemon
        self.as_horovod = operations.as_horovod
        self.prefix = prefix
        self._steps = ("steps", prefix)
        self.op = op
        self.members = process_set.count(self.daemon.world.size)
        self._predivide = predivide
        self.process_set = process_set
        self._chosen = compressor
        self._measured = 0
        self.compress(wanted=True)

    def broken_off(self, error: BaseException, what: str, *, all_submitted: bool = False) -> None:
        """Notes that an exception has interrupted the reduction of these gradients; see `Daemon.broken_off`."""
        self.daemon.broken_off(error, what, series=self._steps, all_submitted=all_submitted)

    def unbroken(self, what: str) -> AbstractContextManager[None]:
        """Applies `broken_off` to a block."""
        return self.daemon.unbroken(what, series=self._steps)

    def check_in_step(self) -> None:
        """Fails the job if ``sys.exit(0)`` has interrupted the reduction of these gradients, and the script continues.

        Raises:
            PeerError: it continues.
        """
        if self.has_left_off:
            self.daemon.check_in_step(self._steps)

    @property
    def has_left_off(self) -> bool:
        """Whether ``sys.exit(0)`` has interrupted the reduction of these gradients."""
        return self.daemon.has_left_off(self._steps)

    @property
    def joins(self) -> int:
        """How often all members of the process set have joined; equal on all of them."""
        return self._operations.joins(self.process_set.ranks)

    def compress(self, *, wanted: bool) -> None:
        """Turns compression on or off from now on; residuals are kept."""
        self.compressor = self._chosen if wanted else NoneCompressor()
        self.plain = isinstance(self.compressor, NoneCompressor)
        self._alone = self.compressor if self.compressor.elementwise else NoneCompressor()

    def carries(self, tensor: Tensor) -> bool:
        """Returns whether tensors like this one are reduced in the rounds of a compressor."""
        return not self.compressor.elementwise and tensor.dtype.is_floating_point

    def request(self, name: str, array: Any) -> Request:
        """Returns the request for one allreduce of gradients, elementwise compressed or not at all."""
        scaled = self._predivide != 1.0
        check_reducible(array.dtype, self.op, scaled=scaled)
        scales = {"prescale": 1.0 / self._predivide, "postscale": self._predivide}
        return self._operations.request(Kind.ALLREDUCE, name, array, self.process_set, op=self.op, **scales)

    def gathering(self, name: str, array: np.ndarray) -> Request:
        """Returns the request for an allgather of rows, whose number may differ between members."""
        return self._operations.request(Kind.ALLGATHER, name, array, self.process_set)

    def round(self, name: str, number: int, kind: Kind, array: np.ndarray) -> Request:
        """Returns the request for one round of a compressor.

        The first round may be locked, like any gradient. Later rounds are submitted while other ranks wait for the
        first round of other buckets, so a lock must not hold them back: they are transient.
        """
        alike = array[:0] if kind is Kind.ALLTOALL else array  # only what must be equal on all members
        request = self._operations.request(kind, name, alike, self.process_set, op=ReduceOp.AVERAGE)
        if number:
            request = msgspec.structs.replace(request, name=f"{name}.round{number}", transient=True)
        return request

    def memory(self, count: int, like: Tensor) -> Tensor:
        """Returns a flat tensor of a parameter's dtype and device; on a CPU it lies in the host's shared memory."""
        if like.device.type != "cpu":
            return torch.zeros(count, dtype=like.dtype, device=like.device)
        return empty_common(count, dtype=like.dtype, daemon=self.daemon)

    def compressed(self, tensor: Tensor, *, values: int | None = None) -> tuple[np.ndarray, Callable[..., Tensor]]:
        """Compresses a tensor elementwise; returns the array to reduce and a function that decompresses the result.

        The function writes the result to `tensor` and returns it.

        Args:
            tensor: gradients, with marks and flags behind them in a bucket.
            values: how many elements are gradients; by default all.
        """
        way, gauge = self._alone, self._chosen.gauge
        small, context = way.compress(tensor)
        plain, nbytes = reduced(tensor.nbytes, self.members), reduced(small.nbytes, self.members)
        if small is not tensor:
            self._measured += 1
            if self._measured % _SAMPLE == 1:
                own = tensor.flatten()[:values]
                lost = own - way.decompress(small, context).flatten()[:values]
                gauge.compare(own.norm().item(), lost.norm().item())
        array, back = borrow(small)

        def land(finished: np.ndarray) -> Tensor:
            gauge.travelled(nbytes, plain=plain)
            result = way.decompress(back(finished), context)
            return tensor if result is tensor else tensor.copy_(result)

        return array, land

    @property
    def repeats(self) -> bool:
        """Whether averaged gradients can be averaged again, with new ones added, and keep their values."""
        return self.op in _AVERAGES and not self.compressor.feedback

    def forget(self, name: str) -> None:
        """Drops the compressor's state of a gradient that is no longer reduced, because a new one may get its name."""
        self.compressor.residuals.pop(name, None)
        self.compressor.memory.pop(name, None)

    def has_all(self, present: Any) -> bool:
        """Returns whether all members took part; False if the reduction does not show it.

        Args:
            present: as in `unanimous`.
        """
        wanted = {ReduceOp.AVERAGE: 1.0, ReduceOp.SUM: float(self.members)}.get(self.op)
        return wanted is not None and abs(wanted - abs(present)) < 0.5 / self.members

    def unanimous(self, present: Any, repeat: Any) -> bool:
        """Returns whether all participating ranks repeat, so that averaging their equal values changes nothing.

        Args:
            present: the reduction of a number that is 1 on every rank that has not joined.
            repeat: the reduction of a number that is 1 on every rank that reduces gradients again.
        """
        almost = 0.5 / self.members
        whole = self.op is not ReduceOp.AVERAGE or abs(1.0 - abs(present)) < almost
        return bool(whole and abs(abs(present) - abs(repeat)) < almost)

    def tell(self, name: str, text: str) -> Handle[Any]:
        """Starts to gather one line of text from each rank."""
        return tell(self._operations, self.prefix + name, text, self.process_set)

    def agree(self, array: np.ndarray, about: str, op: ReduceOp) -> Any:
        """Reduces a few numbers and waits for the result."""
        return self.ask(array, about, op).result()

    def ask(self, array: np.ndarray, about: str, op: ReduceOp) -> Handle[Any]:
        """Starts to reduce a few numbers."""
        return self._operations.allreduce(array, name=self.prefix + about, op=op, process_set=self.process_set)


def share(op: ReduceOp, *, present: int, members: int) -> float:
    """Returns the factor that turns a mean over the active ranks into the result of `op`.

    In an average joined ranks count with zeros.
    """
    if op is ReduceOp.SUM:
        return present
    return present / members if op is ReduceOp.AVERAGE else 1.0


def check_combines(compressor: Compressor, op: ReduceOp) -> None:
    """Rejects a reduction that a compressor cannot compute.

    Raises:
        ArgumentError: the compressor computes means, and `op` does not follow from a mean.
    """
    alone = op is ReduceOp.ADASUM and compressor.simple  # such a compressor does not carry gradients in rounds
    if not (compressor.elementwise or alone or op in _MEANS):
        text = (
            f"{type(compressor).__name__} makes sums and averages, not {op.name.capitalize()}: "
            "use op=Sum or op=Average, or Compression.fp16 or bf16"
        )
        raise ArgumentError(text)
