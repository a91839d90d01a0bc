"""Parameters that are added, thawed or replaced after their optimizer was made distributed; the same on all ranks."""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

__all__ = ["Groups", "groups_of", "late", "unchanged"]

Groups = Callable[[], Sequence[Mapping[str, Any]]]
"""Returns an optimizer's parameter groups as they are now."""


def groups_of(optimizer: torch.optim.Optimizer) -> Groups:
    """Makes what returns an optimizer's parameter groups, and does not keep it alive."""
    living = weakref.ref(optimizer)

    def groups() -> Sequence[Mapping[str, Any]]:
        found = living()
        return () if found is None else found.param_groups

    return groups


def unchanged(groups: Sequence[Mapping[str, Any]], lists: Sequence[Sequence[torch.Tensor]]) -> bool:
    """Whether the parameters of groups are the very ones of these lists, in the same order; looks at all, quickly."""
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
    """Finds the parameters to train that are not known yet, and names them by their places.

    Args:
        groups: an optimizer's parameter groups.
        known: the ids of the parameters that are reduced.
        taken: the names of those. A parameter that has taken another one's place gets a name of its own.
        frozen: whether to find those, too, that are not trained now.
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
    """Returns the name, with a number if it is taken, and takes it."""
    choices = itertools.chain([name], (f"{name}@{number}" for number in itertools.count(1)))
    found = next(choice for choice in choices if choice not in taken)
    taken.add(found)
    return found
