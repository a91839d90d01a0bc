"""Adasum in an optimizer: not gradients are combined, but what each rank's own step would do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from coordd.messages import ReduceOp
from coordd.process_sets import ProcessSet
from coordd_torch.compressor import Compressor
from coordd_torch.operations import allreduce_async_

__all__ = ["AdasumStep"]


class AdasumStep:
    """Two hooks around `step`: before it, what the parameters are; after it, the adaptive sum of how they changed.

    So the optimizer may scale gradients as it likes, as Adam does, before they are compared. (Maleki et al., 2020.)
    """

    def __init__(
        self, prefix: str, named: Iterable[tuple[str, torch.Tensor]], *, compressor: Compressor, process_set: ProcessSet
    ) -> None:
        self._prefix = prefix
        self._steps = 0
        self._named = list(named)
        self._compressor = compressor
        self._process_set = process_set
        self._before: list[torch.Tensor] = []

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002 - torch's signature
        """Keeps the parameters."""
        self._before = [parameter.detach().clone() for _, parameter in self._named]

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002 - torch's signature
        """Adds the combined change to what was kept."""
        before, self._before = self._before, []
        changes = []
        self._steps += 1  # a rank that skips a step must not be combined with another step of the others
        prefix = f"{self._prefix}adasum.{self._steps % 2}"
        for (name, parameter), kept in zip(self._named, before, strict=True):
            small, context = self._compressor.compress(parameter.detach() - kept)
            handle = allreduce_async_(small, name=f"{prefix}.{name}", op=ReduceOp.ADASUM, process_set=self._process_set)
            changes.append((handle, context))
        with torch.no_grad():
            for (_, parameter), kept, (handle, context) in zip(self._named, before, changes, strict=True):
                parameter.copy_(kept + self._compressor.decompress(handle.result(), context))
