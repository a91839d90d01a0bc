"""Gradients of parameters that several ranks have: replicas of a stage, and stages that are tied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from coordd.handles import Handle
from coordd.messages import ReduceOp
from coordd.operations import Operations
from coordd.process_sets import ProcessSet
from coordd_torch.tensors import borrow

__all__ = ["Sharing"]


class Sharing:
    """Adds the gradients of one stage's parameters up over all ranks that have them."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        owners: Mapping[str, Sequence[int]],
        operations: Operations,
        *,
        name: str,
    ) -> None:
        """Prepares it.

        Args:
            parameters: by name, equal on all ranks that have them.
            owners: for each the ranks that have it.
            operations: of the daemon.
            name: begins the names of the reductions.
        """
        self._shared = {key: value for key, value in parameters.items() if len(owners[key]) > 1}
        self._sets = {key: ProcessSet(owners[key]) for key in self._shared}
        self._operations = operations
        self._name = name
        self._pending: list[tuple[Handle[Any], Any]] = []

    def align(self) -> None:
        """Gives all ranks the values of the first that has a parameter."""
        handles = []
        for key, parameter in self._shared.items():
            ranks = self._sets[key]
            array, back = borrow(parameter.data)
            handle = self._operations.broadcast(
                array, ranks.ranks[0], name=f"{self._name}.{key}.first", process_set=ranks
            )
            handles.append((handle, back))
        _finish(handles)

    def start(self) -> None:
        """Begins; a gradient that is missing here counts as zero."""
        for key, parameter in self._shared.items():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            array, back = borrow(parameter.grad)
            handle = self._operations.allreduce(
                array, name=f"{self._name}.{key}", op=ReduceOp.SUM, process_set=self._sets[key]
            )
            self._pending.append((handle, back))

    def finish(self) -> None:
        """Waits until the gradients are those of all ranks."""
        pending, self._pending = self._pending, []
        _finish(pending)


def _finish(pending: Sequence[tuple[Handle[np.ndarray], Any]]) -> None:
    for handle, back in pending:
        back(handle.result())
