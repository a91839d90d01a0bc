"""Detection of references to a gradient besides its parameter's.

A script may keep the tensor that ``.grad`` is, or its memory: a list of all gradients, created once; a flat buffer with
each gradient as a view; an array. Or the gradient has its own graph, as after ``backward(create_graph=True)``. Then
``.grad`` must stay that tensor, and the reduced gradient is written to it.
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
    """Returns the number of tensors and arrays that share the memory."""
    found: int = torch._C._storage_Use_Count(value.untyped_storage()._cdata)  # noqa: SLF001 - no public way
    return found


def _references(values: tuple[torch.Tensor, ...]) -> list[int]:
    return list(map(sys.getrefcount, values))


def _owners(values: tuple[torch.Tensor, ...]) -> list[int]:
    """Returns PyTorch's own reference counts: another parameter may have the same ``.grad``, as in A3C."""
    return list(map(_OWNERS, values))


def _usual() -> tuple[int, int, int]:
    """Returns the counts of a gradient that only its parameter refers to; they depend on PyTorch's version."""
    parameter = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    parameter.grad = torch.zeros(1, device="cpu")
    return _users(parameter.grad), _references((parameter.grad,))[0], _owners((parameter.grad,))[0]


_ONE_USER, _ONE_REFERENCE, _ONE_OWNER = _usual()


def are_referenced(values: tuple[torch.Tensor, ...], *, by_hand: bool, graphs: bool = False) -> list[bool] | None:
    """Returns, for each gradient, whether anything but its parameter refers to it; None if a quick check finds none.

    The quick check covers the usual case: the gradients of this pass are new, that is, their version counters are 0, as
    autograd has not added to them. Otherwise the gradients are checked one by one.

    Args:
        values: the gradients; coordd may hold no other Python reference to them.
        by_hand: whether the script has set one of them, which may also be new.
        graphs: whether gradients of this step may have graphs.
    """
    references, owners = _references(values), _owners(values)
    none_refers = max(references) <= _ONE_REFERENCE and max(owners) <= _ONE_OWNER
    if none_refers and not (by_hand or graphs) and _all_new(values):
        return None
    return [
        not value.is_inference()  # inference tensors cannot be written in place
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
    except RuntimeError:  # an inference tensor has no version counter
        return False


def version_of(value: torch.Tensor) -> int:
    """Returns a tensor's version counter; 0 for an inference tensor, which has none."""
    try:
        return value._version  # noqa: SLF001 - there is no public way
    except RuntimeError:
        return 0


def whereabouts(value: torch.Tensor | None) -> tuple[object, int]:
    """Returns a gradient's dtype and device, and its address; (None, 0) if it is missing or sparse."""
    if value is None or value.layout is not torch.strided:
        return None, 0
    return (value.dtype, value.device), value.data_ptr()


def has_other_users(value: torch.Tensor) -> bool:
    """Returns whether other tensors or arrays share a gradient's memory, and it can be written in place."""
    return not value.is_inference() and _users(value) > _ONE_USER


def write(value: torch.Tensor, reduced: torch.Tensor) -> None:
    """Sets the values of a gradient tensor to the reduced values, without replacing the tensor.

    A gradient with a graph, or with elements that share memory, gets new memory: the graph is that of this rank's local
    gradient, whose derivatives are reduced later, and may have saved the old memory.
    """
    expanded = any(length > 1 and not step for length, step in zip(value.shape, value.stride(), strict=True))
    with torch.no_grad():
        if value.requires_grad or expanded:
            value.data = reduced.clone()
        else:
            value.copy_(reduced)
