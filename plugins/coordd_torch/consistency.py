"""Consistency check: compares the parameters and hyperparameters of one optimizer across ranks during training.

All are compared before the first step (`coordd_torch.start`), and some of them in steps 2, 4, 8, … 128 and then in
every 128th. Steps are counted when gradients are reduced, which all ranks do together.
"""

from __future__ import annotations

import functools
import logging
import operator
import weakref
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from coordd.daemon.operations import Operations
from coordd.errors import MismatchError
from coordd.gradients.value_check import Drift, Drifts, Trained, is_due
from coordd.ops.process_sets import ProcessSet
from coordd_torch.start import Start, hyperparameters
from coordd_torch.tensors import values_at

__all__ = ["Consistency", "trained"]

log = logging.getLogger("coordd")

_REMEDY = "broadcast_parameters(model.state_dict()) and broadcast_optimizer_state(optimizer)"


class Consistency:
    """Consistency check of one optimizer, from its first step on."""

    local = False
    """Whether this rank has made a step with its local gradients, so that its parameters may differ on purpose."""

    def __init__(
        self,
        operations: Operations,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, str],
        start: Start,
        *,
        prefix: str,
        process_set: ProcessSet,
    ) -> None:
        """Prepares the comparisons.

        Args:
            operations: starts the operations.
            optimizer: the user's optimizer.
            names: the parameters' names, by their ids.
            start: compares the initial values.
            prefix: prefix of the names of its operations.
            process_set: the ranks that take part.
        """
        self._operations = operations
        self._optimizer = weakref.ref(optimizer)  # weak, because the optimizer's hooks refer to this object
        self._names = dict(names)
        self._start: Start | None = start
        self._drifts = Drifts(operations, framework="PyTorch", prefix=prefix, process_set=process_set)
        self._process_set = process_set
        self._joins = operations.joins(process_set.ranks)
        self.steps = 0
        """Number of steps whose reduction has begun since all ranks last joined."""
        self._asked: Drift | None = None
        self._now: Drift | None = None

    def _restart(self, joins: int) -> None:
        """Resets the count, because all ranks have joined and have copied the values of one rank."""
        self._joins, self.steps, self.local = joins, 0, False
        self._start = self._asked = self._now = None

    def begin(self) -> None:
        """Counts a step and starts its comparison, if any; does not wait for the other ranks."""
        joins = self._operations.joins(self._process_set.ranks)
        if joins != self._joins:
            self._restart(joins)
        self.steps += 1
        if self.steps == 1 and self._start is not None:
            self._start.begin()
        elif is_due(self.steps) and self._operations.daemon.config.check_parameters:
            self._now = self._compare()

    def begin_again(self) -> None:
        """Starts a comparison again if it failed because ranks waited for each other."""
        if self._start is not None:
            self._start.begin_again()
        if self._now is not None:
            self._now.begin_again()

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Drops the names of parameters that are no longer trained, because new ones may get their ids."""
        for parameter in parameters:
            self._names.pop(id(parameter), None)

    def check_alone(self) -> None:
        """Checks this rank alone, in its first step.

        Raises:
            ArgumentError: another package, such as PyTorch's DistributedDataParallel, averages these gradients too.
        """
        if self._start is not None:
            self._start.check_alone()

    def hear(self) -> None:
        """Checks the results of comparisons: of the initial one in the first step, of later ones one step later.

        All ranks call it at the end of the same steps, when no operation is in flight that another rank might wait for.

        Raises:
            MismatchError: on all ranks: values differ; the message names the values and the ranks. Under ``as_horovod``
                rank 0 logs a warning instead.
        """
        start, self._start = self._start, None
        asked, self._asked, self._now = self._asked, self._now, None
        try:
            if start is not None:
                start.check()
            if asked is not None:
                asked.check("DistributedOptimizer", _REMEDY)
        except MismatchError as error:
            if not self._operations.as_horovod:
                raise
            if self._operations.daemon.world.rank == 0:
                log.warning("%s", error)

    def _compare(self) -> Drift:
        optimizer = self._optimizer()
        groups = optimizer.param_groups if optimizer is not None else []
        found = [
            trained(self._names.get(id(value), f"param.{number}.{place}"), value)
            for number, group in enumerate(groups)
            for place, value in enumerate(group["params"])
            if value.requires_grad
        ]
        found.sort(key=operator.attrgetter("name"))
        return self._drifts.begin(found, hyperparameters(groups), step=self.steps, unknown=self.local)


def trained(name: str, value: Tensor) -> Trained:
    """Describes a parameter for the comparison of values; it requires a gradient, so it has no integer dtype."""
    what, size, exact = _kind(value.shape, value.dtype)
    return Trained(name, what, size, exact, functools.partial(values_at, value))


@functools.lru_cache(1024)  # a model has many parameters of few kinds
def _kind(shape: torch.Size, dtype: torch.dtype) -> tuple[str, int, float]:
    """Returns a parameter's description, its number of real values, and the tolerance relative to the largest value.

    The tolerance is half of the digits of its dtype: more than the rounding differences of a million steps on other
    processors, and less than the effect of a step with another learning rate or gradient.
    """
    exact = float(torch.finfo(dtype).eps) ** 0.5  # trained parameters are floating-point
    return f"{tuple(shape)} {dtype}", shape.numel() * (1 + dtype.is_complex), exact
