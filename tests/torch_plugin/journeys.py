"""Cargoes of several ranks on their way together, with nothing between them but arithmetic."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from coordd.ops.messages import Kind
from coordd_torch.compression_session import Journey, calmly
from coordd_torch.compressor import Cargo, Compressor

__all__ = ["Arrival", "cargo", "travelled"]

NOTHING = torch.empty(0)


class Arrival(NamedTuple):
    """What one rank has at the end: the mean of all, and what was lost of its own."""

    mean: torch.Tensor
    lost: torch.Tensor
    journey: Journey


def cargo(tensors: list[torch.Tensor], compressor: Compressor, *, size: int = 1) -> Cargo:
    """Lays tensors out one behind the other, as in a bucket."""
    places, start = {}, 0
    for index, tensor in enumerate(tensors):
        places[f"t{index}"] = (start, tuple(tensor.shape))
        start += tensor.numel()
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    wide = flat.to(torch.promote_types(flat.dtype, torch.float32), copy=True)
    return Cargo(wide, places, dtype=flat.dtype, size=size, memory=compressor.memory)


def travelled(
    compressors: list[Compressor], tensors: list[list[torch.Tensor]], *, tails: list[torch.Tensor] | None = None
) -> list[Arrival]:
    """Carries each rank's tensors to the end, and keeps what was to be remembered."""
    size = len(compressors)
    journeys = [
        Journey(compressor, cargo(mine, compressor, size=size))
        for compressor, mine in zip(compressors, tensors, strict=True)
    ]
    with calmly(NOTHING):
        arrays = [journey.begin(tail) for journey, tail in zip(journeys, tails or [NOTHING] * size, strict=True)]
        while arrays[0] is not None:
            arrived = exchanged(journeys, arrays)
            arrays = [journey.land(array) for journey, array in zip(journeys, arrived, strict=True)]
    for compressor, journey in zip(compressors, journeys, strict=True):
        compressor.memory.update(journey.cargo.news)
    return [Arrival(journey.mean, journey.cargo.flat, journey) for journey in journeys]


def exchanged(journeys: list[Journey], arrays: list[np.ndarray]) -> list[np.ndarray]:
    """Does what a daemon would do."""
    kind = journeys[0].kind
    if kind is Kind.ALLTOALL:
        cuts = [np.cumsum(journey.splits)[:-1] for journey in journeys]
        dealt = [np.split(array, cut) for array, cut in zip(arrays, cuts, strict=True)]
        return [np.concatenate(hands) for hands in zip(*dealt, strict=True)]
    joined = np.concatenate(arrays) if kind is Kind.ALLGATHER else np.mean(arrays, axis=0, dtype=arrays[0].dtype)
    return [joined.copy() for _ in journeys]
