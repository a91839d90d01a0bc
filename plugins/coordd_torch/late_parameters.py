"""Parameters that are added, unfrozen or replaced after the call of `DistributedOptimizer`; equal on all ranks."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["Groups", "groups_of", "late", "unchanged"]

Groups = Callable[[], Sequence[Mapping[str, Any]]]
"""Returns an optimizer's current parameter groups."""


def groups_of(optimizer: torch.optim.Optimizer) -> Groups:
    """Returns a function that returns an optimizer's parameter groups without keeping the optimizer alive."""
    living = weakref.ref(optimizer)

    def groups() -> Sequence[Mapping[str, Any]]:
        found = living()
        return () if found is None else found.param_groups

    return groups


def unchanged(groups: Sequence[Mapping[str, Any]], lists: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Returns whether the groups have exactly the parameters of these lists, in the same order."""
    if len(groups) != len(lists):
        return False
    for group, seen in zip(groups, lists, strict=True):
        now = group["params"]
        if len(now) != len(seen) or not all(map(operator.is_, now, seen)):
            return False
    return True


def late(
    groups: Iterable[Mapping[str, Any]], known: set[int], taken: Iterable[str], *, frozen: bool = False
) -> list[tuple[str, torch.Tensor]]:
    """Returns the trained parameters that are not known yet, with names made of their group and index.

    Args:
        groups: an optimizer's parameter groups.
        known: the ids of the parameters whose gradients are reduced.
        taken: the names of these parameters. A parameter at the position of a replaced one gets a different name.
        frozen: whether to include parameters that are frozen now.
    """
    found = [
        (f"param.{index}.{place}", parameter)
        for index, group in enumerate(groups)
        if not known.issuperset(map(id, group["params"]))  # the usual case, quickly
        for place, parameter in enumerate(group["params"])
        if id(parameter) not in known and (frozen or parameter.requires_grad)
    ]
    names = set(taken) if found else set()
    return [(_free(name, names), parameter) for name, parameter in found]


def _free(name: str, taken: set[str]) -> str:
    """Returns the name, with a number appended if it is taken, and adds it to `taken`."""
    choices = itertools.chain([name], (f"{name}@{number}" for number in itertools.count(1)))
    found = next(choice for choice in choices if choice not in taken)
    taken.add(found)
    return found
