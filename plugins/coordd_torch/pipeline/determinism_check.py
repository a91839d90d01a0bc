"""Determinism check of a model's forward: values that it draws or counts during tracing would become constants."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from coordd_torch.pipeline.pure_nodes import attribute

__all__ = ["InconstantError", "difference", "refuse_luck"]


class InconstantError(RuntimeError):
    """A value that a trace would keep as a constant changes from call to call."""


def refuse_luck(*, drawn: bool) -> None:
    """Rejects random numbers drawn while a model was traced, because the trace would keep them as constants.

    Raises:
        InconstantError: forward has drawn random numbers.
    """
    if drawn:
        raise InconstantError(
            "forward itself draws random numbers, which would be the same in every step: let its layers draw them, "
            "which may also leave themselves out"
        )


def difference(root: nn.Module, one: fx.Graph, other: fx.Graph) -> str:
    """Describes the first difference of two traces of a model; an empty string if there is none."""
    for told in itertools.zip_longest(_lines(one), _lines(other), fillvalue=("nothing",)):
        (*mine, first), (*others, second) = told
        if mine != others or not _same(root, first, second):
            return f"{_shown(told[0])}, then {_shown(told[1])}"
    return ""


def _lines(graph: fx.Graph) -> Iterator[tuple[Any, ...]]:
    """Yields each node without its name: its operation, its arguments by node number, and its target."""
    numbers = {node: f"%{number}" for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        args = fx.map_arg((node.args, node.kwargs), lambda each: numbers.get(each, "a value of another call"))
        yield node.op, repr(args), node.target


def _same(root: nn.Module, one: Any, other: Any) -> bool:
    """Returns whether two targets are equal, also by value, because a constant may get another name."""
    if one == other:
        return True
    first, second = (attribute(root, each) if isinstance(each, str) else None for each in (one, other))
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    return first is second or (not first.is_meta and not second.is_meta and torch.equal(first, second))


def _shown(line: tuple[Any, ...]) -> str:
    *args, target = line
    return f"{getattr(target, '__name__', target)} {' '.join(args[1:])}".strip()
