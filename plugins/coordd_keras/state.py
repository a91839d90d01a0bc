"""Checkpoint of a training job: committed every few batches, restored when the job starts again.

The ranks of a job are fixed: if one fails, the job ends, and the next job resumes from the last commit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import keras
import numpy as np

from coordd import api
from coordd.errors import ArgumentError
from coordd.parallel.collective_calls import CollectiveCall, collective_method
from coordd.parallel.objects import broadcast_object
from coordd_keras.operations import copy_variables

__all__ = ["CommitStateCallback", "KerasState", "UpdateBatchStateCallback", "UpdateEpochStateCallback"]

_VALUES = "values"


class KerasState:
    """A model, its optimizer, and plain values such as ``epoch``, which are attributes."""

    epoch = 0
    batch = 0

    def __init__(self, model: keras.Model, path: str | os.PathLike[str], **values: Any) -> None:
        """Keeps the model and the values; call `restore` before training.

        Args:
            model: compiled and built.
            path: the file that rank 0 writes and reads.
            values: numbers, strings, and lists and dictionaries of them.

        Raises:
            ArgumentError: the model is not compiled.
        """
        if getattr(model, "optimizer", None) is None:
            text = "KerasState wants a compiled model: call model.compile(...) first"
            raise ArgumentError(text)
        self._model = model
        self._path = Path(path)
        self._values: dict[str, Any] = {"epoch": 0, "batch": 0, **values}
        self._show()

    def commit(self) -> None:
        """Writes everything to the file atomically, on rank 0."""
        if api.rank():
            return
        self._values = {name: getattr(self, name) for name in self._values}
        arrays = {str(index): _storable(each) for index, each in enumerate(self._variables())}
        arrays[_VALUES] = np.array(json.dumps(self._values))
        unfinished = self._path.with_name(f"{self._path.name}.tmp")
        with unfinished.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # NumPy has an argument that is not an array, too
        unfinished.replace(self._path)

    @collective_method("KerasState.restore")
    def restore(self, _call: CollectiveCall) -> bool:
        """Loads the last commit on all ranks, or rank 0's state if there is no file; returns whether there was a file.

        Raises:
            ArgumentError: the file belongs to another model.
            RefusedError: another rank raised an error in this call.
        """
        found, problem = None, ""
        if api.rank() == 0 and self._path.exists():
            try:
                found = self._read()
            except ArgumentError as error:
                problem = str(error)
        mine = {name: getattr(self, name) for name in self._values}
        there, values, problem = broadcast_object(
            (found is not None, {**mine, **(found or {})}, problem), 0, name="coordd.state"
        )
        if problem:
            raise ArgumentError(problem)
        copy_variables(self._variables(), 0)
        self._values |= values
        self._show()
        return bool(there)

    def _read(self) -> dict[str, Any]:
        """Reads the file into the variables; returns the values."""
        variables = self._variables()
        with np.load(self._path) as file:
            arrays = [file[str(index)] for index in range(len(file.files) - 1)]
            values: dict[str, Any] = json.loads(str(file[_VALUES]))
        if [array.shape for array in arrays] != [tuple(variable.shape) for variable in variables]:
            text = f"{self._path} is of another model or optimizer: its variables have other shapes"
            raise ArgumentError(text)
        for variable, array in zip(variables, arrays, strict=True):
            variable.assign(array)
        return values

    def _variables(self) -> list[Any]:
        optimizer = self._model.optimizer
        if not optimizer.built:
            optimizer.build(self._model.trainable_variables)
        return [*self._model.variables, *optimizer.variables]

    def _show(self) -> None:
        for name, value in self._values.items():
            setattr(self, name, value)


def _storable(variable: Any) -> np.ndarray:
    """Returns a variable's values, bfloat16 and its kin as float32, because NumPy's files cannot hold them."""
    array = np.asarray(keras.ops.convert_to_numpy(variable))
    return array.astype(np.float32) if array.dtype.kind == "V" else array


class CommitStateCallback(keras.callbacks.Callback):
    """Commits a state every few batches, and at the end of an epoch."""

    def __init__(self, state: KerasState, batches_per_commit: int = 1) -> None:
        super().__init__()
        self._state = state
        self._every = batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commits after every `batches_per_commit` batches."""
        if (batch + 1) % self._every == 0:
            self._state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commits; place this callback after the callbacks that change the state."""
        self._state.commit()


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Updates ``state.batch``: the number of finished batches of this epoch."""

    def __init__(self, state: KerasState) -> None:
        super().__init__()
        self._state = state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stores the number of finished batches."""
        self._state.batch = batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Resets the count."""
        self._state.batch = 0


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Updates ``state.epoch``: the number of finished epochs, for ``fit(initial_epoch=state.epoch)``."""

    def __init__(self, state: KerasState) -> None:
        super().__init__()
        self._state = state

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stores the number of finished epochs."""
        self._state.epoch = epoch + 1
