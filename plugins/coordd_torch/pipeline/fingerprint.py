"""A short fingerprint that distinguishes batches of PyTorch tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from coordd.pipeline import batch_check
from coordd_torch.pipeline.rows import lengths
from coordd_torch.tensors import as_bytes

__all__ = ["fingerprint", "told"]


def told(inputs: Any, targets: Any) -> dict[str, str]:
    """Returns the properties of a batch that `coordd.pipeline.batch_check.Accord` compares."""
    rows = str(lengths((inputs, targets))).strip("[]")
    return {
        "rows": rows,
        "shapes": _texts((inputs, targets), lambda tensor: tuple(tensor.shape)),
        "dtypes": _texts((inputs, targets), lambda tensor: tensor.dtype),
        "inputs": fingerprint(inputs),
        "targets": fingerprint(targets),
    }


def _texts(values: Any, of: Callable[[torch.Tensor], object]) -> str:
    """Returns a property of all dense tensors."""
    tensors = (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return ", ".join(str(of(tensor)) for tensor in tensors if tensor.layout is torch.strided)


def fingerprint(values: Any) -> str:
    """Returns a fingerprint of a batch: of each tensor it uses the first, middle and last row."""
    leaves = (_some(leaf) for leaf in pytree.tree_leaves(values))
    return batch_check.fingerprint(leaf for leaf in leaves if leaf is not ...)


def _some(leaf: Any) -> Any:
    """Returns some bytes of a tensor, ``...`` if the tensor is empty or not strided, and any other leaf unchanged."""
    if isinstance(leaf, torch.dtype):
        return str(leaf)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.layout is not torch.strided or not leaf.numel():
        return ...
    return as_bytes(batch_check.some(leaf.detach())).numpy()
