"""Processes a rank's gradients, of all its stages, from backward to the optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np

from coordd.daemon.operations import Operations
from coordd.errors import ArgumentError
from coordd.ops.messages import ReduceOp
from coordd_keras.pipeline.autodiff import Autodiff
from coordd_keras.pipeline.sharing import Sharing

__all__ = ["Settling"]

_LAST_TRAINED: WeakKeyDictionary[Any, frozenset[int]] = WeakKeyDictionary()
"""For each optimizer the ids of all variables that this rank had when it last took a step in a pipeline."""


class Settling:
    """Accumulates, reduces and clips gradients, and runs the optimizer, once for all stages of a rank."""

    def __init__(
        self,
        held: Mapping[int, Mapping[str, Any]],
        sharing: Sharing,
        optimizer: Any,
        *,
        statistics: Mapping[str, Any],
        autodiff: Autodiff,
        counted: frozenset[str],
        clip_norm: float,
        operations: Operations,
        name: str,
    ) -> None:
        """Builds the optimizer, if it is not built.

        Args:
            held: for each stage of this rank its variables by key.
            sharing: reduces gradients with other ranks.
            optimizer: of all variables of this rank.
            statistics: the variables that replicas average.
            autodiff: of any of these stages.
            counted: keys of the variables whose gradients this rank adds to the global norm.
            clip_norm: the maximum global norm of all gradients; infinite for no clipping.
            operations: of the daemon.
            name: of the reduction of the norm.

        Raises:
            ArgumentError: the optimizer has taken steps in a pipeline in which this rank had other layers.
        """
        every = {key: variable for mine in held.values() for key, variable in mine.items()}
        self._variables = {key: variable for key, variable in every.items() if variable.trainable}
        self._own_ids = frozenset(map(id, every.values()))
        before = _LAST_TRAINED.get(optimizer, self._own_ids)
        if new := [variable.path for variable in self._variables.values() if id(variable) not in before]:
            raise ArgumentError(
                "the optimizer has trained other layers on this rank in an earlier pipeline, and has no state for "
                f"{', '.join(new[:3])}: give whole() of that pipeline, split as before, or a new optimizer"
            )
        self._statistics = statistics
        self._keys = {id(variable): key for key, variable in self._variables.items()}
        self._sharing = sharing
        self._optimizer = optimizer
        self._codec = autodiff.codec
        self._apply = autodiff.compiled(self._applied)
        self._counted = counted
        self._most = clip_norm
        self._operations = operations
        self._name = name
        self._stages = len(held)
        self._waiting = self._stages
        self._sums: dict[str, Any] = {}
        if self._variables and not optimizer.built:
            optimizer.build(list(self._variables.values()))
            if optimizer.use_ema and int(keras.ops.convert_to_numpy(optimizer.iterations)):
                # These variables were frozen in the steps of an earlier pipeline: their averages are their values.
                for variable, average in self._averages():
                    average.assign(variable)

    def add(self, variable: Any, gradient: Any) -> None:
        """Adds a microbatch's gradient of a variable to its sum."""
        key = self._keys[id(variable)]
        self._sums[key] = self._sums[key] + gradient if key in self._sums else gradient

    def reduce(self, stage: int) -> None:
        """Starts to reduce a stage's gradients."""
        self._sharing.start(stage, self._sums, array=self._codec.array)

    def step(self) -> None:
        """Takes the optimizer step when the last of the rank's stages calls this."""
        self._waiting -= 1
        if self._waiting:
            return
        self._waiting = self._stages
        _LAST_TRAINED[self._optimizer] = self._own_ids
        for key, array in self._sharing.finish().items():
            if array is not None:
                self._sums[key] = self._codec.tensor(array, differentiable=False)
        if self._most < math.inf:
            self._clip()
        if there := {key: self._sums[key] for key in self._variables if key in self._sums}:
            self._apply(there)
        else:
            self._step_without_gradients()
        self._sums.clear()
        self._sharing.average(self._statistics)

    def finalize(self) -> None:
        """Replaces weights with their averages, if the optimizer keeps any and has taken a step.

        Keras's `finalize_variable_values` takes the variables with which the optimizer was built: those of the whole
        model, in its order, if the model was compiled or loaded with it.
        """
        optimizer = self._optimizer
        if not self._variables or not optimizer.use_ema or not int(keras.ops.convert_to_numpy(optimizer.iterations)):
            return
        for variable, average in self._averages():
            variable.assign(average)

    def _applied(self, gradients: Mapping[str, Any]) -> None:
        optimizer = self._optimizer
        most, optimizer.global_clipnorm = optimizer.global_clipnorm, None  # Keras would use the norm of this rank only
        try:
            optimizer.apply(list(gradients.values()), [self._variables[key] for key in gradients])
        finally:
            optimizer.global_clipnorm = most

    def _averages(self) -> Iterator[tuple[Any, Any]]:
        """Yields this rank's variables with their averages, which Keras keeps in the order of the optimizer's build."""
        optimizer = self._optimizer
        for variable, average in zip(
            optimizer._trainable_variables,  # noqa: SLF001 - no public way
            optimizer._model_variables_moving_average,  # noqa: SLF001 - as above
            strict=True,
        ):
            if id(variable) in self._keys:
                yield variable, average

    def _step_without_gradients(self) -> None:
        """Counts a step in which no variable of this rank has a gradient, as Keras does where another variable has one.

        Learning rate schedules count it, and moving averages are updated. Keras has no public way to do this.
        """
        optimizer = self._optimizer
        if self._variables and optimizer.use_ema:
            variables = optimizer._trainable_variables  # noqa: SLF001 - no public way
            optimizer._update_model_variables_moving_average(variables)  # noqa: SLF001 - as above
            every = optimizer.ema_overwrite_frequency
            if every and (int(keras.ops.convert_to_numpy(optimizer.iterations)) + 1) % every == 0:
                optimizer.finalize_variable_values(variables)
        optimizer._iterations.assign_add(1)  # noqa: SLF001 - as above

    def _clip(self) -> None:
        mine = (self._codec.array(gradient) for key, gradient in self._sums.items() if key in self._counted)
        square = sum(float(np.square(array, dtype=np.float64).sum()) for array in mine)
        found = self._operations.allreduce(np.array([square], np.float64), name=self._name, op=ReduceOp.SUM).result()
        norm = float(np.sqrt(found[0]))
        if norm > self._most:
            self._sums = {key: gradient * (self._most / norm) for key, gradient in self._sums.items()}
