"""Conversion between tensors and NumPy arrays: a view if possible, else a copy that is written back afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from coordd import api
from coordd.daemon.daemon import Daemon
from coordd.errors import ArgumentError
from coordd.ops.arguments import name_of
from coordd.ops.dtypes import dtype_of

__all__ = ["as_bytes", "borrow", "check_dense", "densify", "empty_common", "from_array", "values_at", "view"]

# Dtypes that NumPy lacks: an integer dtype of equal size, and the name of the dtype.
_FOREIGN: dict[torch.dtype, tuple[torch.dtype, str]] = {
    torch.bfloat16: (torch.int16, "bfloat16"),
    torch.float8_e4m3fn: (torch.uint8, "float8_e4m3fn"),
    torch.float8_e5m2: (torch.uint8, "float8_e5m2"),
}


def view(tensor: torch.Tensor) -> np.ndarray:
    """Returns a view of a dense CPU tensor as an array of the same shape, strides and memory."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    foreign = _FOREIGN.get(tensor.dtype)
    if foreign is None:
        array: np.ndarray = tensor.numpy()
        return array
    return tensor.view(foreign[0]).numpy().view(dtype_of(foreign[1]))


def borrow(tensor: torch.Tensor) -> tuple[np.ndarray, Callable[[np.ndarray], torch.Tensor]]:
    """Returns an array with a tensor's values, for an in-place operation of the daemon.

    A tensor on another device, or with a lazy conjugation or negation, is copied.

    Returns:
        The array, and a function that writes the finished array back, if it is a copy, and returns the tensor.

    Raises:
        ArgumentError: the tensor is sparse.
    """
    check_dense(tensor)
    if tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg():
        return view(tensor), lambda _: tensor
    host = tensor.detach().resolve_conj().resolve_neg().cpu()

    def give_back(array: np.ndarray) -> torch.Tensor:
        with torch.no_grad():
            tensor.copy_(from_array(array))
        return tensor

    return view(host), give_back


def empty_common(*shape: int, dtype: torch.dtype | None = None, daemon: Daemon | None = None) -> torch.Tensor:
    """Returns a CPU tensor of zeros in the shared memory of this host's ranks, so that its reductions need no copies.

    Args:
        shape: its dimensions.
        dtype: by default PyTorch's default dtype.
        daemon: by default the daemon that `init` started.

    Raises:
        NotInitializedError: `init` was not called.
    """
    dtype = dtype or torch.get_default_dtype()
    block = (daemon or api.operations().daemon).allocate(max(1, math.prod(shape)) * dtype.itemsize)
    return torch.from_numpy(block).view(dtype)[: math.prod(shape)].view(shape)


def check_dense(tensor: torch.Tensor) -> None:
    """Rejects a value that is not a dense tensor.

    Raises:
        ArgumentError: the value is no tensor, or not a dense one.
    """
    if not isinstance(tensor, torch.Tensor):
        text = f"a tensor is wanted, not a {type(tensor).__name__}: torch.as_tensor() makes one"
        raise ArgumentError(text)
    if tensor.layout is not torch.strided:
        text = (
            f"a {tensor.layout} tensor cannot travel as it is: use to_dense(), or sparse_as_dense=True in an optimizer"
        )
        raise ArgumentError(text)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the elements of a strided tensor on any device as a flat byte tensor on the CPU."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    if flat.stride(0) != 1:  # `contiguous` keeps the stride of a single element, and `view` refuses it
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def densify(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a sparse tensor as a dense one.

    PyTorch 2.13 loses the value of a tensor with one entry if that value is expanded, as in the gradient of a sum.
    """
    if tensor.layout is torch.sparse_coo:
        entries: Any = tensor
        values, indices = entries._values(), entries._indices()  # noqa: SLF001 - `values()` rejects uncoalesced tensors
        if 0 in values.stride():
            values = values.clone(memory_format=torch.contiguous_format)
            tensor = torch.sparse_coo_tensor(indices, values, tensor.shape, check_invariants=False)
    return tensor.to_dense()


def from_array(array: np.ndarray) -> torch.Tensor:
    """Returns an array as a CPU tensor: a view if it is writable and C-contiguous, else a copy."""
    if not array.flags.writeable or not array.flags.c_contiguous:
        array = np.array(array, order="C")
    name = name_of(array.dtype)
    for dtype, (carrier, stands_for) in _FOREIGN.items():
        if name == stands_for:
            return torch.from_numpy(array.view(np.dtype(str(carrier).removeprefix("torch.")))).view(dtype)
    return torch.from_numpy(array)


def values_at(tensor: torch.Tensor, places: np.ndarray) -> list[float] | None:
    """Reads some values of a tensor on any device.

    Args:
        tensor: real, or complex, which counts as two values per element.
        places: flat indices of the values.

    Returns:
        The values; None if the tensor is sparse, on the meta device, or not floating-point.
    """
    tensor = tensor.detach()
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point():
        return None
    chosen = np.unravel_index(places, tensor.shape) if tensor.dim() else ()
    found: list[float] = tensor[tuple(torch.from_numpy(each).to(tensor.device) for each in chosen)].reshape(-1).tolist()
    return found
