"""Calls that all members of a process set make together, such as those that create an optimizer or a pipeline.

Such a call succeeds on all members or on none. A rank that leaves it by an exception reports that, and every operation
of the call that the other ranks wait for fails within moments; at its end all members compare their parameters.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from coordd import api
from coordd.daemon.operations import Operations, Part
from coordd.errors import brief
from coordd.negotiation.tensor_table import show_site
from coordd.ops.handles import call_site
from coordd.ops.messages import Refused
from coordd.ops.process_sets import ProcessSet, global_process_set, named_ranks
from coordd.parallel.fingerprint import differences
from coordd.parallel.parameter_list import Everybody, Inventory

__all__ = ["CollectiveCall", "collective", "collective_method"]

P = ParamSpec("P")
Owner = TypeVar("Owner")
Result = TypeVar("Result")

_LONGEST = 1000
"""Most characters of an error that are sent to other ranks."""


class CollectiveCall:
    """A block of code that all members of a process set run together, or none of them.

    Enter it first in a function, before looking at the arguments: `collective` enters it before Python binds them to
    parameters. A nested block is part of the outer one; only its `lines`, if it has any, are compared at its own end.

    Attributes:
        lines: facts that must be equal on all members, one per line; compared at the end of the block.
        advice: what to do if they differ, as the end of a sentence.
        prefix: prefix for the names of objects that the call creates, equal on all members and unique to this call.
        agreed: functions without arguments that are called at the end of the block if no member has failed in it.

    Raises:
        NotInitializedError: `init` was not called.
        MismatchError: on all members: they have different ``lines``; it lists the differences.
        RefusedError: another member has left its block by an exception; it names the rank and the reason.
    """

    def __init__(
        self,
        what: str,
        process_set: object = global_process_set,
        *,
        namespace: bool = False,
        steady: bool = False,
        known: Callable[[], bool] | None = None,
    ) -> None:
        """Prepares the block.

        Args:
            what: the function, for errors.
            process_set: the members. Code in the block rejects anything but a process set of this world; until then a
                list of ranks means those of them that exist, and a value that names no ranks means all ranks.
            namespace: whether the call creates something whose operations need a prefix.
            steady: whether the operations inside keep their names, as operations of every step do.
            known: returns, when the block ends with an error, whether all ranks have got one because they were not all
                in this block; it is not reported again, and the call does not count.
        """
        self._steady = steady
        self._known = known
        self._what = what
        self._operations = api.operations()
        ranks = named_ranks(process_set, self._operations.daemon.world.size)
        self._members = _members(self._operations, ranks)
        self.prefix = self._operations.namespace(ranks) if namespace else ""
        self._part: Part | None = None
        self.lines: list[str] = []
        self.agreed: list[Callable[[], object]] = []
        self.advice = "give all ranks the same model, optimizer and arguments"

    def __enter__(self) -> Self:
        if self._members is not None and self._operations.part is None:
            number = self._operations.number_call(self._members)
            self._part = self._operations.part = Part(f"{self._what} #{number}", number, steady=self._steady)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._part is None:
            if self._members is not None and error is None and self.lines:  # a nested block with facts of its own
                self._compare()
            if error is None:
                self._agree()
            return
        try:
            if error is None:
                self._operations.tell_refused_of_part()
                self._compare()
                self._agree()
        except BaseException as found:
            error = found
            raise
        finally:
            self._operations.part = None
            if error is not None:
                self._refuse(error, sys._getframe(1))  # noqa: SLF001 - the documented way to the caller

    def _compare(self) -> None:
        chosen = ProcessSet(self._members) if self._members else global_process_set
        Inventory(
            self._operations, self.lines, caller=self._what, name="agreement", process_set=chosen, tell=self._tell
        ).check()

    def _agree(self) -> None:
        for each in self.agreed:
            each()

    def _tell(self, lists: Everybody) -> str:
        return f"the ranks have given different parameters to {self._what}: {differences(lists)}: {self.advice}"

    def _refuse(self, error: BaseException, frame: FrameType) -> None:
        """Reports the error to the other ranks, unless the job is over anyway."""
        daemon = self._operations.daemon
        if self._part is None or daemon.failing or daemon.status.leaving:
            return
        if self._known is not None and self._known():
            self._operations.withdraw_call(self._members or (), self._part.call)
            return
        text = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else brief(error)
        reason = f"refused {self._what} at {show_site(call_site(frame))}: {text[:_LONGEST]}"
        daemon.refuse(Refused(daemon.world.rank, self._part.call, reason, self._members or ()))


def collective(
    what: str, *, namespace: bool = False, everywhere: bool = False
) -> Callable[[Callable[Concatenate[CollectiveCall, P], Result]], Callable[P, Result]]:
    """Turns a function into a collective call; a decorator.

    The call is entered before Python binds the arguments, so the other ranks are also notified of a wrong keyword or a
    missing argument. The function gets the call as its first argument, which callers neither see nor pass.

    Args:
        what: the function, for errors.
        namespace: whether the call creates something whose operations need a prefix.
        everywhere: whether all ranks make the call, not only the members of its argument ``process_set``.
    """

    def decorate(function: Callable[Concatenate[CollectiveCall, P], Result]) -> Callable[P, Result]:
        place = 0 if everywhere else _place_of_set(function)

        @functools.wraps(function)
        def entered(*args: P.args, **kwargs: P.kwargs) -> Result:
            members = global_process_set if everywhere else _given_set(place, args, kwargs)
            with CollectiveCall(what, members, namespace=namespace) as call:
                return function(call, *args, **kwargs)

        return _without(function, entered, 0)

    return decorate


def _nothing(_: object) -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


def collective_method(
    what: str,
    *,
    namespace: bool = False,
    steady: bool = False,
    around: Callable[[Any], AbstractContextManager[Any]] = _nothing,
) -> Callable[[Callable[Concatenate[Owner, CollectiveCall, P], Result]], Callable[Concatenate[Owner, P], Result]]:
    """Turns a method into a collective call of all ranks, as `collective` does with functions; a decorator.

    Args:
        what: the method, for errors.
        namespace: whether the call creates something whose operations need a prefix.
        steady: whether the operations inside keep their names; see `CollectiveCall`.
        around: takes the object and returns a context that is entered before the call and left after it; it may yield
            the argument ``known`` of `CollectiveCall`.
    """

    def decorate(
        method: Callable[Concatenate[Owner, CollectiveCall, P], Result],
    ) -> Callable[Concatenate[Owner, P], Result]:
        @functools.wraps(method)
        def entered(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> Result:
            with (
                around(self) as known,
                CollectiveCall(what, namespace=namespace, steady=steady, known=known) as call,
            ):
                return method(self, call, *args, **kwargs)

        return _without(method, entered, 1)

    return decorate


def _place_of_set(function: Callable[..., Any]) -> int:
    """Returns the position of the argument ``process_set`` among the callers' arguments, which begin after the call."""
    names = [*inspect.signature(function).parameters]
    return names.index("process_set") - 1


def _given_set(place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """Returns the process set among unbound arguments, even if its keyword is misspelt."""
    if "process_set" in kwargs:
        return kwargs["process_set"]
    if place < len(args):
        return args[place]
    given = (value for value in kwargs.values() if isinstance(value, ProcessSet))
    return next(given, global_process_set)


def _without(function: Callable[..., Any], entered: Callable[P, Result], place: int) -> Callable[P, Result]:
    """Gives a decorated function the signature that callers see: without the call at position ``place``."""
    signature = inspect.signature(function)
    shown = [*signature.parameters.values()]
    hidden = shown.pop(place)
    vars(entered)["__signature__"] = signature.replace(parameters=shown)
    entered.__annotations__ = {key: kind for key, kind in entered.__annotations__.items() if key != hidden.name}
    return entered


def _members(operations: Operations, ranks: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the members as requests carry them; None if this rank makes the call alone, or is not a member."""
    world = operations.daemon.world
    if world.size == 1 or len(ranks) == 1 or (ranks and world.rank not in ranks):
        return None
    return ranks
