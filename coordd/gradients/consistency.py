"""Checks that one optimizer's parameters and hyperparameters are equal on all ranks, for `coordd.gradients.reducer`.

Parameters are compared before the second step, because Horovod's scripts broadcast them before or after the first. A
part of them, and hyperparameters, are compared in steps 4, 8, … 128 and then every 128th; the next step gets the
result.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from coordd.daemon.operations import Operations
from coordd.errors import MismatchError
from coordd.gradients.value_check import Drift, Drifts, Trained, is_due, places
from coordd.ops.dtypes import digits_of
from coordd.ops.process_sets import ProcessSet
from coordd.parallel.parameter_list import NearlyEqual

__all__ = ["NUMPY", "Consistency", "Reading", "Settings"]

log = logging.getLogger("coordd")

_START = 2
_VALUES = 64
"""Number of values of each parameter that are compared at the start, spread over all of it."""
_CALLER = "DistributedOptimizer"
_ADVICE = "broadcast the variables before the first step, or right after it, and give all ranks one learning rate"
_REMEDY = "broadcast_variables(...) with the model's variables and the optimizer's"
_AGE = 2
"""Steps in which the values of a new model are unknown.

A model with the same names as an earlier one may have other values on each rank in its first step.
"""


class Described(Protocol):
    """A parameter, as far as the comparison needs it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    size: int

    @property
    def owner(self) -> Any:
        """The variable; None when it no longer exists."""


class Reading(NamedTuple):
    """What is read of variables to compare them, and how.

    Attributes:
        framework: its name; values may differ more between different frameworks.
        values: returns a variable's values at flat indices; None if they cannot be read.
        others: further parameters to compare, such as those with sparse gradients, which are reduced separately.
    """

    framework: str
    values: Callable[[Any, np.ndarray], Sequence[float] | np.ndarray | None]
    others: Sequence[Described] = ()


class Settings(Protocol):
    """The hyperparameters of an optimizer."""

    def current(self) -> Any:
        """Returns the hyperparameter that changes within a program, a scalar tensor, maybe of a graph; None if none."""
        ...

    def read(self, current: Any) -> Iterable[tuple[str, Any]]:
        """Lists all hyperparameters by name, given the value that the tensor had when a step was made."""
        ...


class Consistency:
    """Compares the parameters and hyperparameters of one optimizer between ranks."""

    def __init__(
        self,
        operations: Operations,
        parameters: Sequence[Described],
        *,
        reading: Reading,
        prefix: str,
        process_set: ProcessSet,
    ) -> None:
        """Prepares the comparisons.

        Args:
            operations: the operations of this rank.
            parameters: the same on all ranks.
            reading: how their values are read.
            prefix: prefix of the names of its operations.
            process_set: the ranks that take part.
        """
        self._operations = operations
        self._parameters: Sequence[Described] = [*parameters, *reading.others]
        self._reading = reading
        self._process_set = process_set
        self._joins = operations.joins(process_set.ranks)
        self._name, self._drifts = self._names(prefix)
        self._steps = 0
        self._anew = -_AGE
        self._starts = True
        self._start: NearlyEqual | None = None
        self._drift: Drift | None = None
        self._used: tuple[int, list[tuple[str, Any]]] | None = None

    def renew(self, parameters: Sequence[Described], reading: Reading) -> None:
        """Replaces the variables by those of another model, which has the same parameters."""
        self._parameters, self._anew = [*parameters, *reading.others], self._steps

    def begin(self) -> None:
        """Counts a step, and takes part in the comparison of that step, without waiting for the other ranks."""
        joins = self._operations.joins(self._process_set.ranks)
        if joins != self._joins:  # all ranks joined and continue with one rank's values; step counts may differ
            self._joins, self._starts = joins, False
            self._count_anew()
        self._steps += 1
        if not self._operations.daemon.config.check_parameters:
            return
        if self._steps == _START and self._starts:
            self._start = NearlyEqual(
                self._operations,
                {each.name: self._some(each) for each in self._parameters},
                caller=_CALLER,
                name=self._name,
                process_set=self._process_set,
                advice=_ADVICE,
            )
        elif self._steps > _START and is_due(self._steps):
            self._compare()

    def restart(self, prefix: str) -> None:
        """Counts steps from the start again, with another name prefix: the ranks may have counted different steps."""
        self._name, self._drifts = self._names(prefix)
        self._count_anew()

    def _names(self, prefix: str) -> tuple[str, Drifts]:
        framework, process_set = self._reading.framework, self._process_set
        return f"{prefix}start", Drifts(self._operations, framework=framework, prefix=prefix, process_set=process_set)

    def _count_anew(self) -> None:
        self._steps, self._anew = 0, -_AGE
        self._start = self._drift = self._used = None

    def _compare(self) -> None:
        """Starts a later comparison: of the current values, and of the hyperparameters of the previous step."""
        step, settings = self._used or (0, None)
        self._drift = self._drifts.begin(
            [self._trained(each) for each in self._parameters],
            settings if step == self._steps - 1 else None,
            step=self._steps,
            unknown=self._steps - self._anew < _AGE,
        )

    def note(self, settings: Callable[[], Iterable[tuple[str, Any]]]) -> None:
        """Records the hyperparameters of a step; calls ``settings`` only if they are to be compared."""
        if is_due(self._steps + 1) and self._operations.daemon.config.check_parameters:
            self._used = self._steps, [*settings()]

    def different(self) -> MismatchError | None:
        """Evaluates pending comparisons: the first in the second step, later ones in the step after.

        Returns:
            on all ranks, the error if values differ. Under ``as_horovod`` it is a warning instead.
        """
        start, self._start = self._start, None
        try:
            if start is not None:
                start.check()
            if self._drift is not None and not is_due(self._steps):
                drift, self._drift = self._drift, None
                drift.check(_CALLER, _REMEDY)
        except MismatchError as error:
            if not self._operations.as_horovod:
                return error
            if self._operations.daemon.world.rank == 0:
                log.warning("%s", error)
        return None

    def _some(self, parameter: Described) -> np.ndarray:
        """Returns some values of a parameter; NaN if they cannot be read here."""
        chosen = places(parameter.size, _VALUES)
        found = self._read(parameter, chosen)
        return np.full(chosen.size, np.nan) if found is None else np.asarray(found, np.float64)

    def _read(self, parameter: Described, chosen: np.ndarray) -> Any:
        owner = parameter.owner
        return None if owner is None else self._reading.values(owner, chosen)

    def _trained(self, parameter: Described) -> Trained:
        # Half of the digits of the dtype in which gradients are reduced, which is the same on all ranks.
        exact = digits_of(parameter.dtype) ** 0.5
        what = f"{parameter.shape} {parameter.dtype}"
        return Trained(parameter.name, what, parameter.size, exact, functools.partial(self._read, parameter))


def _of_array(owner: Any, chosen: np.ndarray) -> np.ndarray | None:
    try:
        found: np.ndarray = np.asarray(owner.numpy()).reshape(-1)[chosen].real.astype(np.float64)
    except (AttributeError, TypeError, NotImplementedError):  # it has no value, or a type that NumPy does not have
        return None
    return found


NUMPY = Reading("NumPy", _of_array)
