"""Detection of tensors that share memory in the sending stage but arrive as separate tensors.

The receiving stage must know them, because it may write to one of them in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["ALIASED", "aliased", "tensors_in"]

ALIASED = " is aliased"
"""Suffix of the name of the value that lists which tensors of another value share memory."""


def tensors_in(value: Any) -> list[Tensor]:
    """Returns the tensors of a value in pytree order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def aliased(values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns, for each value with tensors that overlap other tensors, the indices of these tensors.

    The keys are the values' names with the suffix `ALIASED`. The other tensor may be in the same value or in another
    one. The same tensor in several places counts once, and arrives as one tensor. A tensor is assumed to own all
    memory between its first and its last element, so columns of one matrix overlap.
    """
    places: dict[int, list[tuple[str, int]]] = {}
    extents: list[tuple[int, int, int]] = []
    for name, value in values.items():
        for number, tensor in enumerate(tensors_in(value)):
            if tensor.layout is torch.strided and tensor.numel():
                if id(tensor) not in places:
                    extents.append((*_extent(tensor), id(tensor)))
                places.setdefault(id(tensor), []).append((name, number))
    found: dict[str, set[int]] = {}
    for name, number in (place for each in _overlapping(extents) for place in places[each]):
        found.setdefault(name, set()).add(number)
    return {name + ALIASED: tuple(sorted(numbers)) for name, numbers in found.items()}


def _extent(tensor: Tensor) -> tuple[int, int]:
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (1 + steps) * tensor.element_size()


def _overlapping(extents: list[tuple[int, int, int]]) -> set[int]:
    found: set[int] = set()
    reach, furthest = 0, 0
    for start, end, each in sorted(extents):
        if start < reach:
            found |= {each, furthest}
        if end > reach:
            reach, furthest = end, each
    return found
