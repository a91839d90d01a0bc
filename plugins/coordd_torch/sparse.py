"""Sums of sparse tensors: the entries of all ranks, concatenated; an index of several ranks occurs several times."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from coordd import api
from coordd.daemon.reject_on_all_ranks import Name, refusable
from coordd.errors import ArgumentError
from coordd.ops.arguments import check_op
from coordd.ops.handles import Handle
from coordd.ops.messages import Kind, ReduceOp
from coordd.ops.process_sets import ProcessSet, global_process_set
from coordd_torch.operations import Average, GroupHandle, Sum, Tensor, allgather_async

__all__ = ["SparseHandle", "sparse_allreduce_async"]


class SparseHandle(GroupHandle):
    """One handle of two operations; it can be called, like Horovod's handle, or waited for, like every handle."""

    def __init__(self, indices: Handle[Tensor], values: Handle[Tensor], size: torch.Size, divisor: int) -> None:
        super().__init__((indices, values))
        self._size = size
        self._divisor = divisor

    def result(self) -> Tensor:  # type: ignore[override] # one tensor, of two operations
        """Waits for both operations and returns the sparse sum or average."""
        indices, values = super().result()
        if self._divisor != 1:
            values = values / self._divisor
        return torch.sparse_coo_tensor(indices.t(), values, self._size, device=values.device, check_invariants=False)

    __call__ = result


def _named(given: Mapping[str, Any]) -> Name:
    return Kind.ALLGATHER, _names(given.get("name"))


@refusable(_named, api.operations)
def sparse_allreduce_async(
    tensor: Tensor,
    name: str | None = None,
    op: ReduceOp | None = None,
    process_set: ProcessSet = global_process_set,
) -> SparseHandle:
    """Starts to sum or average a sparse tensor over all ranks.

    Args:
        tensor: sparse, in COO layout; of equal shape on all ranks, with any number of entries.
        name: equal on all ranks.
        op: `Average`, the default, or `Sum`.
        process_set: the ranks that take part.

    Returns:
        A callable handle; its result is an uncoalesced sparse tensor.

    Raises:
        ArgumentError: the tensor is not in COO layout, or `op` is another operation.
    """
    op = Average if op is None else check_op(op)
    if tensor.layout is not torch.sparse_coo:
        text = f"a sparse tensor in coordinates is wanted, not {tensor.layout}: use allreduce, or tensor.to_sparse()"
        raise ArgumentError(text)
    if op not in {Average, Sum}:
        text = f"{op.name.capitalize()} of sparse tensors is not supported: use Sum or Average, or tensor.to_dense()"
        raise ArgumentError(text)
    entries: Any = tensor.detach()
    indices = entries._indices().t().contiguous()  # noqa: SLF001 - works on uncoalesced tensors, too
    values = entries._values().contiguous()  # noqa: SLF001 - as above
    divisor = process_set.count(api.size()) if op is Average else 1
    names = _names(name)
    with api.operations().together(names):
        return SparseHandle(
            allgather_async(indices, names[0], process_set),
            allgather_async(values, names[1], process_set),
            tensor.shape,
            divisor,
        )


def _names(name: str | None) -> list[str | None]:
    """Returns the names of the two operations."""
    return [name and f"{name}.indices", name and f"{name}.values"]
