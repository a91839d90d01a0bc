"""Reduces the gradients of Keras on PyTorch while backward still runs.

As in `coordd.torch`, when ``backward()`` returns, ``.grad`` holds the gradient that the optimizer will use, on every
rank.
"""

from __future__ import annotations

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
from coordd.daemon.operations import Operations, Prefix
from coordd.errors import CoorddError, NotInitializedError, PeerError, ShutdownError, brief
from coordd.gradients.consistency import Reading, Settings
from coordd.gradients.reducer import STEPS, Gradients, Parameter
from coordd.gradients.settings import Choices
from coordd.ops.dtypes import dtype_of
from coordd.ops.messages import ReduceOp
from coordd_torch.backward_pass import BackwardPass
from coordd_torch.tensors import borrow, densify, from_array, values_at
from coordd_torch.uncompiled import keep_uncompiled

__all__ = ["TorchReduction"]

log = logging.getLogger("coordd")

_HOOK = "_coordd_keras_hook"
READING = Reading("PyTorch", lambda variable, places: values_at(variable.value, places))
"""Reads the values of Keras variables."""


class TorchReduction:
    """Puts each gradient into its bucket when autograd has accumulated it; backward ends when all are reduced."""

    def __init__(self, choices: Choices, prefix: str) -> None:
        self._choices = choices
        self._prefix = Prefix(prefix, api.operations().session)
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
        """For each parameter, returns its last reduced gradient while that is alive."""
        self._fresh: set[int] = set()
        """Indices of the parameters that got a gradient in the running backward pass."""

    def release(self, variables: Sequence[Any]) -> None:
        """Removes the autograd hooks that an earlier optimizer registered for these variables."""
        for variable in variables:
            if (hook := getattr(variable.value, _HOOK, None)) is not None:
                hook.remove()
                delattr(variable.value, _HOOK)

    def watch(self, variables: Sequence[Any], optimizer: Any) -> None:
        """Registers autograd hooks on the variables for the lifetime of the optimizer."""
        self._adopt(variables)
        if api.operations().part is None:  # else with the first gradient, as on ranks with TensorFlow
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
        """Returns whether the model in training uses another optimizer now, which has no autograd hooks.

        A script may keep the old optimizer. A model with several optimizers has them as attributes.
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
        assert self._operations is not None  # noqa: S101 - `_at_hand` has set it
        with self._operations.daemon.unbroken("the end of a reduction", series=STEPS):  # other ranks may make the step
            found = self._wait()
        return [found[place] for place in places]

    def _are_sums(self, gradients: Sequence[Any], places: Sequence[int]) -> bool:
        """Returns whether these are the gradients that the last backward pass reduced, not those of another function.

        If the script changed an average, averaging it again is harmless, because it is equal on all ranks. A sum must
        not be reduced again, and a changed sum cannot be distinguished from gradients of another function.
        """
        pairs = zip(gradients, places, strict=True)
        return all(gradient is None or gradient is self._sums[place]() for gradient, place in pairs)

    def _adopt(self, variables: Sequence[Any]) -> None:
        """Takes over the variables and describes their gradients."""
        compress = self._choices.compression.compress
        self._variables = list(variables)
        self._parameters = [variable.value for variable in variables]
        like = [compress(parameter.detach().new_empty(0))[0] for parameter in self._parameters]
        self._described = [
            Parameter(variable.path, parameter.shape, dtype_of(str(small.dtype).removeprefix("torch.")), variable)
            for variable, parameter, small in zip(variables, self._parameters, like, strict=True)
        ]

    def _at_hand(self, variables: Sequence[Any]) -> None:
        """Creates the buckets if the current daemon has none."""
        if not self._parameters:
            self._adopt(variables)
        operations = api.operations()
        if self._gradients is None or self._operations is not operations:
            self._operations, prefix = operations, self._prefix.within(operations)
            self._gradients = Gradients(operations, self._described, self._choices, prefix=prefix, reading=READING)

    def _ready(self, index: int, parameter: torch.Tensor) -> None:
        """Runs when autograd has accumulated a gradient.

        Raises:
            CoorddError: the gradient already contains a reduced sum, which cannot be separated from the new part.
        """
        assert parameter.grad is not None  # noqa: S101 - autograd has just set it
        if not self._begun:
            if self._is_replaced():
                self._detach()
                log.warning("a model that had a DistributedOptimizer is trained by another optimizer now")
                return
            self._at_hand(self._variables)
            self._fresh.clear()
            order = self._prefix.within(api.operations())
            BackwardPass(self._end_of_backward, self._backward_failed, self._interrupted, order=order)
            self._begun = True
            if self._reduced and self._choices.op is ReduceOp.SUM and self._adds(index):
                text = (
                    "another backward pass before the step, whose gradients would be added to sums over all ranks: use "
                    "backward_passes_per_step, or op=Average"
                )
                raise CoorddError(text)
        self._fresh.add(index)
        self._give(index, parameter.grad)

    def _adds(self, index: int) -> bool:
        """Returns whether gradients were not cleared since the reduction; this pass has produced only one so far."""
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
        """Runs when a backward pass failed, before its error reaches the script."""
        self._begun = self._reduced = False
        if self._gradients is None or self._operations is None:
            return
        try:
            self._gradients.abandon("has not completed a backward pass, which has failed")
        except (PeerError, ShutdownError, NotInitializedError):
            log.debug("the other ranks could not be told that a backward pass has failed", exc_info=True)
        except Exception as error:  # noqa: BLE001 - the other ranks must not wait for this rank
            self._operations.daemon.fail(f"could not discard a step: {brief(error)}")

    def _interrupted(self, error: BaseException) -> None:
        """Fails the job if an exception that coordd has not raised interrupts the end of a backward pass.

        Does nothing for an error for which this rank has already discarded the step.
        """
        assert self._gradients is not None  # noqa: S101 - the backward pass has begun
        assert self._operations is not None  # noqa: S101 - as above
        if not (self._gradients.is_abandoned and isinstance(error, Exception)):
            self._operations.daemon.broken_off(error, "the reduction of gradients", series=STEPS)

    def _end_of_backward(self) -> None:
        """Replaces this rank's gradients by the reduced ones.

        A gradient of an earlier pass that this pass did not change is reduced again, because other ranks may have added
        to it.
        """
        for index, parameter in enumerate(self._parameters):
            if index not in self._fresh and parameter.grad is not None:
                self._give(index, parameter.grad)
        self._begun = self._reduced = False
        for parameter, gradient in zip(self._parameters, self._wait(), strict=True):
            if gradient is not None:  # None may belong to a gradient of an earlier pass
                parameter.grad = gradient
        self._reduced = True
        self._sums = [_reference(parameter.grad) for parameter in self._parameters]

    def _put(self, index: int, gradient: torch.Tensor) -> None:
        assert self._gradients is not None  # noqa: S101 - for the type checker
        if gradient.layout is not torch.strided:
            gradient = densify(gradient)
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
    """Returns the model whose ``train_step`` runs this backward pass; None in a custom training loop."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to the callers
    while frame is not None:
        if frame.f_code.co_name == "train_step" and isinstance(found := frame.f_locals.get("self"), keras.Model):
            return found
        frame = frame.f_back
    return None


def _reference(gradient: torch.Tensor | None) -> Callable[[], torch.Tensor | None]:
    return (lambda: None) if gradient is None else weakref.ref(gradient)


keep_uncompiled()
