"""Gradients of Keras on PyTorch: reduced while backward still runs.

Its one rule is that of `coordd.torch`: when ``backward()`` returns, ``.grad`` holds what the optimizer will use, on
every rank.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import keras
import torch
from torch.utils.hooks import RemovableHandle

from coordd import api
from coordd.choices import Choices
from coordd.consistency import Reading, Settings
from coordd.dtypes import dtype_of
from coordd.errors import CoorddError
from coordd.gradients import Gradients, Parameter
from coordd.messages import ReduceOp
from coordd.operations import Operations
from coordd_torch.backward_pass import BackwardPass
from coordd_torch.tensors import borrow, from_array, values_at
from coordd_torch.uncompiled import keep_uncompiled

__all__ = ["TorchReduction"]

log = logging.getLogger("coordd")

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
        self._hooks: list[RemovableHandle] = []
        self._optimizer: Callable[[], Any] = lambda: None
        self._sums: list[Callable[[], torch.Tensor | None]] = []
        """Return what gradients were reduced last, while they live."""
        self._fresh: set[int] = set()
        """Of which parameters the present backward pass has made gradients."""

    def release(self, variables: Sequence[Any]) -> None:
        """Has autograd tell nothing of these variables to an optimizer that had them before."""
        for variable in variables:
            if (hook := getattr(variable.value, _HOOK, None)) is not None:
                hook.remove()
                delattr(variable.value, _HOOK)

    def watch(self, variables: Sequence[Any], optimizer: Any) -> None:
        """Has autograd tell when gradients are there, while there is their optimizer."""
        self._adopt(variables)
        if api.operations().part is None:  # else with the first gradient, as ranks do whose Keras runs on TensorFlow
            self._at_hand(variables)
        self._optimizer = weakref.ref(optimizer)
        for index, parameter in enumerate(self._parameters):
            ready = functools.partial(self._ready, index)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(ready))
            setattr(parameter, _HOOK, self._hooks[-1])
        weakref.finalize(optimizer, self._detach).atexit = False

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _is_replaced(self) -> bool:
        """Whether the model that trains uses another optimizer now, of which autograd tells nothing.

        A script may have kept the one before. Models with several optimizers have them as attributes.
        """
        model, optimizer = _trained_model(), self._optimizer()
        if model is None or optimizer is None:
            return optimizer is None
        used = [model.optimizer, *vars(model).values()]
        used += [each for several in used if isinstance(several, (list, tuple)) for each in several]
        used += [each for several in used if isinstance(several, dict) for each in several.values()]
        return not any(each is optimizer for each in used)

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

        An average that the script has changed since may be averaged again, for it is equal on all ranks. A sum may not,
        and gradients of another function cannot be told from a sum that was changed.
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
            if self._is_replaced():
                self._detach()
                log.warning("a model that had a DistributedOptimizer is trained by another optimizer now")
                return
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


def _trained_model() -> Any:
    """Finds the model in whose ``train_step`` this backward pass runs; None in a loop of the script's own."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to the callers
    while frame is not None:
        if frame.f_code.co_name == "train_step" and isinstance(found := frame.f_locals.get("self"), keras.Model):
            return found
        frame = frame.f_back
    return None


def _reference(gradient: torch.Tensor | None) -> Callable[[], torch.Tensor | None]:
    return (lambda: None) if gradient is None else weakref.ref(gradient)


keep_uncompiled()
