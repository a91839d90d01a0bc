"""Horovod compatibility of `DistributedOptimizer`: extra attributes, and step hooks used only under ``as_horovod``."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

__all__ = ["fill_missing", "note_synchronize", "parameter_names", "prepare_step"]

_SECOND_SYNCHRONIZE = (
    "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can "
    "cause training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
    "optimizer.synchronize() in your code."
)
"""Horovod's exact text, because users filter warnings by it."""


def parameter_names(
    optimizer: torch.optim.Optimizer, named_parameters: list[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Returns names as in Horovod's attribute ``_parameter_names``: the user's, or by group and index in the group."""
    if named_parameters is None:
        named_parameters = [
            (f"allreduce.noname.{index}.{place}", parameter)
            for index, group in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(group["params"])
        ]
    return {parameter: name for name, parameter in sorted(named_parameters, key=lambda item: item[0])}


def note_synchronize(optimizer: Any) -> None:
    """Records that `synchronize` was called, for the warning of `prepare_step`."""
    optimizer._synchronized = True  # noqa: SLF001 - Horovod's name, which is ours now


def prepare_step(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001 - torch's signature
    """Runs before each step; warns if the step would reduce gradients again that `synchronize` has reduced."""
    if optimizer._synchronized and optimizer._should_synchronize:  # noqa: SLF001 - as above
        warnings.warn(_SECOND_SYNCHRONIZE, UserWarning, stacklevel=4)
    optimizer._synchronized = False  # noqa: SLF001 - as above


def fill_missing(parameters: Iterable[torch.Tensor], *, sparse: bool = False) -> None:
    """Sets missing gradients to zeros, so that momentum and weight decay act on these parameters."""
    for parameter in parameters:
        if parameter.requires_grad and parameter.grad is None:
            zeros = torch.zeros_like(parameter, requires_grad=False)
            parameter.grad = zeros.to_sparse() if sparse else zeros
