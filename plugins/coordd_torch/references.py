"""What refers to a gradient besides its parameter.

A script may hold on to the tensor that ``.grad`` is, or to the memory of it: a list of all gradients, made once; a flat
buffer of which each gradient is a view; an array. Or the gradient has a graph of its own, as after
``backward(create_graph=True)``. Then ``.grad`` must stay that tensor, and what is reduced is written to it.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable

import torch

__all__ = ["are_referenced", "has_other_users", "version_of", "whereabouts", "write"]

_VERSION = operator.attrgetter("_version")
_OWNERS: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]  # noqa: SLF001 - no public way


def _users(value: torch.Tensor) -> int:
    """Counts the tensors and arrays that share the memory."""
    found: int = torch._C._storage_Use_Count(value.untyped_storage()._cdata)  # noqa: SLF001 - no public way
    return found


def _references(values: tuple[torch.Tensor, ...]) -> list[int]:
    return list(map(sys.getrefcount, values))


def _owners(values: tuple[torch.Tensor, ...]) -> list[int]:
    """Counts what PyTorch itself has of each: another parameter may have the same ``.grad``, as in A3C."""
    return list(map(_OWNERS, values))


def _usual() -> tuple[int, int, int]:
    """Counts them for a gradient to which nothing refers besides its parameter; that depends on PyTorch's version."""
    parameter = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    parameter.grad = torch.zeros(1, device="cpu")
    return _users(parameter.grad), _references((parameter.grad,))[0], _owners((parameter.grad,))[0]


_ONE_USER, _ONE_REFERENCE, _ONE_OWNER = _usual()


def are_referenced(values: tuple[torch.Tensor, ...], *, by_hand: bool, graphs: bool = False) -> list[bool] | None:
    """Says of each gradient whether anything refers to it besides its parameter; None where nothing does to any.

    What this pass has made is usually new, and then it costs little: autograd has not added to it yet, which is what
    its version says. Only others are looked at one by one.

    Args:
        values: they; no other Python object of ours may refer to them.
        by_hand: whether the script has set one of them, which may be new, too.
        graphs: whether passes of this step may have given them graphs.
    """
    references, owners = _references(values), _owners(values)
    none_refers = max(references) <= _ONE_REFERENCE and max(owners) <= _ONE_OWNER
    if none_refers and not (by_hand or graphs) and _all_new(values):
        return None
    return [
        not value.is_inference()  # which nothing may be written to
        and (
            value.requires_grad
            or count > _ONE_REFERENCE
            or owned > _ONE_OWNER
            or ((by_hand or version_of(value) > 0) and _users(value) > _ONE_USER)
        )
        for value, count, owned in zip(values, references, owners, strict=True)
    ]


def _all_new(values: tuple[torch.Tensor, ...]) -> bool:
    try:
        return not any(map(_VERSION, values))
    except RuntimeError:  # an inference tensor counts no versions
        return False


def version_of(value: torch.Tensor) -> int:
    """Returns how often a tensor has been changed in place; 0 for an inference tensor, which does not count."""
    try:
        return value._version  # noqa: SLF001 - there is no public way
    except RuntimeError:
        return 0


def whereabouts(value: torch.Tensor | None) -> tuple[object, int]:
    """Returns of what kind a gradient is, and where it lies in memory."""
    if value is None or value.layout is not torch.strided:
        return None, 0
    return (value.dtype, value.device), value.data_ptr()


def has_other_users(value: torch.Tensor) -> bool:
    """Whether others share the memory of a gradient outside of buckets, and what is reduced can be written there."""
    return not value.is_inference() and _users(value) > _ONE_USER


def write(value: torch.Tensor, reduced: torch.Tensor) -> None:
    """Makes a gradient that stays the tensor that it is what was reduced.

    Where it has a graph, that is the graph of this rank's own gradient, whose derivatives are reduced in their turn;
    the memory that the graph may have saved stays as it was. Nor can one be written of which elements share memory.
    """
    expanded = any(length > 1 and not step for length, step in zip(value.shape, value.stride(), strict=True))
    with torch.no_grad():
        if value.requires_grad or expanded:
            value.data = reduced.clone()
        else:
            value.copy_(reduced)
