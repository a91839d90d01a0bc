"""Norm of all gradients of a model whose parameters lie on many ranks; each gradient counts once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from coordd.daemon.operations import Operations
from coordd.ops.messages import ReduceOp

__all__ = ["clip"]


def clip(
    mine: Iterable[torch.Tensor], others: Iterable[torch.Tensor], most: float, operations: Operations, *, name: str
) -> float:
    """Scales gradients down so that their total norm over all ranks is at most `most`.

    Args:
        mine: gradients that this rank counts.
        others: gradients that another rank counts; they are scaled, too.
        most: the largest norm.
        operations: of the daemon; all ranks call this at the same time.
        name: of the reduction.

    Returns:
        the norm before scaling.
    """
    counted = list(mine)
    square = sum(float(torch.linalg.vector_norm(gradient, dtype=torch.float64)) ** 2 for gradient in counted)
    total = operations.allreduce(np.array([square], np.float64), name=name, op=ReduceOp.SUM).result()
    norm = float(np.sqrt(total[0]))
    scale = most / (norm + 1e-6)
    if scale < 1:
        for gradient in (*counted, *others):
            gradient.mul_(scale)
    return norm
