"""Checkpoints of a pipeline: its ranks save together, and either all of them load or none does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coordd.daemon.operations import Operations
from coordd.errors import ArgumentError
from coordd.parallel.objects import allgather_object
from coordd.pipeline.plan import Plan
from coordd_torch.pipeline.archive import read_manifest
from coordd_torch.pipeline.checkpoint import aliases, check_names, load_like, save_stage, write_manifest
from coordd_torch.pipeline.layout import Layout
from coordd_torch.pipeline.optimizer_state import read_optimizer, save_optimizer
from coordd_torch.pipeline.stage import TorchStage

__all__ = ["Checkpoint", "Saving"]


class Checkpoint(NamedTuple):
    """What a rank has read of a checkpoint: the manifest's metadata, and weights and optimizer states by stage."""

    metadata: dict[str, Any]
    weights: dict[int, dict[str, torch.Tensor]]
    optimizers: dict[int, dict[str, Any]]


class Saving:
    """Saves and loads the stages of this rank."""

    def __init__(
        self, stages: Mapping[int, TorchStage], layout: Layout, plan: Plan, operations: Operations, *, name: str
    ) -> None:
        """Prepares saving.

        Args:
            stages: of this rank.
            layout: of all stages.
            plan: assigns stages to ranks.
            operations: of the daemon.
            name: of the exchange between ranks.
        """
        self._stages = stages
        self._plan = plan
        self._operations = operations
        self._rank = operations.daemon.world.rank
        self._name = name
        self._aliases = aliases(layout.captured.model)
        self._savers: dict[str, int] = {}  # name -> lowest stage that has it, whose file it is saved in
        for number in range(plan.stages):
            for key in layout.module(number, layout.captured.model).state_dict():
                self._savers.setdefault(key, number)

    def save(self, folder: Path, *, epochs: int) -> None:
        """Saves weights, optimizer state, and the number of steps and epochs."""
        stages = self._plan.stages
        for number, stage in self._stages.items():
            if self._plan.placement[number][0] == self._rank:
                kept = {name for name, owner in self._savers.items() if owner == number}
                tensors = {name: value for name, value in stage.module.state_dict().items() if name in kept}
                named = {name: value for name, value in stage.module.named_parameters() if name in kept}
                save_stage(folder, number, stages, tensors, aliases=self._aliases)
                save_optimizer(folder, number, stages, stage.optimizer, named)
        self._operations.barrier().result()
        if self._rank == 0:
            steps = max(stage.steps for stage in self._stages.values())
            write_manifest(folder, stages, optimizer=True, metadata={"steps": steps, "epochs": epochs})
        self._operations.barrier().result()

    def read(self, folder: Path, *, optimizer: bool) -> Checkpoint:
        """Reads this rank's part of a checkpoint, and returns when all ranks have read theirs.

        Raises:
            ArgumentError: on all ranks, if one of them cannot load its part.
        """
        read, problem = None, ""
        try:
            read = self._read(folder, optimizer=optimizer)
        except ArgumentError as error:
            problem = str(error)
        problems = [each for each in allgather_object(problem, self._name) if each]
        if read is None or problems:
            raise ArgumentError(problems[0])
        return read

    def apply(self, checkpoint: Checkpoint) -> int:
        """Takes over a checkpoint, and returns its number of epochs."""
        for number, stage in self._stages.items():
            stage.module.load_state_dict(checkpoint.weights[number])
            if number in checkpoint.optimizers and stage.optimizer is not None:
                stage.optimizer.load_state_dict(checkpoint.optimizers[number])
            stage.resume(checkpoint.metadata.get("steps", 0))
        return int(checkpoint.metadata.get("epochs", 0))

    def _read(self, folder: Path, *, optimizer: bool) -> Checkpoint:
        noted = read_manifest(folder)["metadata"]
        check_names(folder, self._savers.keys(), self._aliases)
        weights = {number: load_like(folder, stage.module.state_dict()) for number, stage in self._stages.items()}
        states = {
            number: read_optimizer(folder, stage.optimizer, dict(stage.module.named_parameters()))
            for number, stage in self._stages.items()
            if optimizer and stage.optimizer is not None
        }
        return Checkpoint(noted, weights, states)
