"""Refused operations: an operation that this rank refuses to submit is still counted, and reported to the others.

They may have announced their part. If this rank did not count the operation, its next unnamed one would be paired with
that part, and both would get wrong results without an error; and without a report they would wait.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from coordd.errors import ArgumentError
from coordd.ops.arguments import places
from coordd.ops.handles import Handle, raised_by_coordd
from coordd.ops.messages import Kind
from coordd.ops.process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    from coordd.daemon.operations import Operations

__all__ = ["Find", "Name", "SecondOperation", "refusable", "telling"]

Function = TypeVar("Function", bound=Callable[..., Any])
Name = tuple[Kind, Sequence[str | None]]
"""The kind of an operation and its name, or those of a group; None for each without a name."""
Find = Callable[[Mapping[str, Any]], Name]
"""Finds, from the arguments of a call, which operation other ranks that make the same call announce first."""


def refusable(
    kind: Kind | Find,
    find: Callable[[], Operations] | None = None,
    like: Callable[..., Any] | None = None,
    *,
    announces: bool = False,
) -> Callable[[Function], Function]:
    """Decorator: counts and reports the calls that a function refuses; the other members' part of them fails.

    Nothing is reported if the operation was announced before the function failed, or if only this rank can know the
    error: a name that is in flight or unusable. An unusable process set stands for the ranks that it names. Ctrl-C and
    an exception of a signal handler are reported like errors, because the script may catch them and continue.

    Args:
        kind: the operation; of a group where the function has an argument ``tensors``.
        find: returns the `Operations` that number this call; by default the first argument of the function is used.
        like: a function with the arguments ``name`` and ``process_set`` at their places; by default the decorated one.
        announces: whether the function itself announces, and does so once.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(like or function)
        group = isinstance(kind, Kind) and "tensors" in signature.parameters

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:  # every operation passes several of these, so it must be cheap
            operations = args[0] if find is None else find()
            thread = operations.thread
            before = thread.accounted
            if not announces:  # otherwise its caller may have taken the number
                thread.in_doubt = False
            try:
                found = function(*args, **kwargs)
                if announces:
                    operations.account()
            except BaseException as error:
                if thread.accounted == before:
                    with contextlib.suppress(Exception):  # an unusable name counts nothing
                        operations.refuse(*_what(kind, signature, args, kwargs), error)
                raise
            if group and thread.accounted == before:
                _refuse_empty(operations, kind, _given(signature, args, kwargs))
            return found

        return cast("Function", counted)

    return decorate


def _refuse_empty(operations: Operations, kind: Any, given: Mapping[str, Any]) -> None:
    """Counts an empty group, as every group is counted; the group fails on ranks where it is not empty."""
    tensors = given.get("tensors")
    if isinstance(tensors, Sized) and not len(tensors):
        empty = ArgumentError("its list of tensors is empty, and that of other ranks is not")
        operations.refuse(*_named(kind, given), given.get("process_set", global_process_set), empty)


def telling(
    operations: Operations,
    kind: Kind,
    names: Sequence[str | None] | Callable[[], Sequence[str | None]],
    process_set: Any = global_process_set,
) -> AbstractContextManager[None]:
    """Applies `refusable` to a block: if it fails before it announces, the other ranks get an error.

    Args:
        operations: count the operation.
        kind: of the operation that the others announce first.
        names: of that, or of a group; None for each without one. Or a function that returns them, called after an
            error.
        process_set: the members.
    """
    return _Told(operations, lambda: (kind, names() if callable(names) else names, process_set))


class _Told:
    """The context manager of `telling`; no generator, whose frames would hide the user's line."""

    def __init__(self, operations: Operations, what: Callable[[], tuple[Kind, Sequence[str | None], Any]]) -> None:
        self._operations = operations
        self._what = what
        self._before = operations.accounted
        operations.thread.in_doubt = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None and self._operations.accounted == self._before:
            with contextlib.suppress(Exception):  # an unusable name counts nothing
                self._operations.refuse(*self._what(), error)


class SecondOperation:
    """Applies `refusable` to the second of two operations: the block submits both, and waits for the first.

    If that wait is interrupted, the other ranks continue with the second operation, once the first has completed.

    Attributes:
        first: the block sets it to the handle of the first operation.
    """

    def __init__(self, operations: Operations, kind: Kind, second: str, process_set: ProcessSet) -> None:
        """Prepares the block.

        Args:
            operations: count the operations.
            kind: of the second one.
            second: its name; no number, so that ranks that do not come to it count alike.
            process_set: the members.
        """
        self.first: Handle[Any] | None = None
        self._operations = operations
        self._second = kind, second, process_set
        self._before = self._counts()

    def _counts(self) -> tuple[int, int]:
        return self._operations.accounted, self._operations.thread.refused

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None or raised_by_coordd(error):
            return
        accounted, refused = self._before
        if self._counts() == (accounted + 1, refused):
            if self.first is None:
                self._operations.thread.in_doubt = True  # the block has not got the handle
                self._operations.refuse(self._second[0], [self._second[1]], self._second[2], error)
            else:
                self._operations.refusal_after(self.first, *self._second, error)


def _what(
    kind: Kind | Find, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Kind, Sequence[str | None], Any]:
    """Returns the kind, the names and the process set that a call would have announced."""
    given = _given(signature, args, kwargs)
    what = _named(kind, given) if isinstance(kind, Kind) else kind(given)
    return *what, given.get("process_set", global_process_set)


def _given(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the arguments by name, without arguments that the function does not have."""
    known = {key: value for key, value in kwargs.items() if key in signature.parameters}
    try:
        return signature.bind_partial(*args, **known).arguments
    except TypeError:  # too many arguments
        return known


def _named(kind: Kind, given: Mapping[str, Any]) -> Name:
    name = given.get("name")
    if "tensors" not in given:
        return kind, [name]
    tensors = given["tensors"]
    return kind, places(name, max(1, len(tensors)) if isinstance(tensors, Sized) else 1)
