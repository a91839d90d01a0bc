"""Reads values of TensorFlow variables, to compare them between ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from coordd.gradients.consistency import Reading

__all__ = ["READING", "UNREADABLE"]


def _values(variable: Any, places: np.ndarray) -> np.ndarray | None:
    """Reads some values on the variable's device, so that no large one is copied; None if it cannot be read."""
    if not isinstance(variable, tf.Variable):
        return None
    try:
        shape = tuple(variable.shape)
        found = tf.gather_nd(variable, np.stack(np.unravel_index(places, shape), axis=-1)) if shape else variable
        array: np.ndarray = found.numpy().reshape(-1).real.astype(np.float64)
    except (AttributeError, TypeError, ValueError, NotImplementedError, tf.errors.OpError):
        return None  # for example, it is on several devices, or has no values yet
    return array


READING = Reading("TensorFlow", _values)
UNREADABLE = Reading(READING.framework, lambda *_: None)
"""For variables that other code may be changing."""
