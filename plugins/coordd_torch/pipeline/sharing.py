"""Synchronises parameters that several ranks have (replicas, tied stages): initial values, then gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from coordd.daemon.operations import Operations
from coordd.ops.handles import Handle
from coordd.ops.messages import Kind, ReduceOp
from coordd.ops.process_sets import ProcessSet
from coordd_torch.tensors import borrow

__all__ = ["Sharing", "align"]

_Pending = tuple[Handle[Any], Callable[[Any], Any]]


def align(
    tensors: Mapping[str, torch.Tensor], owners: Mapping[str, Sequence[int]], operations: Operations, *, name: str
) -> None:
    """Broadcasts each shared parameter or buffer from the first rank that has it.

    Args:
        tensors: of this rank by name; a name is the same on all ranks that have it.
        owners: for each name these ranks.
        operations: of the daemon.
        name: prefix of the names of the broadcasts.
    """
    handles = []
    for key, tensor in tensors.items():
        if len(owners[key]) > 1 and tensor.numel():
            members = ProcessSet(owners[key])
            array, back = borrow(tensor.detach())
            first = operations.broadcast(array, members.ranks[0], name=f"{name}.{key}.first", process_set=members)
            handles.append((first, back))
    _finish(handles)


class Sharing:
    """Sums the gradients of a rank's parameters over all ranks that have them."""

    def __init__(
        self,
        held: Mapping[int, Mapping[str, nn.Parameter]],
        owners: Mapping[str, Sequence[int]],
        operations: Operations,
        *,
        name: str,
    ) -> None:
        """Stores the shared parameters.

        Args:
            held: for each stage of this rank its parameters by name; a name is the same on all ranks that have it.
            owners: for each name these ranks.
            operations: of the daemon.
            name: prefix of the names of the reductions.
        """
        self._held = {stage: [key for key in mine if len(owners[key]) > 1] for stage, mine in held.items()}
        self._parameters = {key: mine[key] for stage, mine in held.items() for key in self._held[stage]}
        self._sets = {key: ProcessSet(owners[key]) for key in self._parameters}
        self._operations = operations
        self._name = name
        self._open: dict[str, int] = {}
        self._pending: list[_Pending] = []

    def start(self, stage: int) -> None:
        """Starts to reduce a stage's gradients, except those that another stage of this rank will still add to."""
        for key in self._held[stage]:
            left = self._open.get(key) or sum(key in mine for mine in self._held.values())
            self._open[key] = left - 1
            if left == 1:
                self._submit(key, self._parameters[key])

    def finish(self) -> None:
        """Waits until the gradients are reduced over all ranks."""
        pending, self._pending = self._pending, []
        _finish(pending)

    def _submit(self, key: str, parameter: nn.Parameter) -> None:
        if not parameter.requires_grad:
            return
        idle = parameter.grad is None
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        array, back = borrow(gradient)
        request = self._operations.request(
            Kind.ALLREDUCE, f"{self._name}.{key}", array, self._sets[key], op=ReduceOp.SUM, prescale=1.0, postscale=1.0
        )

        def land(result: np.ndarray | None) -> None:
            if result is not None:  # None: no rank has a gradient, so the optimizer skips the parameter
                parameter.grad = back(result)

        # Without a gradient this rank takes part only if another rank has one.
        self._pending.append((self._operations.submit(request, array, filler=idle), land))


def _finish(pending: Sequence[_Pending]) -> None:
    for handle, back in pending:
        back(handle.result())
