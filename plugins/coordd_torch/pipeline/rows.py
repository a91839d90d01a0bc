"""The rows of a batch: what each microbatch has of all tensors in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from coordd.errors import ArgumentError

__all__ = ["joined", "lengths", "rows_of", "taken"]


def rows_of(values: Any) -> int:
    """Finds how many rows a batch has: the first dimension of all its tensors that have one.

    Raises:
        ArgumentError: there is no such tensor, or they differ.
    """
    found = lengths(values)
    if len(found) != 1:
        told = ", ".join(map(str, found)) or "none"
        raise ArgumentError(
            f"the tensors of a batch must have equally many rows to be cut into microbatches, not {told}"
        )
    return found[0]


def joined(parts: Sequence[Any], rows: Sequence[int]) -> Any:
    """Puts the outputs of microbatches together again: tensors by their rows, all else in lists.

    Args:
        parts: the output of each.
        rows: how many rows each has.

    Raises:
        ArgumentError: the first dimension of a tensor is not that of the rows.
    """

    def whole(path: pytree.KeyPath, *leaves: Any) -> Any:
        if not (isinstance(leaves[0], torch.Tensor) and leaves[0].dim()):
            return list(leaves)
        if [len(leaf) for leaf in leaves] != list(rows):
            raise ArgumentError(
                f"output{pytree.keystr(path)} has shape {tuple(leaves[0].shape)} for {rows[0]} rows, so its first "
                "dimension is not that of the rows, and those of microbatches cannot be joined: let the model put the "
                "rows first"
            )
        return torch.cat(leaves)

    return pytree.tree_map_with_path(whole, *parts)


def lengths(values: Any) -> list[int]:
    """Lists the first dimensions of all tensors that have one, each once."""
    leaves = pytree.tree_leaves(values)
    return sorted({len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()})


def taken(values: Any, part: slice | torch.Tensor) -> Any:
    """Takes some rows of all tensors that have rows."""
    return pytree.tree_map(lambda leaf: leaf[part] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf, values)
