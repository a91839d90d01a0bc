"""RNG and autocast state of a forward pass, restored for its recomputation."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

__all__ = ["Surroundings", "autocast_text", "casting", "seed_for", "seeded", "uncast"]

_SHOWN = ("cpu", "cuda")
"""Ranks compare the autocast modes of these device types."""


def seed_for(seed: int, step: int, stage: int, microbatch: int) -> int:
    """Derives a seed from a run's seed; different for all steps, stages and microbatches, equal on all machines."""
    digest = hashlib.blake2b(struct.pack("<4q", seed, step, stage, microbatch), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds the generators inside the block; afterwards they continue where they were."""
    with _forked(device):
        torch.manual_seed(seed)
        yield


@contextmanager
def casting() -> Iterator[None]:
    """Keeps the current autocast mode, but casts weights again.

    Autocast caches cast weights until its outermost block ends. If that block encloses a step, the cache would hold
    weights from before the optimizer's update, or of another version.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def uncast(device: torch.device) -> Iterator[None]:
    """Disables autocast: a backward pass uses the dtypes of its forward pass, and casts nothing again."""
    with ExitStack() as stack:
        for kind in _kinds(device):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def autocast_text() -> str:
    """Describes the autocast mode of this thread, for comparison between ranks."""
    modes = ((kind, torch.get_autocast_dtype(kind)) for kind in _SHOWN if torch.is_autocast_enabled(kind))
    return ", ".join(f"{str(dtype).removeprefix('torch.')} on {kind}" for kind, dtype in modes) or "off"


class Surroundings:
    """The RNG and autocast state at the time of creation."""

    def __init__(self, device: torch.device) -> None:
        """Saves the state.

        Args:
            device: the device of the computation.
        """
        self._device = device
        self._chance = torch.get_rng_state()
        self._chance_there = None if device.type == "cpu" else _module(device).get_rng_state(device)
        self._autocast = [_autocast(kind) for kind in _kinds(device)]

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restores the saved state inside the block; afterwards the generators continue where they were."""
        with _forked(self._device), ExitStack() as stack:
            torch.set_rng_state(self._chance)
            if self._chance_there is not None:
                _module(self._device).set_rng_state(self._chance_there, self._device)
            for settings in self._autocast:
                stack.enter_context(torch.autocast(**settings))
            stack.enter_context(casting())
            yield


def _forked(device: torch.device) -> Any:
    if device.type == "cpu":
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def _kinds(device: torch.device) -> list[str]:
    """Returns the device types used in computations for a device."""
    return list(dict.fromkeys(["cpu", device.type]))


def _autocast(kind: str) -> dict[str, Any]:
    return {
        "device_type": kind,
        "dtype": torch.get_autocast_dtype(kind),
        "enabled": torch.is_autocast_enabled(kind),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
