"""Reduction of a sparse gradient by allgather, because ranks do not know each other's number of rows.

A row is an index and its values, as bytes, so that one operation carries both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from coordd.errors import ArgumentError
from coordd.negotiation.tensor_table import Entry
from coordd.ops.messages import ReduceOp
from coordd_torch.pending import Underway
from coordd_torch.tensors import borrow, from_array

__all__ = ["Scattered"]

_GIVEN, _NOTHING = -1, -2
_OPERATIONS = frozenset({ReduceOp.AVERAGE, ReduceOp.AVERAGE_PRESENT, ReduceOp.SUM})


class Scattered:
    """Reduction of one sparse gradient; also the handle that the daemon resolves.

    Each rank's rows begin with a row of zeros whose index says whether the rank has a gradient. Thus all ranks know
    whether any rank has a gradient, and how many ranks take part.
    """

    def __init__(self, underway: Underway, name: str, like: torch.Tensor) -> None:
        """Stores the gradient's properties.

        Args:
            underway: counts the pending work of the optimizer.
            name: equal on all ranks.
            like: a gradient of the parameter.

        Raises:
            ArgumentError: sparse gradients do not support the optimizer's reduction.
        """
        op = underway.channel.op
        if op not in _OPERATIONS:
            text = (
                f"the gradient of {name!r} is sparse, and can be summed or averaged only, not "
                f"{op.name.lower()}: use sparse_as_dense=True"
            )
            raise ArgumentError(text)
        self._op = op
        self.underway = underway
        self._shape = like.shape
        self._sparse = like.sparse_dim()
        self._dtype = like.dtype
        self._device = like.device
        self._rows: np.ndarray | None = None
        self._values: np.dtype[Any] | None = None
        self.name = name
        self.submitted = 0.0

    def entry(self, value: torch.Tensor | None, *, filler: bool) -> Entry:
        """Returns the entry of this rank's rows; a placeholder says that there is none, and may carry a kept one."""
        kind = _NOTHING if filler else _GIVEN
        indices = torch.full((1, self._sparse), kind, dtype=torch.int64, device="cpu")
        values = torch.zeros(1, *self._shape[self._sparse :], dtype=self._dtype, device="cpu")
        if value is not None:
            entries: Any = value.detach()
            # Not coalesced; neither is the result.
            indices = torch.cat([indices, entries._indices().t().cpu()])  # noqa: SLF001 - there is no public way
            values = torch.cat([values, entries._values().resolve_conj().cpu()])  # noqa: SLF001 - as above
        array = borrow(values.flatten(1) if values.ndim > 1 else values[:, None])[0]
        self._values, self._rows = array.dtype, None
        packed = np.concatenate([indices.numpy().view(np.uint8), array.view(np.uint8)], axis=1)
        self.submitted = time.monotonic()
        return Entry(self.underway.channel.gathering(self.name, packed), packed, self, self.underway.site)

    def result(self) -> torch.Tensor | None:
        """Returns the reduced gradient, once the operation has completed; None if no rank had a gradient."""
        rows, self._rows = self._rows, None
        if rows is None or self._values is None:
            return None
        split = 8 * self._sparse
        indices = torch.from_numpy(np.ascontiguousarray(rows[:, :split]).view(np.int64))
        first = indices[:, 0]
        if not (first == _GIVEN).any():
            return None
        values = from_array(np.ascontiguousarray(rows[:, split:]).view(self._values))
        present, kept = int((first < 0).sum()), first >= 0
        divisor = {ReduceOp.AVERAGE: self.underway.channel.members, ReduceOp.AVERAGE_PRESENT: present}.get(self._op, 1)
        values = values[kept].reshape(-1, *self._shape[self._sparse :])
        values = values if divisor == 1 else values / divisor
        found = torch.sparse_coo_tensor(indices[kept].t(), values, self._shape, device="cpu", check_invariants=False)
        return found.to(self._device)

    def land(self, value: np.ndarray, convert: Callable[[np.ndarray], Any] | None) -> None:
        """Runs on the daemon's thread when the allgather has completed."""
        self._rows = value
        self.underway.land(value, convert)

    def resolve(self, result: object) -> None:  # noqa: ARG002 - what every handle has
        """Never runs: the rows are never a placeholder entry."""
        self.underway.landed()

    def fail(self, error: BaseException) -> None:
        """Runs on the daemon's thread when the allgather has failed."""
        self.underway.fail(error, self)
