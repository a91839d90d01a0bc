"""How the gradients of one optimizer travel: between whom, how they combine, and what makes them smaller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from coordd.arguments import check_reducible
from coordd.discarding import tell
from coordd.errors import ArgumentError
from coordd.handles import Handle
from coordd.messages import Kind, ReduceOp, Request
from coordd.operations import Operations
from coordd.process_sets import ProcessSet
from coordd_torch.compression import NoneCompressor
from coordd_torch.compressor import Compressor
from coordd_torch.gauge import reduced
from coordd_torch.tensors import borrow, empty_common

__all__ = ["Channel", "check_combines", "share"]

_SAMPLE = 16
"""Of so many tensors the loss of one is measured, where that has to be computed on its own."""
_AVERAGES = frozenset({ReduceOp.AVERAGE, ReduceOp.AVERAGE_PRESENT})
_MEANS = _AVERAGES | {ReduceOp.SUM}


class Channel:
    """What all gradients of one optimizer have in common on their way."""

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
        """Describes it; arguments as those of `DistributedOptimizer`."""
        self._operations = operations
        self.daemon = operations.daemon
        self.as_horovod = operations.as_horovod
        self.prefix = prefix
        self.op = op
        self.members = process_set.count(self.daemon.world.size)
        self._predivide = predivide
        self.process_set = process_set
        self._chosen = compressor
        self._measured = 0
        self.compress(wanted=True)

    @property
    def joins(self) -> int:
        """How often all members have joined; equal on all of them."""
        return self._operations.joins(self.process_set.ranks)

    def compress(self, *, wanted: bool) -> None:
        """Makes gradients smaller from now on, or leaves them as they are; what is still to be sent is kept."""
        self.compressor = self._chosen if wanted else NoneCompressor()
        self.plain = isinstance(self.compressor, NoneCompressor)
        self._alone = self.compressor if self.compressor.elementwise else NoneCompressor()

    def carries(self, tensor: Tensor) -> bool:
        """Says whether tensors like this one travel in the rounds of a compressor."""
        return not self.compressor.elementwise and tensor.dtype.is_floating_point

    def request(self, name: str, array: Any) -> Request:
        """Makes the request of gradients that are added up as they are, once."""
        scaled = self._predivide != 1.0
        check_reducible(array.dtype, self.op, scaled=scaled)
        scales = {"prescale": 1.0 / self._predivide, "postscale": self._predivide}
        return self._operations.request(Kind.ALLREDUCE, name, array, self.process_set, op=self.op, **scales)

    def gathering(self, name: str, array: np.ndarray) -> Request:
        """Makes the request of rows of which each member has as many as it likes."""
        return self._operations.request(Kind.ALLGATHER, name, array, self.process_set)

    def round(self, name: str, number: int, kind: Kind, array: np.ndarray) -> Request:
        """Makes the request of a compressor's round.

        The first may be locked, as any gradient. Those that follow come while others wait for the first of other
        buckets, so no lock may hold them back: they are used once.
        """
        alike = array[:0] if kind is Kind.ALLTOALL else array  # what all members must agree on
        request = self._operations.request(kind, name, alike, self.process_set, op=ReduceOp.AVERAGE)
        if number:
            request = msgspec.structs.replace(request, name=f"{name}.round{number}", transient=True)
        return request

    def memory(self, count: int, like: Tensor) -> Tensor:
        """Makes a flat tensor of a parameter's type and device; on a CPU in memory that all ranks of the host see."""
        if like.device.type != "cpu":
            return torch.zeros(count, dtype=like.dtype, device=like.device)
        return empty_common(count, dtype=like.dtype, daemon=self.daemon)

    def compressed(self, tensor: Tensor, *, values: int | None = None) -> tuple[np.ndarray, Callable[..., Tensor]]:
        """Makes what travels instead of a tensor, number for number, and what puts it back.

        Args:
            tensor: gradients, and what travels with them.
            values: how many numbers are gradients; by default all.
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
        """Whether what has been averaged may be averaged once more, with something added, and stays what it is."""
        return self.op in _AVERAGES and not self.compressor.feedback

    def forget(self, name: str) -> None:
        """Forgets what the compressor has kept of a gradient that is reduced no longer: a new one may get its name."""
        self.compressor.residuals.pop(name, None)
        self.compressor.memory.pop(name, None)

    def has_all(self, present: Any) -> bool:
        """Says whether all members have taken part; False where the sum cannot tell.

        Args:
            present: as in `unanimous`.
        """
        wanted = {ReduceOp.AVERAGE: 1.0, ReduceOp.SUM: float(self.members)}.get(self.op)
        return wanted is not None and abs(wanted - abs(present)) < 0.5 / self.members

    def unanimous(self, present: Any, repeat: Any) -> bool:
        """Says whether all that take part repeat, so that the average of what is equal on them all is what it was.

        Args:
            present: a number that was 1 on all that have not joined, reduced.
            repeat: a number that was 1 where gradients are reduced once more, reduced.
        """
        almost = 0.5 / self.members
        whole = self.op is not ReduceOp.AVERAGE or abs(1.0 - abs(present)) < almost
        return bool(whole and abs(abs(present) - abs(repeat)) < almost)

    def tell(self, name: str, text: str) -> Handle[Any]:
        """Starts to gather a line of each rank."""
        return tell(self._operations, self.prefix + name, text, self.process_set)

    def agree(self, array: np.ndarray, about: str, op: ReduceOp) -> Any:
        """Reduces a few numbers at once."""
        return self.ask(array, about, op).result()

    def ask(self, array: np.ndarray, about: str, op: ReduceOp) -> Handle[Any]:
        """Starts to reduce a few numbers."""
        return self._operations.allreduce(array, name=self.prefix + about, op=op, process_set=self.process_set)


def share(op: ReduceOp, *, present: int, members: int) -> float:
    """By what a mean over those present is multiplied: who has joined counts in an average, with nothing."""
    if op is ReduceOp.SUM:
        return present
    return present / members if op is ReduceOp.AVERAGE else 1.0


def check_combines(compressor: Compressor, op: ReduceOp) -> None:
    """Refuses what cannot be computed from what travels.

    Raises:
        ArgumentError: the compressor makes means, from which this does not follow.
    """
    alone = op is ReduceOp.ADASUM and compressor.simple  # then it is no compressor that carries gradients
    if not (compressor.elementwise or alone or op in _MEANS):
        text = (
            f"{type(compressor).__name__} makes sums and averages, not {op.name.capitalize()}: "
            "use op=Sum or op=Average, or Compression.fp16 or bf16"
        )
        raise ArgumentError(text)
