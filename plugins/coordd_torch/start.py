"""Initial consistency check: all ranks must start with the same parameters, settings and values.

Parameter names, shapes and settings are compared when the optimizer is created. Values are compared when the first
gradients are reduced, because scripts may broadcast them before or after they create the optimizer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coordd.daemon.operations import Operations
from coordd.ops.process_sets import ProcessSet
from coordd.parallel.parameter_list import MARK, Inventory, different_values
from coordd_torch.checksums import checksum
from coordd_torch.wrappers import check_parallel

__all__ = ["Start", "hyperparameters", "structure"]

_PLAIN = (bool, int, float, str, type(None))
_ADVICE = (
    "call broadcast_parameters(model.state_dict()) and broadcast_optimizer_state(optimizer) before the first step, and "
    "give all ranks the same hyperparameters"
)


def structure(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]], settings: Iterable[object]
) -> list[str]:
    """Returns lines of text that must be equal on all ranks when an optimizer is created.

    Args:
        optimizer: the user's optimizer.
        named: its parameters, frozen ones included, and other parameters that the user has named.
        settings: the settings of the reduction, as texts.
    """
    lines = sorted(
        f"{name} {tuple(value.shape)} {str(value.dtype)[6:]}{'' if value.requires_grad else ' frozen'}"
        for name, value in named
    )
    return [*lines, f"optimizer {type(optimizer).__name__}", *map(str, settings)]


class Start:
    """Comparison of the values with which one optimizer starts."""

    def __init__(
        self,
        operations: Operations,
        optimizer: torch.optim.Optimizer,
        named: Sequence[tuple[str, Tensor]],
        *,
        prefix: str,
        process_set: ProcessSet,
    ) -> None:
        """Prepares the comparison; parameters as in `structure`, ``prefix`` is the prefix of its operations' names."""
        self._operations = operations
        self._optimizer = optimizer
        self._named = named
        self._prefix = prefix
        self._process_set = process_set
        self._inventory: Inventory | None = None

    def begin(self) -> None:
        """Starts the comparison without waiting for the other ranks."""
        if self._operations.daemon.config.check_parameters:
            self._inventory = Inventory(
                self._operations,
                self._lines(),
                caller="DistributedOptimizer",
                name=f"{self._prefix}start",
                process_set=self._process_set,
                tell=lambda everybody: different_values(everybody, _ADVICE),
            )

    def begin_again(self) -> None:
        """Starts the comparison again if it failed because ranks waited for each other."""
        if self._inventory is not None and self._inventory.lost:
            self.begin()

    def check_alone(self) -> None:
        """Checks this rank alone.

        Raises:
            ArgumentError: another package, such as PyTorch's DistributedDataParallel, averages these gradients too.
        """
        check_parallel(self._optimizer, [value for _, value in self._named if value.requires_grad])

    def check(self) -> None:
        """Checks the result; all ranks call it before they first change a parameter.

        Raises:
            MismatchError: on all ranks: values or hyperparameters differ.
        """
        inventory, self._inventory = self._inventory, None
        if inventory is not None:
            inventory.check()

    def _lines(self) -> Iterator[str]:
        # Gradients match by name, so Horovod ignores the order; but state is broadcast and loaded by position.
        named = sorted(self._named, key=operator.itemgetter(0)) if self._operations.as_horovod else self._named
        for name, value in named:
            yield f"{name}{MARK}{checksum(value)}"
        for name, value in hyperparameters(self._optimizer.param_groups):
            key, _, group = name.partition(" ")
            yield f"{key}={value!r} {group}"


def hyperparameters(groups: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields names and values of the parameter groups' settings that are plain values; learning rates first."""
    found = [
        (key, number, given.item() if isinstance(given, Tensor) and given.numel() == 1 else given)
        for number, group in enumerate(groups)
        for key, given in sorted(group.items())
    ]
    for key, number, value in sorted(found, key=lambda item: item[0] != "lr"):
        if _is_plain(value):
            yield f"{key} of parameter group {number}", value


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)
