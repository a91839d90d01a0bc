"""Handles the rows of Keras inputs: arrays, alone or in lists and dictionaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from coordd.errors import ArgumentError
from coordd.pipeline.batch_check import fingerprint, some

__all__ = ["arrays", "joined", "rows_of", "taken", "told"]


def arrays(values: Any) -> Any:
    """Converts all leaves to arrays.

    Raises:
        ArgumentError: a leaf is a data set, whose rows cannot be indexed.
    """

    def made(leaf: Any) -> np.ndarray | None:
        if leaf is None:
            return None
        found = np.asarray(keras.ops.convert_to_numpy(leaf) if keras.ops.is_tensor(leaf) else leaf)
        if found.dtype == object:
            raise ArgumentError(
                f"a pipeline deals rows out itself and wants arrays, not a {type(leaf).__name__}: give these, or call "
                "train_on_batch(x, y) for each of its batches, alike on all ranks"
            )
        return found

    return keras.tree.map_structure(made, values)


def rows_of(values: Any) -> int:
    """Returns the number of rows.

    Raises:
        ArgumentError: there are no arrays, or their numbers of rows differ.
    """
    found = sorted({len(leaf) for leaf in _leaves(values) if leaf.ndim})
    if len(found) != 1:
        text = ", ".join(map(str, found)) or "none"
        raise ArgumentError(
            f"the arrays of a batch must have equally many rows to be cut into microbatches, not {text}"
        )
    return found[0]


def taken(values: Any, part: Any) -> Any:
    """Returns the selected rows of all arrays."""
    return keras.tree.map_structure(lambda leaf: leaf if leaf is None or not leaf.ndim else leaf[part], values)


def joined(parts: Sequence[tuple[int, Sequence[np.ndarray]]]) -> list[np.ndarray]:
    """Concatenates the outputs of microbatches.

    Args:
        parts: for each microbatch the number of its rows, and its outputs.

    Raises:
        ArgumentError: the first dimension of an output is not the number of rows.
    """
    for rows, outputs in parts:
        for output in outputs:
            if output.shape[:1] != (rows,):
                raise ArgumentError(
                    f"an output has shape {output.shape} for {rows} rows, so its first dimension is not that of the "
                    "rows, and those of microbatches cannot be joined: let the model put the rows first"
                )
    return [np.concatenate(outputs) for outputs in zip(*(outputs for _, outputs in parts), strict=True)]


def told(x: Any, y: Any) -> dict[str, str]:
    """Returns the description of a batch that `coordd.pipeline.batch_check.Accord` compares between ranks."""
    leaves = _leaves((x, y))
    rows = ", ".join(str(len(leaf)) for leaf in leaves if leaf.ndim)
    shapes = ", ".join(str(leaf.shape) for leaf in leaves)
    dtypes = ", ".join(str(leaf.dtype) for leaf in leaves)
    return {"rows": rows, "shapes": shapes, "dtypes": dtypes, "inputs": _print(x), "targets": _print(y)}


def _print(values: Any) -> str:
    return fingerprint(some(leaf) for leaf in _leaves(values))


def _leaves(values: Any) -> list[np.ndarray]:
    return [leaf for leaf in keras.tree.flatten(values) if leaf is not None]
