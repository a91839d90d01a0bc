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
    Each rank looks at gradients of its own, so under a loss scaler the ranks agree whether to skip a step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        prefix: str,
        named: Iterable[tuple[str, torch.Tensor]],
        *,
        compressor: Compressor,
        process_set: ProcessSet,
    ) -> None:
        """Registers the hooks.

        Args:
            optimizer: whose steps are combined.
            prefix: begins the names of what is reduced.
            named: the optimizer's parameters.
            compressor: of the changes.
            process_set: the ranks that take part.
        """
        self._prefix = f"{prefix}adasum."
        self._named = list(named)
        self._compressor = compressor
        self._process_set = process_set
        self._before: list[torch.Tensor] = []
        self._hidden: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._scales = not getattr(optimizer, "_step_supports_amp_scaling", False)
        vars(optimizer)["_step_supports_amp_scaling"] = (
            True  # has a loss scaler tell what it has found, and call `step`
        )
        optimizer.register_step_pre_hook(self._prepare)
        optimizer.register_step_post_hook(self._combine)

    def _prepare(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002 - torch's signature
        """Keeps the parameters; has a step that a rank cannot make changed nothing."""
        found = getattr(optimizer, "found_inf", None)
        if found is not None and self._agree(optimizer, found):
            self._hidden = [(parameter, parameter.grad) for _, parameter in self._named]
            for parameter, _ in self._hidden:
                parameter.grad = None
            return
        self._before = [parameter.detach().clone() for _, parameter in self._named]

    def _agree(self, optimizer: Any, found: torch.Tensor) -> bool:
        """Finds out whether any rank's gradients are not finite; takes the loss scale off them, if nobody else does."""
        agreed: torch.Tensor = allreduce_async_(
            found, name=f"{self._prefix}found_inf", op=ReduceOp.MAX, process_set=self._process_set
        ).result()
        if self._scales:
            scale = optimizer.grad_scale
            for _, parameter in self._named:
                if parameter.grad is not None and scale is not None:
                    parameter.grad.div_(scale)
            optimizer.grad_scale = optimizer.found_inf = None  # it would not know what to do with them
        else:
            optimizer.found_inf = agreed
        return bool(agreed)

    def _combine(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002 - torch's signature
        """Adds the combined change to what was kept."""
        hidden, self._hidden = self._hidden, []
        before, self._before = self._before, []
        for parameter, gradient in hidden:
            parameter.grad = gradient
        changes = []
        for (name, parameter), kept in zip(self._named, before, strict=not hidden):
            small, context = self._compressor.compress(parameter.detach() - kept)
            title = f"{self._prefix}{name}"
            handle = allreduce_async_(small, name=title, op=ReduceOp.ADASUM, process_set=self._process_set)
            changes.append((handle, context))
        found = [self._compressor.decompress(handle.result(), context) for handle, context in changes]
        with torch.no_grad():
            for (_, parameter), kept, change in zip(self._named, before, found, strict=not hidden):
                parameter.copy_(kept + change)
