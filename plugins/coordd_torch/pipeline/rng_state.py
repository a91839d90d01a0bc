"""State of the process-wide random number generators: Python, NumPy and PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["untouched"]


@contextmanager
def untouched() -> Iterator[Callable[[], bool]]:
    """Restores the state of all generators on exit; the yielded function returns whether numbers were drawn."""
    python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002 - models and builders may use it
    before = _states()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            yield lambda: _states() != before
    finally:
        random.setstate(python)
        np.random.set_state(legacy)  # noqa: NPY002 - as above


def _states() -> list[Any]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - as above
    there = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    tensors = [state.numpy().tobytes() for state in (torch.get_rng_state(), *there)]
    return [random.getstate(), kind, np.asarray(keys).tobytes(), *rest, *tensors]
