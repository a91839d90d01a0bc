"""Inputs of the partitioner: the layer costs, which rank 0 measures for all ranks, and a stage's memory limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from coordd.errors import ArgumentError
from coordd.pipeline.batch import Batch
from coordd.pipeline.config import PipelineConfig
from coordd.pipeline.load import Memory
from coordd.pipeline.microbatch import cut
from coordd.pipeline.plans import Plans
from coordd.pipeline.profile import Profile
from coordd.pipeline.survey import surveyed
from coordd.pipeline.units import in_bytes
from coordd_torch.pipeline.build import outline
from coordd_torch.pipeline.capture import Captured, capture
from coordd_torch.pipeline.profiling import profile
from coordd_torch.pipeline.rows import rows_of, taken
from coordd_torch.pipeline.stage import Loss
from coordd_torch.pipeline.tying import tied

__all__ = ["budget", "measured", "profile_model"]

_PROBE = (64, 64)
"""Shape of the parameter used to measure how much state an optimizer keeps."""


def profile_model(
    model: nn.Module | Callable[[], nn.Module], example: Any, config: PipelineConfig | None = None
) -> Profile:
    """Measures the cost of a model's layers, in this process only.

    Args:
        model: a model, which is not changed; or a function that builds it, so that at most one layer is in memory at a
            time.
        example: inputs of a batch, which is cut into microbatches as in training; the first one is measured.
        config: how the model is cut and captured.

    Raises:
        ArgumentError: the model cannot be cut into layers, or the batch cannot be cut into microbatches.
        Exception: any exception that a layer raises.
    """
    config = config or PipelineConfig()
    model = tied(model, config.reuse)
    outlined = model if isinstance(model, nn.Module) else outline(model)
    captured = capture(outlined, example, cuts=config.cuts)
    return profile(captured, _batch(captured, (example, None), config).inputs(0), config)


def measured(captured: Captured, example: tuple[Any, Any], config: PipelineConfig, *, loss: Loss, name: str) -> Profile:
    """Measures the layers on rank 0, on the first microbatch of an example, and sends the profile to all ranks.

    Args:
        captured: the model.
        example: inputs and targets of a batch; without targets the loss is not measured.
        config: how the model is split.
        loss: of an output and targets.
        name: of the broadcast; the same on all ranks.

    Raises:
        ArgumentError: there is no example, or a layer cannot be run; on all ranks.
    """
    x, y = example
    if x is None:
        wish = "memory_cap" if config.memory_cap is not None else f"split={config.split!r}"
        raise ArgumentError(f"{wish} measures the layers, which takes inputs: give some as `example`")

    def measure() -> Profile:
        batch = _batch(captured, example, config)
        finish = None if y is None else lambda output: loss(output, batch.targets(0))
        return profile(captured, batch.inputs(0), config, finish=finish)

    return surveyed(measure, name=name)


def _batch(captured: Captured, example: tuple[Any, Any], config: PipelineConfig) -> Batch:
    rows = rows_of(example[0])
    return Batch(*example, cut(rows, config.fitting(rows) * config.widest), take=taken, named=captured.inputs)


def budget(config: PipelineConfig, plans: Plans, optimizer: Callable[[Iterable[nn.Parameter]], Any]) -> Memory:
    """Returns the memory model of a stage; on a rank with several stages each gets an equal share of the cap."""
    cap = None if config.memory_cap is None else in_bytes(config.memory_cap) * plans.ranks / plans.sketch.stages
    return Memory(
        cap, config.schedule, config.microbatches, _state(optimizer), plan=plans.sketch, recompute=config.recompute
    )


def _state(make: Callable[[Iterable[nn.Parameter]], Any]) -> float:
    """Returns the bytes of optimizer state per byte of weights."""
    probe = nn.Parameter(torch.zeros(_PROBE, device="cpu"))
    probe.grad = torch.zeros_like(probe)
    optimizer = make([probe])
    optimizer.step()
    kept = (value.nbytes for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value))
    return sum(kept) / probe.nbytes
