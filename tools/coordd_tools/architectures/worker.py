"""One rank of a job: trains each architecture in stages and in one process, and compares the results."""

from __future__ import annotations

import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import coordd.torch as cd
from coordd.errors import ArgumentError
from coordd.pipeline.microbatch import cut
from coordd_tools.architectures.models import ARCHITECTURES, Architecture

__all__ = ["compared", "main"]

_MICROBATCHES = 4
_ROWS = (10, 8)
_RATE = 0.05
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-5}
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def main(directory: str) -> None:
    """Runs the tasks of a directory; rank 0 writes a line for each."""
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    cd.init()
    for name, given in json.loads(Path(directory, "tasks.json").read_text()):
        begin = time.perf_counter()
        mine = _tried(ARCHITECTURES[name], built=given == "built")
        everybodys = cd.allgather_object(mine["outcome"], name="outcomes")
        if cd.rank() == 0:
            mine["outcome"] = _common(everybodys)
            line = {"name": name, "stages": cd.size(), "given": given, "seconds": time.perf_counter() - begin} | mine
            with Path(directory, "found.jsonl").open("a") as stream:
                stream.write(json.dumps(line) + "\n")
    cd.shutdown()


def _common(outcomes: list[str]) -> str:
    """Returns the common outcome of all ranks, or the outcome of each rank."""
    kinds = {each.partition(":")[0] for each in outcomes}
    if len(kinds) == 1:
        return outcomes[0]
    return "; ".join(f"rank {rank} {each}" for rank, each in enumerate(outcomes))


def _tried(architecture: Architecture, *, built: bool) -> dict[str, Any]:
    try:
        return compared(architecture, built=built)
    except ArgumentError as error:
        return {"outcome": f"refused: {error}"}
    except Exception as error:  # noqa: BLE001 - reported in the table
        return {"outcome": f"error: {type(error).__name__}: {error}"}


def compared(architecture: Architecture, *, built: bool) -> dict[str, Any]:
    """Trains an architecture in one stage per rank and in one process, and returns this rank's comparison.

    Args:
        architecture: the architecture to train.
        built: whether the pipeline gets the model itself, not a function that builds it.

    Raises:
        ArgumentError: the pipeline rejects it.
    """

    def build() -> nn.Module:
        torch.manual_seed(0)
        return architecture.build().to(architecture.dtype).train()

    torch.manual_seed(1)
    batches = [_cast(architecture.batch(rows), architecture.dtype) for rows in _ROWS]
    config = cd.PipelineConfig(microbatches=_MICROBATCHES, split="layers")
    pipe = cd.Pipeline(
        build() if built else build,
        config,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=_RATE),
        loss=architecture.loss,
        example=batches[0],
    )
    losses = [pipe.train_batch(batch, None) for batch in batches]
    model = build()
    wanted = [_step(architecture, model, batch) for batch in batches]
    captured = pipe.layout.captured
    said = {"layers": len(captured.layers), "way": captured.way}
    tolerance = _TOLERANCES[architecture.dtype]
    distance = max(abs(one - other) for one, other in zip(losses, wanted, strict=True))
    state = model.state_dict()
    for key, value in pipe.state_dict().items():
        if not key.endswith(_STATISTICS) and value.numel():
            distance = max(distance, float((value.double() - state[key].double()).abs().max()))
    return said | {"outcome": "match" if distance <= tolerance else f"differs: by {distance:.1e}"}


def _step(architecture: Architecture, model: nn.Module, batch: dict[str, Any]) -> float:
    """Takes a step of plain SGD with the same microbatches; returns the loss."""
    rows, total = _rows(batch), 0.0
    model.zero_grad()
    for part in cut(rows, _MICROBATCHES):
        taken = {key: value[part] if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
        loss = architecture.loss(model(**taken), None)
        (loss * ((part.stop - part.start) / rows)).backward()
        total += float(loss.detach()) * (part.stop - part.start) / rows
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=_RATE)
    return total


def _rows(batch: dict[str, Any]) -> int:
    return next(len(value) for value in batch.values() if isinstance(value, torch.Tensor))


def _cast(batch: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    floats = {key for key, value in batch.items() if isinstance(value, torch.Tensor) and value.is_floating_point()}
    return {key: value.to(dtype) if key in floats else value for key, value in batch.items()}


if __name__ == "__main__":
    main(sys.argv[1])
