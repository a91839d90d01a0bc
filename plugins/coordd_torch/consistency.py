"""Whether the parameters and hyperparameters of one optimizer stay equal on all ranks while they train.

They are compared before the first step (`coordd_torch.start`), and later some of them in steps 2, 4, 8, … 128 and then
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

from coordd.drift import Drift, Drifts, Trained, is_due
from coordd.errors import MismatchError
from coordd.operations import Operations
from coordd.process_sets import ProcessSet
from coordd_torch.start import Start, hyperparameters
from coordd_torch.tensors import values_at

__all__ = ["Consistency"]

log = logging.getLogger("coordd")

_REMEDY = "broadcast_parameters(model.state_dict()) and broadcast_optimizer_state(optimizer)"


class Consistency:
    """Compares the ranks of one optimizer, from its first step on."""

    local = False
    """Whether this rank has made a step with gradients of its own, so that its parameters may differ on purpose."""

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
            operations: the way to the other ranks.
            optimizer: the user's.
            names: of parameters, by their ids.
            start: compares what the ranks start with.
            prefix: begins the names of its operations.
            process_set: the ranks that take part.
        """
        self._operations = operations
        self._optimizer = weakref.ref(optimizer)  # whose hooks keep this object
        self._names = dict(names)
        self._start: Start | None = start
        self._drifts = Drifts(operations, framework="PyTorch", prefix=prefix, process_set=process_set)
        self._process_set = process_set
        self._joins = operations.joins(process_set.ranks)
        self.steps = 0
        """How many steps the ranks have begun to reduce since they have last joined."""
        self._asked: Drift | None = None
        self._now: Drift | None = None

    def _restart(self, joins: int) -> None:
        """Counts from the start again, for all ranks have joined and have taken one rank's values over."""
        self._joins, self.steps, self.local = joins, 0, False
        self._start = self._asked = self._now = None

    def begin(self) -> None:
        """Counts a step, and takes part in the comparison that belongs to it, without waiting for the other ranks."""
        joins = self._operations.joins(self._process_set.ranks)
        if joins != self._joins:
            self._restart(joins)
        self.steps += 1
        if self.steps == 1 and self._start is not None:
            self._start.begin()
        elif is_due(self.steps) and self._operations.daemon.config.check_parameters:
            self._now = self._compare()

    def begin_again(self) -> None:
        """Takes part once more if the ranks have lost the comparison because they have waited for each other."""
        if self._start is not None:
            self._start.begin_again()
        if self._now is not None:
            self._now.begin_again()

    def forget(self, parameters: Iterable[Tensor]) -> None:
        """Forgets the names of parameters that are trained no longer: new ones may get their ids."""
        for parameter in parameters:
            self._names.pop(id(parameter), None)

    def check_alone(self) -> None:
        """Looks at this rank alone, in its first step.

        Raises:
            ArgumentError: another package, such as PyTorch's DistributedDataParallel, averages these gradients, too.
        """
        if self._start is not None:
            self._start.check_alone()

    def hear(self) -> None:
        """Hears the others: of the comparison before the first step in that step, of later ones in the next step.

        All ranks call it at the end of the same steps, when nothing is under way that another rank might wait for.

        Raises:
            MismatchError: on all ranks: values differ; it names what and which ranks. Under ``as_horovod`` that is a
                warning.
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
        trained = [
            _trained(self._names.get(id(value), f"param.{number}.{place}"), value)
            for number, group in enumerate(groups)
            for place, value in enumerate(group["params"])
            if value.requires_grad
        ]
        trained.sort(key=operator.attrgetter("name"))
        return self._drifts.begin(trained, hyperparameters(groups), step=self.steps, unknown=self.local)


def _trained(name: str, value: Tensor) -> Trained:
    what, size, exact = _kind(value.shape, value.dtype)
    return Trained(name, what, size, exact, functools.partial(values_at, value))


@functools.lru_cache(1024)  # a model has many parameters of a few kinds
def _kind(shape: torch.Size, dtype: torch.dtype) -> tuple[str, int, float]:
    """Describes a parameter: its kind, how many values it has, and by how much of the largest one ranks may differ.

    That is half of the digits that its type has: enough for what ranks with other processors round otherwise in a
    million steps, and less than what a step with another learning rate or gradient changes.
    """
    exact = float(torch.finfo(dtype).eps) ** 0.5  # a type that is trained has a fraction
    return f"{tuple(shape)} {dtype}", shape.numel() * (1 + dtype.is_complex), exact
