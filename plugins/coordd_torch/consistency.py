"""Whether the parameters and hyperparameters of one optimizer stay equal on all ranks while they train.

They are compared before the first step (`coordd_torch.start`), and later some of them in steps 2, 4, 8, … 128 and then
every 128th. Steps are counted when gradients are reduced, which all ranks do together.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from coordd.drift import Drift, Quantity, fingerprint, is_due
from coordd.errors import MismatchError
from coordd.operations import Operations
from coordd.process_sets import ProcessSet
from coordd_torch.start import Start, hyperparameters

__all__ = ["Consistency"]

log = logging.getLogger("coordd")
Item = TypeVar("Item")

_PARAMETERS, _VALUES, _HYPERPARAMETERS = 8, 8, 63
"""So many parameters, values of each, and hyperparameters are compared at once; other ones the next time."""
_SIZE = 1 + _PARAMETERS * _VALUES + _HYPERPARAMETERS
_ROUNDING = 1e-4
"""Of hyperparameters: other processors may compute a schedule's cosine otherwise in the last bits."""
_ADVICE = (
    "usual causes are a learning rate scheduler that follows a metric of one rank only, gradients that one rank clips, "
    "scales or replaces, a step that was made or failed on one rank only, and a checkpoint that one rank has loaded "
    "alone. Do the same on all ranks, or call broadcast_parameters(model.state_dict()) and "
    "broadcast_optimizer_state(optimizer); init(check_parameters=False) lets them differ"
)


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
        self._names = names
        self._start: Start | None = start
        self._prefix = prefix
        self._process_set = process_set
        self._joins = operations.joins(process_set.ranks)
        self.steps = 0
        """How many steps the ranks have begun to reduce since they have last joined."""
        self._turn = 0
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
            self._now = self._sample()

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
                asked.check("DistributedOptimizer", _ADVICE)
        except MismatchError as error:
            if not self._operations.as_horovod:
                raise
            if self._operations.daemon.world.rank == 0:
                log.warning("%s", error)

    def _sample(self) -> Drift:
        turn, self._turn = self._turn, self._turn + 1
        optimizer = self._optimizer()
        groups = optimizer.param_groups if optimizer is not None else []
        trained = [
            (self._names.get(id(value), f"param.{number}.{place}"), value)
            for number, group in enumerate(groups)
            for place, value in enumerate(group["params"])
            if value.requires_grad
        ]
        settings = [*hyperparameters(groups)]
        what = repr([tuple(value.shape) for _, value in trained] + [name for name, _ in settings])
        quantities = [Quantity("the trained parameters and their groups, as a checksum", (fingerprint(what),), 0.0)]
        quantities += [
            Quantity(name, (_number(value),), _ROUNDING) for name, value in _window(settings, turn, _HYPERPARAMETERS)
        ]
        quantities += [Quantity(name, *_some(value)) for name, value in _window(trained, turn, _PARAMETERS)]
        return Drift(
            self._operations,
            quantities,
            size=_SIZE,
            unknown=self.local,
            name=f"{self._prefix}values.{self.steps}",
            process_set=self._process_set,
        )


def _window(items: Sequence[Item], turn: int, count: int) -> Sequence[Item]:
    """Takes so many of the items, others in each turn."""
    if len(items) <= count:
        return items
    first = turn * count % len(items)
    return [items[(first + place) % len(items)] for place in range(count)]


def _number(value: Any) -> float:
    """Makes a number of a hyperparameter."""
    return float(value) if isinstance(value, (bool, int, float)) else fingerprint(repr(value))


def _some(value: Tensor) -> tuple[tuple[float, ...], float]:
    """Takes some values, spread over all of a parameter, and says by how much those of other ranks may differ.

    That is half of the digits that its type has: enough for what ranks with other processors round otherwise in a
    million steps, and less than what a step with another learning rate or gradient changes.
    """
    value = value.detach()
    if value.is_complex():
        value = torch.view_as_real(value)
    if value.layout is not torch.strided or value.is_meta or not value.is_floating_point() or not value.numel():
        return (), 0.0
    stride = max(1, value.numel() // _VALUES)
    if value.is_contiguous():
        some = value.view(-1)[::stride][:_VALUES]
    else:
        count = min(_VALUES, value.numel())
        places = np.unravel_index(np.arange(count) * stride, value.shape)
        some = value[tuple(torch.from_numpy(place).to(value.device) for place in places)]
    return tuple(some.tolist()), float(torch.finfo(value.dtype).eps) ** 0.5
