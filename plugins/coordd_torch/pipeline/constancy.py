"""Whether a model does the same each time: what it draws or counts while it is traced would be kept for ever."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from coordd_torch.pipeline.purity import attribute

__all__ = ["InconstantError", "difference", "refuse_luck"]


class InconstantError(RuntimeError):
    """What a trace would keep changes from call to call."""


def refuse_luck(*, drawn: bool) -> None:
    """Refuses random numbers that were drawn while a model was traced, which the trace has once and for all.

    Raises:
        InconstantError: some were.
    """
    if drawn:
        raise InconstantError(
            "forward itself draws random numbers, which would be the same in every step: let its layers draw them, "
            "which may also leave themselves out"
        )


def difference(root: nn.Module, one: fx.Graph, other: fx.Graph) -> str:
    """Tells the first difference of two traces of a model; nothing if there is none."""
    for told in itertools.zip_longest(_lines(one), _lines(other), fillvalue=("nothing",)):
        (*mine, first), (*others, second) = told
        if mine != others or not _same(root, first, second):
            return f"{_shown(told[0])}, then {_shown(told[1])}"
    return ""


def _lines(graph: fx.Graph) -> Iterator[tuple[Any, ...]]:
    """The nodes, without their names: what they do, with which of the nodes before, and to what."""
    numbers = {node: f"%{number}" for number, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        args = fx.map_arg((node.args, node.kwargs), lambda each: numbers.get(each, "a value of another call"))
        yield node.op, repr(args), node.target


def _same(root: nn.Module, one: Any, other: Any) -> bool:
    """Whether two targets are the same, if only by value: a constant may get another name."""
    if one == other:
        return True
    first, second = (attribute(root, each) if isinstance(each, str) else None for each in (one, other))
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return False
    return first is second or (not first.is_meta and not second.is_meta and torch.equal(first, second))


def _shown(line: tuple[Any, ...]) -> str:
    *args, target = line
    return f"{getattr(target, '__name__', target)} {' '.join(args[1:])}".strip()
