"""The training loop over epochs, as in ``model.fit``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import keras
import numpy as np

from coordd.errors import ArgumentError
from coordd_keras.pipeline.rows import rows_of, taken

__all__ = ["batches", "fit"]


class Trainable(Protocol):
    """Interface of the trained pipeline.

    Attributes:
        stop_training: callbacks set it to end training after the current step.
    """

    stop_training: bool


def batches(rows: int, size: int, least: int, *, every: bool = False) -> list[slice]:
    """Cuts rows into batches.

    Args:
        rows: number of rows.
        size: rows of a batch.
        least: minimum number of rows of a batch.
        every: whether a remainder of fewer rows is added to the last batch instead of being dropped.

    Raises:
        ArgumentError: there are too few rows for one batch.
    """
    if min(rows, size) < least:
        raise ArgumentError(f"a batch needs at least {least} rows, and gets {min(rows, size)}: give more")
    starts = [start for start in range(0, rows, size) if rows - start >= least]
    found = [slice(start, min(start + size, rows)) for start in starts]
    return [*found[:-1], slice(found[-1].start, rows)] if every else found


def fit(
    pipe: Trainable,
    data: tuple[Any, Any],
    *,
    reset: Callable[[], None],
    train: Callable[[Any, Any], float],
    conclude: Callable[[], dict[str, Any]],
    directions: Mapping[str, str],
    evaluate: Callable[[], dict[str, Any]] | None,
    finalize: Callable[[], None],
    batch_size: int,
    least: int,
    epochs: range,
    shuffle: bool,
    seed: Sequence[int],
    verbose: int,
    callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None,
) -> keras.callbacks.History:
    """Trains over epochs.

    Args:
        pipe: the callbacks' model.
        data: inputs and targets of all rows.
        reset: resets the metrics; called before each epoch, because callbacks between epochs may have added to them.
        train: takes a step and returns the mean loss.
        conclude: returns the metrics since its last call.
        directions: by name of a metric, ``max`` or ``min``, for callbacks that monitor it; filled in by `conclude`.
        evaluate: returns loss and metrics of validation data; called after each epoch.
        finalize: called after the last step, before ``on_train_end`` of the callbacks.
        batch_size: rows of a step; the last step of an epoch has the remaining rows, unless there are too few.
        least: minimum number of rows of a batch.
        epochs: epoch numbers.
        shuffle: whether each epoch permutes the rows, equally on all ranks.
        seed: of the permutations.
        verbose: as in Keras: 0 for no output, 1 for a progress bar, 2 for a line for each epoch.
        callbacks: Keras callbacks.

    Raises:
        ArgumentError: inputs and targets have different numbers of rows, or there are too few rows for one batch.
    """
    x, y = data
    rows = rows_of(data)
    parts = batches(rows, batch_size, least)
    pipe.stop_training = False
    heard = keras.callbacks.CallbackList(
        callbacks,
        add_history=True,
        add_progbar=verbose != 0,
        model=pipe,
        verbose=verbose,
        epochs=epochs.stop,
        steps=len(parts),
    )
    heard.on_train_begin()
    logs: dict[str, Any] = {}
    for epoch in epochs:
        reset()
        heard.on_epoch_begin(epoch)
        order = np.random.default_rng([*seed, epoch]).permutation(rows) if shuffle else np.arange(rows)
        total = count = 0.0
        for step, part in enumerate(parts):
            heard.on_train_batch_begin(step)
            chosen = order[part]
            total += train(taken(x, chosen), taken(y, chosen)) * len(chosen)
            count += len(chosen)
            heard.on_train_batch_end(step, {"loss": total / count})
            if pipe.stop_training:
                break
        logs = {"loss": total / count, **conclude()}
        if evaluate is not None:
            heard.on_test_begin()
            results = evaluate()
            heard.on_test_end(results)
            logs |= {f"val_{name}": value for name, value in results.items()}
        _set_modes(heard.callbacks, directions)
        heard.on_epoch_end(epoch, logs)
        if pipe.stop_training:
            break
    finalize()
    heard.on_train_end(logs)
    found: keras.callbacks.History = next(each for each in heard.callbacks if isinstance(each, keras.callbacks.History))
    return found


def _set_modes(callbacks: Iterable[Any], directions: Mapping[str, str]) -> None:
    """Sets the mode of callbacks that monitor a metric, such as ``EarlyStopping("val_accuracy")``, where it is "auto".

    Keras finds the direction in the metrics of the callback's model, which only the ranks with the last stage have.
    """
    for callback in callbacks:
        if getattr(callback, "mode", None) == "auto" and isinstance(getattr(callback, "monitor", None), str):
            callback.mode = directions.get(callback.monitor.removeprefix("val_"), "auto")
