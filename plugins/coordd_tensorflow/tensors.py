"""Converts TensorFlow tensors to NumPy arrays, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from coordd.errors import ArgumentError

__all__ = ["check_dense", "to_tensor", "view"]


def view(tensor: Any) -> np.ndarray:
    """Returns a read-only view of an eager tensor in host memory; copies any other tensor."""
    if isinstance(tensor, tf.Tensor) and not tensor.shape.rank:
        return np.asarray(tensor.numpy())  # TensorFlow gives no array of a scalar with a dtype that NumPy lacks
    return np.asarray(tensor)


def to_tensor(array: np.ndarray) -> tf.Tensor:
    """Converts an array that no longer changes to a tensor."""
    return tf.convert_to_tensor(array)


def check_dense(tensor: Any) -> tf.Tensor:
    """Converts any object that TensorFlow accepts to a tensor.

    Raises:
        ArgumentError: it is sparse or ragged, or not a tensor.
    """
    if isinstance(tensor, (tf.IndexedSlices, tf.SparseTensor, tf.RaggedTensor)):
        text = f"a {type(tensor).__name__} cannot travel as it is: use tf.convert_to_tensor() or tf.sparse.to_dense()"
        raise ArgumentError(text)
    try:
        return tf.convert_to_tensor(getattr(tensor, "value", tensor) if _is_keras(tensor) else tensor)
    except (TypeError, ValueError) as error:
        text = f"a tensor is wanted, not a {type(tensor).__name__}: tf.convert_to_tensor() makes one"
        raise ArgumentError(text) from error


def _is_keras(tensor: Any) -> bool:
    return not isinstance(tensor, (tf.Tensor, tf.Variable)) and type(tensor).__module__.startswith("keras.")
