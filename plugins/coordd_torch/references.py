"""What refers to a gradient besides its parameter.

A script may hold on to the tensor that ``.grad`` is, or to the memory of it: a list of all gradients, made once; a flat
buffer of which each gradient is a view; an array. Or the gradient has a graph of its own, as after
``backward(create_graph=True)``. Then ``.grad`` must stay that tensor, and what is reduced is written to it.
"""

from __future__ import annotations

import operator
import sys

import torch

__all__ = ["are_referenced", "has_other_users", "write"]

_is_old = operator.attrgetter("_version")
"""How often it has been changed in place; a new one has not."""
_HAS_GRAPH = operator.attrgetter("requires_grad")


def _users(value: torch.Tensor) -> int:
    """Counts the tensors and arrays that share the memory."""
    found: int = torch._C._storage_Use_Count(value.untyped_storage()._cdata)  # noqa: SLF001 - no public way
    return found


def _references(values: tuple[torch.Tensor, ...]) -> list[int]:
    return list(map(sys.getrefcount, values))


def _usual() -> tuple[int, int]:
    """Counts both for a gradient to which nothing refers besides its parameter; that depends on PyTorch's version."""
    parameter = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    parameter.grad = torch.zeros(1, device="cpu")
    return _users(parameter.grad), _references((parameter.grad,))[0]


_ONE_USER, _ONE_REFERENCE = _usual()


def are_referenced(values: tuple[torch.Tensor, ...], *, by_hand: bool) -> list[bool] | None:
    """Says of each gradient whether anything refers to it besides its parameter; None where nothing does to any.

    What this pass has made is usually new, and then it costs little: autograd has not added to it yet, which is what
    its version says. Only others are looked at one by one.

    Args:
        values: they; no other Python object of ours may refer to them.
        by_hand: whether the script has set one of them, which may be new, too.
    """
    references = _references(values)
    if by_hand or any(map(_HAS_GRAPH, values)) or max(references) > _ONE_REFERENCE or any(map(_is_old, values)):
        return [
            value.requires_grad or count > _ONE_REFERENCE or ((by_hand or _is_old(value)) and _users(value) > _ONE_USER)
            for value, count in zip(values, references, strict=True)
        ]
    return None


def has_other_users(value: torch.Tensor) -> bool:
    """Whether another tensor, or an array, shares the memory of a gradient that is not a bucket's."""
    return _users(value) > _ONE_USER


def write(value: torch.Tensor, reduced: torch.Tensor) -> None:
    """Makes a gradient that stays the tensor that it is what was reduced.

    Where it has a graph, that is the graph of this rank's own gradient, whose derivatives are reduced in their turn;
    the memory that the graph may have saved stays as it was.
    """
    with torch.no_grad():
        if value.requires_grad:
            value.data = reduced.clone()
        else:
            value.copy_(reduced)
