"""Tensors that share memory where they are given, and arrive apart: who writes to one of them must be told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["ALIASED", "aliased", "tensors_in"]

ALIASED = " is aliased"
"""Ends the name of the value that tells of another one which of its tensors share memory."""


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a value in order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def aliased(values: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """For each value of which tensors overlap with others, in it or in another value, the numbers of these tensors.

    One tensor in several places is one, and arrives as one. What lies between the first and the last element of a
    tensor is taken to be its own: columns of one matrix overlap.
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
