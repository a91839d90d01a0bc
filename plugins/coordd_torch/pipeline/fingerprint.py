"""A short text that tells batches of PyTorch's tensors from each other."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from coordd.pipeline import accord
from coordd_torch.pipeline.rows import lengths

__all__ = ["fingerprint", "told"]


def told(inputs: Any, targets: Any) -> dict[str, str]:
    """What `coordd.pipeline.accord.Accord` compares of a batch."""
    rows = str(lengths((inputs, targets))).strip("[]")
    return {"rows": rows, "inputs": fingerprint(inputs), "targets": fingerprint(targets)}


def fingerprint(values: Any) -> str:
    """Makes a short text of some of the values of a batch: of each tensor three rows, the first, middle and last."""
    leaves = (_some(leaf) for leaf in pytree.tree_leaves(values))
    return accord.fingerprint(leaf for leaf in leaves if leaf is not ...)


def _some(leaf: Any) -> Any:
    """Some bytes of a tensor, nothing (``...``) of one that has none at hand; all else as it is."""
    if isinstance(leaf, torch.dtype):
        return str(leaf)
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.layout is not torch.strided or not leaf.numel():
        return ...
    return accord.some(leaf.detach()).contiguous().cpu().view(torch.uint8).numpy()
