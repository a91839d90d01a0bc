"""Adasum in an optimizer: combines the parameter changes of the ranks' local steps, not their gradients."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any, Self

import numpy as np
import torch

from coordd import api
from coordd.errors import ArgumentError, DiscardedStepError, brief
from coordd.gradients.discard_step import discarded, error_of, given_up, is_discarded, of_step, tell
from coordd.ops.handles import Handle, call_site, hear_of
from coordd.ops.messages import ReduceOp
from coordd.ops.process_sets import ProcessSet
from coordd_torch.compressor import Compressor
from coordd_torch.consistency import Consistency
from coordd_torch.late_parameters import late
from coordd_torch.operations import allreduce_async_
from coordd_torch.pending import Told
from coordd_torch.scaler import forget_scale, forgets_scale

__all__ = ["AdasumStep"]


_STEPS = ("steps", "Adasum")


def _whole(hook: Callable[..., None]) -> Callable[..., None]:
    """Fails the job if a foreign exception, as from a signal handler, ends a hook: the other ranks make the step."""

    @functools.wraps(hook)
    def whole(*args: Any) -> None:
        daemon = api.operations().daemon
        daemon.check_in_step(_STEPS)
        with daemon.unbroken("a step of Adasum", series=_STEPS):
            hook(*args)

    return whole


class AdasumStep:
    """Two hooks around `step`: one saves the parameters, the other reduces their changes with Adasum.

    Thus the optimizer may scale gradients, as Adam does, before changes are compared (Maleki et al., 2020). Each rank
    checks its own gradients only, so under a loss scaler the ranks agree on whether to skip a step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        prefix: str,
        named: Iterable[tuple[str, torch.Tensor]],
        *,
        compressor: Compressor,
        process_set: ProcessSet,
        consistency: Consistency,
    ) -> None:
        """Registers the hooks.

        Args:
            optimizer: the optimizer whose steps are combined.
            prefix: prefix of the names of the operations.
            named: the optimizer's parameters, with their names.
            compressor: compresses the changes.
            process_set: the ranks that take part.
            consistency: compares the parameters of the ranks.
        """
        self._consistency = consistency
        self._answered = False
        self._discarded: DiscardedStepError | None = None
        self._cause: BaseException | None = None  # of the discard, if this rank raises that after it
        self._told = Told()
        self._counted = False
        self._prefix = f"{prefix}adasum."
        self._named = list(named)
        self._compressor = compressor
        self._process_set = process_set
        self._before: list[torch.Tensor] = []
        self._hidden: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._scales = not getattr(optimizer, "_step_supports_amp_scaling", False)
        vars(optimizer)["_step_supports_amp_scaling"] = (
            True  # makes a loss scaler set `found_inf` and call `step` even if gradients are not finite
        )
        optimizer.register_step_pre_hook(forgets_scale(_whole(self._prepare)))
        self._combining: Callable[..., None] = forgets_scale(_whole(self._combine))
        optimizer.register_step_post_hook(self._combining)
        self._depth = 0
        self._inside = False

    def guard(self, optimizer: torch.optim.Optimizer) -> Self:
        """Makes ``step`` undo a step that fails, for which torch has no hook; keeps the method that it has at the call.

        The new one is a method, too, so that a scheduler can wrap it, and like a scheduler's wrapper it keeps the
        optimizer only weakly.
        """
        reference = weakref.ref(optimizer)
        step: Any = optimizer.step
        is_method = getattr(step, "__self__", None) is optimizer  # a scheduler's wrapper is not, and takes no ``self``
        function = step.__func__ if is_method else step

        @functools.wraps(function)
        def guarded(_: Any, *args: Any, **options: Any) -> Any:
            self._depth, self._inside = 0, True
            target: Any = reference()
            try:
                result = function(*(target,) * is_method, *args, **options)
                if self._depth > 0:  # the class has caught an error of its base class's step
                    self._depth = 1
                    self._combining(target, args, options)
            except BaseException:
                self._undo()
                forget_scale(target)
                raise
            finally:
                self._inside = False
            return result

        vars(optimizer)["step"] = MethodType(guarded, weakref.proxy(optimizer))
        return self

    def discard_step(self) -> None:
        """Discards the current step on all ranks; see `Reducer.discard_step`."""
        error = sys.exception()
        answered, self._answered = self._answered, True
        cause, self._cause = self._cause, None  # its traceback keeps what the step has computed
        if is_discarded(error, self._prefix) or (
            self._discarded is not None and not answered and (error is None or of_step(error, own=False, cause=cause))
        ):
            return
        site = call_site(sys._getframe(1))  # noqa: SLF001 - the documented way to the caller
        self._abandon(given_up(site, error))

    def _abandon(self, reason: str) -> None:
        """Takes part in the step so that the other ranks do not wait, and makes all ranks discard it."""
        self._undo()
        self._end_abandoned()
        self._count()
        self._consistency.begin_again()  # a deadlock between ranks may have failed it after the step began
        self._told.tell(lambda: self._ask(np.array([0.0, 1.0])))
        self._told.tell(lambda: self._tell(reason))
        self._counted = False
        for _, parameter in self._named:
            parameter.grad = None

    def _undo(self) -> None:
        """Restores the parameters and gradients after a step that failed halfway, and clears its state.

        At once, because a script may load other parameters before its next step.
        """
        before, self._before = self._before, []
        hidden, self._hidden = self._hidden, []
        self._put_back(before)
        for parameter, gradient in hidden:
            parameter.grad = gradient

    def _put_back(self, before: list[torch.Tensor]) -> None:
        """Restores the parameters from before a local step that was not combined with those of the other ranks."""
        with torch.no_grad():
            for (_, parameter), kept in zip(self._named, before, strict=bool(before)):
                parameter.copy_(kept)

    def _end_abandoned(self) -> None:
        """Waits until the other ranks have discarded the step; restarts operations that a deadlock failed, once.

        Raises:
            MismatchError: the other ranks still wait for this rank, and not for the end of this step.
        """
        again = False
        while (error := self._told.wait()) is not None:
            self._consistency.begin_again()
            self._told.tell_again()
            if again:
                raise error
            again = True
        self._told.forget()

    def _count(self) -> None:
        """Counts this step, once."""
        counted, self._counted = self._counted, True
        if not counted:
            self._consistency.begin()

    def _ask(self, flags: np.ndarray) -> Handle[Any]:
        """Starts the allreduce of this step's two flags: gradients are not finite, the step is discarded."""
        name = f"{self._prefix}flags"
        return api.operations().allreduce(flags, name=name, op=ReduceOp.MAX, process_set=self._process_set)

    def _tell(self, reason: str) -> Handle[Any]:
        return tell(api.operations(), f"{self._prefix}discarded", reason, self._process_set)

    def _prepare(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002 - torch's signature
        """Saves the parameters before the step; hides all gradients if the ranks agree to skip it.

        Without gradients the optimizer's step changes nothing. A class may call the ``step`` of its base class, for
        which torch calls the hooks, too: only the outer calls count.
        """
        self._depth = self._depth + 1 if self._inside else 1
        if self._depth > 1:
            return
        self._end_abandoned()
        try:
            self._consistency.check_alone()
        except ArgumentError as error:
            reason = f"could not begin it: {brief(error)}"
            self._abandon(reason)
            rank = api.operations().daemon.world.rank
            self._discarded, self._cause, self._answered = discarded([(rank, reason)], self._prefix), error, False
            raise
        self._count()
        self._follow(optimizer)
        found = getattr(optimizer, "found_inf", None)
        if self._agree(optimizer, found):
            self._hidden = [(parameter, parameter.grad) for _, parameter in self._named]
            for parameter, _ in self._hidden:
                parameter.grad = None
            return
        self._before = [parameter.detach().clone() for _, parameter in self._named]

    def _follow(self, optimizer: Any) -> None:
        """Adds parameters that were added or unfrozen, and drops removed ones; all ranks do the same."""
        groups = optimizer.param_groups
        if late(groups, {id(parameter) for _, parameter in self._named}, ()):
            trained = {id(parameter) for group in groups for parameter in group["params"]}
            self._named = [(name, parameter) for name, parameter in self._named if id(parameter) in trained]
            known = {id(parameter) for _, parameter in self._named}
            self._named += late(groups, known, (name for name, _ in self._named))

    def _agree(self, optimizer: Any, found: torch.Tensor | None) -> bool:
        """Returns whether any rank's gradients are not finite; unscales gradients if the optimizer does not do so.

        Raises:
            DiscardedStepError: a rank has discarded the step.
            MismatchError: the ranks do not have the same parameters.
        """
        infinite, discard = self._ask(np.array([0.0 if found is None else found.item(), 0.0])).result().tolist()
        self._counted = False
        if discard:
            self._discarded, self._cause, self._answered = error_of(self._tell(""), self._prefix), None, False
            for _, parameter in self._named:
                parameter.grad = None
            raise self._discarded.with_traceback(None)
        self._discarded = None
        self._consistency.hear()
        if found is None:
            return False
        if self._scales:
            scale = optimizer.grad_scale
            for _, parameter in self._named:
                if parameter.grad is not None and scale is not None:
                    parameter.grad.div_(scale)
            optimizer.grad_scale = optimizer.found_inf = None  # this optimizer does not support them
        else:
            optimizer.found_inf = torch.full_like(found, infinite)
        return bool(infinite)

    def _combine(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002 - torch's signature
        """Sets the parameters to the saved ones plus the combined change; puts hidden gradients back."""
        self._depth -= 1
        if self._depth > 0:
            return
        hidden, self._hidden = self._hidden, []
        before, self._before = self._before, []
        for parameter, gradient in hidden:
            parameter.grad = gradient
        changes = []
        for (name, parameter), kept in zip(self._named, before, strict=not hidden):
            small, context = self._compressor.compress(parameter.detach() - kept)
            title = f"{self._prefix}{name}"
            handle = allreduce_async_(small, name=title, op=ReduceOp.ADASUM, process_set=self._process_set)
            handle.add_done_callback(hear_of)  # not waited for if an earlier one fails: do not log its failure
            changes.append((handle, context))
        try:
            found = [self._compressor.decompress(handle.result(), context) for handle, context in changes]
        except BaseException:
            self._put_back(before)
            raise
        with torch.no_grad():
            for (_, parameter), kept, change in zip(self._named, before, found, strict=not hidden):
                parameter.copy_(kept + change)
