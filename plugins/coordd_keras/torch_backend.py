"""Gradients of Keras on PyTorch: reduced while backward still runs.

Its one rule is that of `coordd.torch`: when ``backward()`` returns, ``.grad`` holds what the optimizer will use, on
every rank.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from coordd import api
from coordd.consistency import Reading, Settings
from coordd.dtypes import dtype_of
from coordd.errors import CoorddError
from coordd.gradients import Choices, Gradients, Parameter
from coordd.messages import ReduceOp
from coordd.operations import Operations
from coordd_torch.backward_pass import BackwardPass
from coordd_torch.tensors import borrow, from_array, values_at
from coordd_torch.uncompiled import keep_uncompiled

__all__ = ["TorchReduction"]

_HOOK = "_coordd_keras_hook"
READING = Reading("PyTorch", lambda variable, places: values_at(variable.value, places))
"""How values of Keras's variables are read."""


class TorchReduction:
    """Puts each gradient into its bucket as soon as backward has accumulated it; backward ends when all are reduced."""

    def __init__(self, choices: Choices, prefix: str) -> None:
        self._choices = choices
        self._prefix = prefix
        self._variables: list[Any] = []
        self._parameters: list[torch.Tensor] = []
        self._described: list[Parameter] = []
        self._operations: Operations | None = None
        self._gradients: Gradients | None = None
        self._contexts: dict[int, Any] = {}
        self._begun = self._reduced = False
        self._sums: list[Callable[[], torch.Tensor | None]] = []
        """Return what gradients were reduced last, while they live."""
        self._fresh: set[int] = set()
        """Of which parameters the present backward pass has made gradients."""

    def watch(self, variables: Sequence[Any]) -> None:
        """Has autograd tell when gradients are there."""
        self._adopt(variables)
        if api.operations().part is None:  # else with the first gradient, as ranks do whose Keras runs on TensorFlow
            self._at_hand(variables)
        for index, parameter in enumerate(self._parameters):
            if (hook := getattr(parameter, _HOOK, None)) is not None:
                hook.remove()  # that of an optimizer which this one replaces
            ready = functools.partial(self._ready, index)
            setattr(parameter, _HOOK, parameter.register_post_accumulate_grad_hook(ready))

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any], settings: Settings) -> list[Any]:
        """Returns reduced gradients for a step with these settings; None where no rank has one."""
        found = self._found(gradients, variables)
        assert self._gradients is not None  # noqa: S101 - for the type checker
        self._gradients.note(lambda: settings.read(settings.current()))
        return found

    def _found(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        self._at_hand(variables)
        indices = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        places = [indices[id(variable.value)] for variable in variables]
        reduced, self._reduced = self._reduced, False
        if reduced and (self._choices.op is ReduceOp.SUM or self._are_sums(gradients, places)):
            return list(gradients)
        for gradient, place in zip(gradients, places, strict=True):
            if gradient is not None:
                self._put(place, gradient)
        found = self._wait()
        return [found[place] for place in places]

    def _are_sums(self, gradients: Sequence[Any], places: Sequence[int]) -> bool:
        """Whether these are what the last backward pass has reduced, and not gradients of another function.

        An average that the script has changed since may be averaged again, for it is equal on all ranks; of a sum
        nobody can tell.
        """
        pairs = zip(gradients, places, strict=True)
        return all(gradient is None or gradient is self._sums[place]() for gradient, place in pairs)

    def _adopt(self, variables: Sequence[Any]) -> None:
        """Takes variables over."""
        compress = self._choices.compression.compress
        self._variables = list(variables)
        self._parameters = [variable.value for variable in variables]
        like = [compress(parameter.detach().new_empty(0))[0] for parameter in self._parameters]
        self._described = [
            Parameter(variable.path, parameter.shape, dtype_of(str(small.dtype).removeprefix("torch.")), variable)
            for variable, parameter, small in zip(variables, self._parameters, like, strict=True)
        ]

    def _at_hand(self, variables: Sequence[Any]) -> None:
        """Makes sure of the buckets, which are those of the daemon that runs."""
        if not self._parameters:
            self._adopt(variables)
        operations = api.operations()
        if self._gradients is None or self._operations is not operations:
            self._operations = operations
            self._gradients = Gradients(
                operations, self._described, self._choices, prefix=self._prefix, reading=READING
            )

    def _ready(self, index: int, parameter: torch.Tensor) -> None:
        """Runs when backward has accumulated a gradient.

        Raises:
            CoorddError: it was summed up already, and that cannot be told from what is new.
        """
        assert parameter.grad is not None  # noqa: S101 - autograd has just made it
        if not self._begun:
            self._at_hand(self._variables)
            self._begun = True
            self._fresh.clear()
            BackwardPass(self._end_of_backward, self._backward_failed, order=self._prefix)
            if self._reduced and self._choices.op is ReduceOp.SUM and self._adds(index):
                text = (
                    "another backward pass before the step, whose gradients would be added to sums over all ranks: use "
                    "backward_passes_per_step, or op=Average"
                )
                raise CoorddError(text)
        self._fresh.add(index)
        self._give(index, parameter.grad)

    def _adds(self, index: int) -> bool:
        """Whether gradients were not cleared since they were reduced; this pass has made one so far."""
        kept = self._sums[index]() is self._parameters[index].grad
        return kept or any(parameter.grad is not None for parameter in self._others(index))

    def _others(self, index: int) -> list[torch.Tensor]:
        return [parameter for other, parameter in enumerate(self._parameters) if other != index]

    def _give(self, index: int, gradient: torch.Tensor) -> None:
        try:
            self._put(index, gradient)
        except BaseException:
            assert self._gradients is not None  # noqa: S101 - for the type checker
            self._begun = False
            self._gradients.drop()
            raise

    def _backward_failed(self) -> None:
        """Runs when a backward pass has failed, before its error reaches the script."""
        self._begun = self._reduced = False
        if self._gradients is not None:
            with contextlib.suppress(CoorddError):  # the job has failed: whoever goes on hears of it
                self._gradients.drop("has not completed a backward pass, which has failed")

    def _end_of_backward(self) -> None:
        """Puts reduced gradients in the place of this rank's.

        What this pass has not made and an earlier one has is reduced once more, for other ranks may have added to it.
        """
        for index, parameter in enumerate(self._parameters):
            if index not in self._fresh and parameter.grad is not None:
                self._give(index, parameter.grad)
        self._begun = self._reduced = False
        for parameter, gradient in zip(self._parameters, self._wait(), strict=True):
            if gradient is not None:  # else it may be that of an earlier pass
                parameter.grad = gradient
        self._reduced = True
        self._sums = [_reference(parameter.grad) for parameter in self._parameters]

    def _put(self, index: int, gradient: torch.Tensor) -> None:
        assert self._gradients is not None  # noqa: S101 - for the type checker
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        small, self._contexts[index] = self._choices.compression.compress(gradient)
        self._gradients.put(index, borrow(small)[0])

    def _wait(self) -> list[torch.Tensor | None]:
        assert self._gradients is not None  # noqa: S101 - as above
        found: list[torch.Tensor | None] = []
        reduced = self._gradients.wait()
        for index, parameter in enumerate(self._parameters):
            if (array := reduced[index]) is None:
                found.append(None)
                continue
            arrived = from_array(array).to(parameter.device)
            context = self._contexts.get(index, parameter.dtype)
            found.append(self._choices.compression.decompress(arrived, context).to(parameter.dtype))
        return found


def _reference(gradient: torch.Tensor | None) -> Callable[[], torch.Tensor | None]:
    return (lambda: None) if gradient is None else weakref.ref(gradient)


keep_uncompiled()
