"""Gradients that the user wants reduced together: all of a group, or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from coordd.errors import ArgumentError
from coordd_torch.bucket import partition

if TYPE_CHECKING:
    from coordd_torch.gradient import Gradient

__all__ = ["Grouping"]


class Grouping:
    """Horovod's ``num_groups`` and ``groups``: so many groups of nearly equal size, or those of the user's."""

    def __init__(self, num_groups: int = 0, groups: Any = None) -> None:
        """Reads what the user has given.

        Raises:
            ArgumentError: it is neither a number, nor lists of parameters, each of which is in one list only.
        """
        if num_groups < 0:
            text = f"num_groups should be a non-negative integer, not {num_groups!r}"
            raise ArgumentError(text)
        if isinstance(groups, int) and not isinstance(groups, bool) and groups >= 0:
            num_groups, groups = groups, None
        self._count = num_groups
        self._group_of = {id(parameter): at for at, group in enumerate(_lists(groups)) for parameter in group}

    def buckets(self, gradients: Sequence[Gradient], *, limit: int, last: int) -> list[list[Gradient]]:
        """Divides gradients as the user wants, and the rest as `partition` does, whose arguments these are."""
        if self._count:
            return [group for share in self._shares(gradients) for group in _whole(share)]
        by_group: dict[int, list[Gradient]] = {}
        for gradient in gradients:
            by_group.setdefault(self._group_of.get(id(gradient.parameter), -1), []).append(gradient)
        found = partition(by_group.pop(-1, []), limit=limit, last=last)
        for group in by_group.values():
            found += _whole(group)
        return found

    def _shares(self, gradients: Sequence[Gradient]) -> list[list[Gradient]]:
        """So many shares of nearly equal bytes, in order; each gradient is where its middle lies."""
        total = max(1, sum(gradient.parameter.nbytes for gradient in gradients))
        shares: list[list[Gradient]] = [[] for _ in range(self._count)]
        start = 0
        for gradient in gradients:
            size = gradient.parameter.nbytes
            shares[min(self._count - 1, (2 * start + size) * self._count // (2 * total))].append(gradient)
            start += size
        return [share for share in shares if share]


def _whole(group: Sequence[Gradient]) -> list[list[Gradient]]:
    """One bucket for each type and device."""
    size = sum(gradient.parameter.nbytes for gradient in group)
    return partition(group, limit=size, last=size)


def _lists(groups: Any) -> list[list[torch.Tensor]]:
    if groups is None:
        return []
    text = "groups should be a non-negative integer or a list of lists of parameters"
    if not isinstance(groups, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in groups):
        raise ArgumentError(text)
    members = [parameter for group in groups for parameter in group]
    if not all(isinstance(parameter, torch.Tensor) for parameter in members):
        raise ArgumentError(text)
    if len({id(parameter) for parameter in members}) < len(members):
        raise ArgumentError(f"{text}, and each parameter is in one of them only")
    return [list(group) for group in groups]
