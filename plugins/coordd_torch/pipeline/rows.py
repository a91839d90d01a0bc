"""Rows of a batch, which are divided among microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from coordd.errors import ArgumentError

__all__ = ["dimension_of", "joined", "lengths", "rows_of", "taken"]


def rows_of(values: Any) -> int:
    """Returns the number of rows of a batch: the first dimension of all its tensors that have one.

    Raises:
        ArgumentError: there is no such tensor, or they differ.
    """
    found = lengths(values)
    if len(found) != 1:
        told = ", ".join(map(str, found)) or "none: torch.as_tensor() makes a tensor of an array or a list"
        raise ArgumentError(
            f"the tensors of a batch must have equally many rows to be cut into microbatches, not {told}"
        )
    return found[0]


def joined(parts: Sequence[Any], rows: Sequence[int], dimensions: Sequence[int | None] | None = None) -> Any:
    """Joins the outputs of microbatches: tensors along their rows, all other leaves as lists.

    Args:
        parts: the output of each.
        rows: how many rows each has.
        dimensions: for each leaf of an output its row dimension, or None if it has none; by default the first.

    Raises:
        ArgumentError: the row dimension of a tensor is unknown or has the wrong size.
    """
    paths, structure = pytree.tree_flatten_with_path(parts[0])
    leaves = zip(*(pytree.tree_leaves(part) for part in parts), strict=True)
    places = dimensions if dimensions is not None and len(dimensions) == len(paths) else [0] * len(paths)
    whole = [
        _joined(pytree.keystr(path), each, rows, place)
        for (path, _), each, place in zip(paths, leaves, places, strict=True)
    ]
    return pytree.tree_unflatten(whole, structure)


def _joined(path: str, leaves: Sequence[Any], rows: Sequence[int], dimension: int | None) -> Any:
    if not (isinstance(leaves[0], torch.Tensor) and leaves[0].dim()):
        return list(leaves)
    if dimension is None or [leaf.shape[dimension] for leaf in leaves] != list(rows):
        raise ArgumentError(
            f"output{path} has shape {tuple(leaves[0].shape)} for {rows[0]} rows, and no dimension that is that of the "
            "rows, so those of microbatches cannot be joined: let the model return one row for each of its inputs"
        )
    return torch.cat(tuple(leaves), dimension)


def dimension_of(one: Any, other: Any, rows: tuple[int, int]) -> int | None:
    """Returns the only dimension that is as large as the number of rows, given the outputs for two numbers of rows."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return None
    pairs = zip(one.shape, other.shape, strict=False)
    found = [number for number, pair in enumerate(pairs) if tuple(map(int, pair)) == rows]
    return found[0] if len(found) == 1 and one.dim() == other.dim() else None


def lengths(values: Any) -> list[int]:
    """Returns the distinct first dimensions of all tensors that have one, sorted."""
    leaves = pytree.tree_leaves(values)
    return sorted({len(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()})


def taken(values: Any, part: slice | torch.Tensor) -> Any:
    """Selects rows of all tensors that have rows."""
    return pytree.tree_map(lambda leaf: leaf[part] if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf, values)
