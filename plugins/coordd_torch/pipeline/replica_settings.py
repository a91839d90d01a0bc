"""Settings that must be equal on ranks that train the same parameters: replicas, and stages with tied parameters.

Their gradients are summed, but each rank updates its own copy. With different optimizers, learning rates or initial
values the copies diverge without an error. Stages without common parameters may differ in the class of their optimizer.
Optimizers of one class must have the same defaults: a learning rate that depends on the rank is a mistake.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from coordd.daemon.operations import Operations
from coordd.errors import ArgumentError, ranks_text
from coordd.ops.process_sets import global_process_set
from coordd.parallel.objects import gathered
from coordd_torch.checksums import checksum

__all__ = ["ReplicaSettings", "check_defaults"]

log = logging.getLogger("coordd")

_CLASSES = (
    "the stages of a pipeline have optimizers of different classes (%s): unless this is meant, let optimizer= return "
    "the same class on all ranks"
)
_Texts = dict[str, str]


class ReplicaSettings:
    """Optimizers, hyperparameters and values of one rank's stages as text, for comparison between ranks."""

    def __init__(
        self,
        placement: Sequence[Sequence[int]],
        tied: Sequence[str],
        held: Mapping[int, Mapping[str, nn.Parameter]],
        optimizers: Mapping[int, torch.optim.Optimizer | None],
    ) -> None:
        """Stores the stages to compare.

        Args:
            placement: for each stage the ranks that have it.
            tied: names of the parameters that several stages have.
            held: for each stage of this rank its parameters by name.
            optimizers: of these stages; each parameter is in the optimizer of the first stage that has it.
        """
        self._replicated = [stage for stage, ranks in enumerate(placement) if len(ranks) > 1]
        self._tied = sorted(tied)
        self._held = held
        self._optimizers = optimizers
        self._compared = False
        self._last: list[_Texts] = []

    def texts(self) -> list[_Texts | None]:
        """Returns the text for each stage with replicas and each tied parameter; None if this rank does not have it."""
        names = {id(value): name for mine in self._held.values() for name, value in mine.items()}
        found = [self._stage(stage, names) if stage in self._held else None for stage in self._replicated]
        return found + [self._parameter(name) for name in self._tied]

    def changed(self) -> bool | None:
        """Returns whether hyperparameters have changed since the last call; None at the first, and without optimizers.

        Stages without common parameters may differ in them. But a scheduler that steps on one rank only, say, goes
        unnoticed otherwise.
        """
        optimizers = [optimizer for optimizer in self._optimizers.values() if optimizer is not None]
        now = [_hyperparameters(group) for optimizer in optimizers for group in optimizer.param_groups]
        before, self._last = self._last, now
        return now != before if before else None

    def settle(self) -> None:
        """Marks the initial values as compared; `ReplicaValues` compares later ones."""
        self._compared = True

    def _stage(self, stage: int, names: Mapping[int, str]) -> _Texts:
        mine, optimizer = self._held[stage], self._optimizers[stage]
        found = {f"the optimizer of stage {stage}": type(optimizer).__name__}
        groups = [] if optimizer is None else optimizer.param_groups
        found[f"the number of parameter groups of stage {stage}"] = str(len(groups))
        for number, group in enumerate(groups):
            where = f"of parameter group {number} of stage {stage}"
            found[f"the parameters {where}"] = ", ".join(names.get(id(each), "another") for each in group["params"])
            found |= {f"{key} {where}": text for key, text in _hyperparameters(group).items()}
        frozen = ", ".join(name for name, value in mine.items() if not value.requires_grad)
        found[f"the frozen parameters of stage {stage}"] = frozen or "none"
        if not self._compared:
            found |= {f"the values of {name}": checksum(value) for name, value in mine.items()}
        return found

    def _parameter(self, name: str) -> _Texts | None:
        """Returns the settings with which a tied parameter is trained."""
        value = next((mine[name] for mine in self._held.values() if name in mine), None)
        if value is None:
            return None
        kinds = [
            (type(optimizer).__name__, group)
            for optimizer in self._optimizers.values()
            if optimizer is not None
            for group in optimizer.param_groups
            if any(each is value for each in group["params"])
        ]
        found = {f"the optimizer of {name}": ", ".join(kind for kind, _ in kinds) or "none"}
        for _, group in kinds:
            found |= {f"{key} of {name}": text for key, text in _hyperparameters(group).items()}
        found[f"whether {name} is frozen"] = str(not value.requires_grad)
        if not self._compared:
            found[f"the values of {name}"] = checksum(value)
        return found


def check_defaults(
    optimizers: Mapping[int, torch.optim.Optimizer | None], operations: Operations, *, name: str
) -> None:
    """Checks that optimizers of one class have the same defaults on all ranks; all ranks must call it.

    Optimizers of different classes are warned of on rank 0: they may be meant, or a mistake of one rank.

    Args:
        optimizers: of this rank's stages.
        operations: of the daemon.
        name: of the pipeline.

    Raises:
        ArgumentError: on all ranks: they differ.
    """
    mine = {
        (f"{key} of {type(optimizer).__name__}", text)
        for optimizer in optimizers.values()
        for key, text in _hyperparameters(getattr(optimizer, "defaults", {})).items()
    }
    own = sorted({type(optimizer).__name__ for optimizer in optimizers.values() if optimizer is not None})
    values: dict[str, dict[str, list[int]]] = {}
    classes: dict[str, list[int]] = {}
    by_rank = gathered(operations, (own, sorted(mine)), f"{name}.defaults", global_process_set)
    for rank, (kinds, found) in enumerate(by_rank):
        for kind in kinds:
            classes.setdefault(kind, []).append(rank)
        for key, text in found:
            values.setdefault(key, {}).setdefault(text, []).append(rank)
    if len(classes) > 1 and operations.daemon.world.rank == 0:
        log.warning(_CLASSES, ", ".join(f"{kind} on {ranks_text(ranks)}" for kind, ranks in classes.items()))
    told = [
        f"{key} ({', '.join(f'{text} on {ranks_text(ranks)}' for text, ranks in each.items())})"
        for key, each in values.items()
        if len(each) > 1
    ]
    if told:
        raise ArgumentError(
            f"the optimizers of the stages differ in {'; '.join(told)}: optimizer= must return the same on all ranks; "
            "what is meant for some parameters only belongs in param_groups"
        )


def _hyperparameters(group: Mapping[str, Any]) -> _Texts:
    """Returns the hyperparameters of plain types; a tensor with one element counts as a number."""
    plain = {
        key: value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        for key, value in group.items()
        if key != "params"
    }
    return {key: repr(value) for key, value in sorted(plain.items()) if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return isinstance(value, bool | int | float | str | type(None))
