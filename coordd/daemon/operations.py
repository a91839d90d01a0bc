"""The operations on NumPy arrays from which every framework plugin is built.

Each is asynchronous and in place; it checks its arguments here, on the caller's line, before anything is announced.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from types import FrameType
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np

from coordd.daemon.blocked_script import Submitter
from coordd.daemon.daemon import Daemon
from coordd.daemon.point_to_point import UNTOLD, Land, Messages
from coordd.daemon.reject_on_all_ranks import refusable
from coordd.daemon.shared_state import series_of
from coordd.errors import (
    ArgumentError,
    brief,
    spans,
)
from coordd.negotiation.group_names import is_unnamed, names_in_group, refused_names
from coordd.negotiation.tensor_table import Entry, Site, show_site
from coordd.ops.arguments import (
    check_name,
    check_op,
    check_rank,
    check_reducible,
    check_rows,
    check_splits,
    check_writable,
    name_of,
)
from coordd.ops.checks import finite
from coordd.ops.handles import Handle, Observer, call_site, exits, raised_by_coordd, users_frame
from coordd.ops.messages import Kind, ReduceOp, Refused, Request
from coordd.ops.process_sets import ProcessSet, check_process_set, global_process_set, named_ranks

__all__ = ["Operations", "Part", "Prefix"]

_LONGEST = 1000
"""Maximum number of characters of an error that other ranks receive."""
_LOOSE = frozenset({Kind.ALLREDUCE, Kind.BROADCAST})


class _Group:
    """Several tensors of one operation; without names they take one number together, regardless of their count."""

    def __init__(self, names: Sequence[str | None], caller: FrameType | None) -> None:
        self.entries: list[Entry] = []
        self.names = [*names]
        self._caller = caller
        self.what: tuple[Kind, ProcessSet] | None = None
        """The kind and the process set of its operations, once one of them has a name or is refused."""
        self._unnamed = 0

    def holds(self, frame: FrameType | None) -> bool:
        """Returns whether a frame's submission belongs to the group, not to a signal handler that interrupts it."""
        return users_frame(frame) is self._caller

    def name(self, number: Callable[[], str]) -> str:
        """Names the next tensor without a name; ``number`` creates a new name for the whole group."""
        if not self._unnamed:
            self.names = names_in_group(number(), self.names)
        self._unnamed += 1
        return self.names[self._unnamed - 1] or ""


class Part:
    """Names the operations of one collective call, so that they match regardless of a rank's other operations.

    Attributes:
        call: the id of the call.
        steady: whether operations with a name keep it, because they come again and again.
        refused: refusals of this rank in the call that are not sent yet: if the error ends the call, the whole call is
            refused; but if the script continues, the other ranks must receive them before its next operation.
    """

    def __init__(self, title: str, call: str, *, steady: bool = False) -> None:
        self._title = title
        self.call = call
        self.steady = steady
        self.refused: list[Refused] = []
        self._numbers: Counter[Kind] = Counter()

    def name(self, kind: Kind, name: str | None) -> str:
        """Names an operation; unnamed ones are numbered in the order of their submission."""
        if name is None:
            name = f"{kind.name.lower()}.{self._numbers[kind]}"
            self._numbers[kind] += 1
        elif self.steady or self.numbers(name):
            return name
        return f"{self._title}: {name}"

    def numbers(self, name: str | None) -> bool:
        """Returns whether an operation has no name, or one that this call has given to an unnamed one before."""
        return name is None or name.startswith(f"{self._title}: ")


class ThreadState(threading.local):
    """The group and call of a thread, if any, and how many operations it has announced or refused.

    Attributes:
        accounted: the number of announced or refused operations; a group counts as one.
        refused: how many of them it has refused.
        in_doubt: whether an operation has a number or is being announced, but is not accounted for. An exception that
            comes then, which only a signal handler can raise, fails the job: to refuse could count the operation twice.
    """

    accounted = 0
    refused = 0
    in_doubt = False
    group: _Group | None = None
    part: Part | None = None

    def __init__(self) -> None:
        self._submitter = Submitter()  # once per thread


class Prefix(NamedTuple):
    """The prefix of an object's operations: unique in later sessions, too, where new objects count from the start.

    Attributes:
        text: unique in the session in which the object was created.
        session: the number of that session in this process.
    """

    text: str
    session: int

    def within(self, operations: Operations) -> str:
        """Returns the prefix in another session; equal on all ranks, because they have begun as many since."""
        ago = operations.session - self.session
        return f"{self.text}{ago}ago." if ago else self.text


class Operations(Messages):
    """The operations of one daemon; numbers unnamed operations."""

    session = 0
    """How many sessions of this process were before this one."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(daemon)
        self._joins: Counter[tuple[int, ...]] = Counter()
        self.uneven: set[ProcessSet] = set()
        """The process sets to join before leaving, together with the world; empty if there is nothing to join."""
        self.raised_in_graph: Exception | None = None
        """The error with which the end of the job reached a graph; the framework wraps it in one of its own."""
        self.memo: dict[Any, Any] = {}
        """Values that plugins keep for as long as this daemon runs."""
        self._namespaces: Counter[tuple[tuple[int, ...], str]] = Counter()
        self._calls: Counter[tuple[tuple[int, ...], str]] = Counter()
        self.thread = ThreadState()
        self._numbers: dict[tuple[Kind, tuple[int, ...], str], Iterator[int]] = {}

    @property
    def as_horovod(self) -> bool:
        """Whether to behave like Horovod where coordd would refuse or do otherwise; equal on all ranks."""
        return self.daemon.config.as_horovod

    @refusable(Kind.ALLREDUCE, announces=True)
    def allreduce(  # noqa: PLR0913 - the choices that the operation has
        self,
        array: np.ndarray,
        *,
        name: str | None = None,
        op: ReduceOp = ReduceOp.AVERAGE,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: ProcessSet = global_process_set,
        land: Land | None = None,
    ) -> Handle[Any]:
        """Reduces an array over the members of a process set, in place.

        Args:
            array: of any shape, layout and size; equal shape and dtype on all members.
            name: the same on all members; unnamed operations match in the order of their submission.
            op: how values combine.
            prescale: factor applied before, in the array's type; in float32 for 16-bit floats, in float64 for integers.
            postscale: factor applied after, likewise.
            process_set: the ranks that take part.
            land: runs on the daemon's thread when the data has arrived; its value becomes the result.

        Raises:
            ArgumentError: the operation does not support the dtype (the error names it and a remedy); or a factor is
                not finite.
        """
        op = check_op(op)
        prescale, postscale = finite(prescale, "prescale_factor"), finite(postscale, "postscale_factor")
        self._check_reducible(array, op, prescale, postscale)
        check_writable(array, Kind.ALLREDUCE)
        request = self._request(Kind.ALLREDUCE, name, array, process_set, op=op, prescale=prescale, postscale=postscale)
        return self.submit(request, array, land=land)

    @refusable(Kind.BROADCAST, announces=True)
    def broadcast(
        self,
        array: np.ndarray,
        root: int,
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        land: Land | None = None,
    ) -> Handle[Any]:
        """Copies the root's array into the arrays of all members, in place.

        Raises:
            ArgumentError: the root, a global rank, is not a member.
        """
        root = check_rank(root)
        check_process_set(process_set, self.daemon.world.size)
        members = process_set.ranks or range(self.daemon.world.size)
        if root not in members:
            text = f"broadcast received invalid root rank {root} for provided process set: members are {tuple(members)}"
            raise ArgumentError(text)
        check_writable(array, Kind.BROADCAST)
        return self.submit(self._request(Kind.BROADCAST, name, array, process_set, root=root), array, land=land)

    @refusable(Kind.ALLGATHER, announces=True)
    def allgather(  # noqa: PLR0913 - the choices that the operation has
        self,
        array: np.ndarray,
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        land: Callable[..., Any] | None = None,
        sized: bool = False,
        op: ReduceOp = ReduceOp.SUM,
    ) -> Handle[Any]:
        """Concatenates the members' arrays along the first dimension, which may differ, in the order of ranks.

        With ``sized``, ``land`` also gets the number of rows of each member, 0 for a joined one. ``op``, the reduction
        that the caller applies to the rows, must be equal on all members.

        Raises:
            ArgumentError: the array has no dimension.
        """
        check_rows(array, name, Kind.ALLGATHER)
        entry = self._entry(self._request(Kind.ALLGATHER, name, array, process_set, op=op), array)
        entry.land = land
        if sized and land is not None:
            entry.sized = True
            entry.land = lambda found: land(*found)
        self._announce(entry)
        return cast("Handle[Any]", entry.handle)

    @refusable(Kind.ALLTOALL, announces=True)
    def alltoall(
        self,
        array: np.ndarray,
        splits: Any = None,
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        land: Callable[[np.ndarray, Any], Any] | None = None,
    ) -> Handle[Any]:
        """Sends each member its rows of the array, and concatenates the rows received from all members.

        Args:
            array: any number of rows; they are equally long on all members.
            splits: number of rows for each member, in the order of ranks; by default the same number for each.
            name: the same on all members.
            process_set: the ranks that take part.
            land: runs on the daemon's thread with the rows and how many each member sent; its value is the result.

        Raises:
            ArgumentError: the array has no dimension, or the splits do not fit.
        """
        given = check_rows(array, name, Kind.ALLTOALL)
        check_process_set(process_set, self.daemon.world.size)
        rows = check_splits(splits, given, process_set.count(self.daemon.world.size))
        entry = self._entry(self._request(Kind.ALLTOALL, name, array[:0], process_set), array)
        entry.splits, entry.sized = rows, True
        entry.land = _rows_of if land is None else lambda found: land(*found)
        self._announce(entry)
        return cast("Handle[Any]", entry.handle)

    @refusable(Kind.REDUCESCATTER, announces=True)
    def reducescatter(  # noqa: PLR0913 - the choices that the operation has
        self,
        array: np.ndarray,
        *,
        name: str | None = None,
        op: ReduceOp = ReduceOp.AVERAGE,
        prescale: float = 1.0,
        postscale: float = 1.0,
        process_set: ProcessSet = global_process_set,
        land: Land | None = None,
    ) -> Handle[Any]:
        """Reduces an array over the members; each gets its rows of the result, the first ones one more if uneven.

        Raises:
            ArgumentError: the array has no dimension, its dtype is not supported, or a factor is not finite.
        """
        op = check_op(op)
        check_rows(array, name, Kind.REDUCESCATTER)
        if op is ReduceOp.ADASUM:
            text = "Adasum is of whole tensors: use allreduce, or another operation"
            raise ArgumentError(text)
        prescale, postscale = finite(prescale, "prescale_factor"), finite(postscale, "postscale_factor")
        self._check_reducible(array, op, prescale, postscale)
        request = self._request(
            Kind.REDUCESCATTER, name, array, process_set, op=op, prescale=prescale, postscale=postscale
        )
        return self.submit(request, array, land=land)

    @refusable(Kind.JOIN, announces=True)
    def join(self, *, process_set: ProcessSet = global_process_set) -> Handle[Any]:
        """Joins: this rank contributes nothing to the other members' operations, until they have joined, too.

        The result is the rank that was the last to join, as an array without a dimension.
        """
        nothing = np.empty(0, np.uint8)
        request = self.request(Kind.JOIN, None, nothing, process_set)
        entry = self._entry(request, nothing)
        entry.patient = True
        entry.land = functools.partial(self._joined, request.members)
        self._announce(entry)
        return cast("Handle[Any]", entry.handle)

    def joins(self, members: tuple[int, ...]) -> int:
        """Counts how often all members of a set, or of one that contains it, have joined; equal on all of them."""
        return sum(
            times for joined, times in list(self._joins.items()) if not joined or (members and {*members} <= {*joined})
        )

    def era(self, members: tuple[int, ...], *, joins: bool = True) -> str:
        """Returns the prefix of the names that number a process set's operations; different prefixes match nothing.

        The count restarts, with another prefix, when all have joined, and when the script has been informed that
        operations failed in a deadlock: the ranks have then counted differently.
        """
        joined = self.joins(members) if joins else 0
        deadlock = self.daemon.last_deadlock(members)
        return (f"{joined}." if joined else "") + (f"after{deadlock}." if deadlock >= 0 else "")

    def _joined(self, members: tuple[int, ...], last: np.ndarray) -> np.ndarray:
        """Records that all have joined, so that numbered names agree on all members again."""
        self._joins[members] += 1
        return last

    @refusable(Kind.BARRIER, announces=True)
    def barrier(self, *, process_set: ProcessSet = global_process_set) -> Handle[Any]:
        """Completes when all members have announced it; no data moves."""
        nothing = np.empty(0, np.uint8)
        return self.submit(self._request(Kind.BARRIER, None, nothing, process_set), nothing)

    def submit(  # called for every gradient, and keywords cost time
        self,
        request: Request,
        array: np.ndarray,
        land: Land | None = None,
        filler: bool = False,  # noqa: FBT001, FBT002 - as above
        site: Site = None,
    ) -> Handle[Any]:
        """Submits a request that was created before; the fast path of the optimizers.

        Args:
            request: from `request`.
            array: the array to reduce or fill, in place.
            land: runs on the daemon's thread when the data has arrived; its value becomes the result.
            filler: take part only if another rank has data; the array holds zeros, the result may be None.
            site: the line of code to name in errors; by default the caller's.
        """
        handle: Handle[Any] = self.daemon.handle(request.name)
        if site is None:
            site = call_site(sys._getframe(1))  # noqa: SLF001 - the documented way to the caller
        entry = Entry(request, array, handle, site, land, filler)
        if self.thread.group is None:
            self.thread.in_doubt = True
            self.daemon.submit(entry)
        else:
            self._announce(entry)
        return handle

    @contextmanager
    def together(self, names: Sequence[str | None]) -> Iterator[None]:
        """Groups the operations that this thread submits in the block, and announces them together at its end.

        If one of them is refused, none is announced, so that no part of a group stays in flight on this rank alone; and
        the refusal covers all of them on the other ranks.

        Args:
            names: of the operations; all of them have one, or none. Unnamed ones take one number together, so that
                later numbers are equal on ranks whose groups differ in size; their names differ.

        Raises:
            DuplicateNameError: the name of one of them is in flight.
        """
        before = self.thread.group
        group = _Group(names, users_frame(inspect.currentframe()))
        try:
            self.thread.group = group
            yield
            self.thread.in_doubt = True  # the last line: what is interrupted before is refused
        except BaseException as error:
            self.thread.group = before
            if group.what is not None:
                kind, process_set = group.what
                self.refuse(kind, group.names, process_set, error)
            raise
        finally:
            self.thread.group = before
        self.daemon.submit_all(group.entries)
        if group.names:
            self.account()

    def _announce(self, entry: Entry) -> None:
        if (group := self._group) is None:
            self.thread.in_doubt = True
            self.daemon.submit(entry)
        else:
            group.entries.append(entry)

    def _entry(self, request: Request, array: np.ndarray) -> Entry:
        """Creates an entry with a new handle; its site is the line that called the caller."""
        site = call_site(sys._getframe(2))  # noqa: SLF001 - the documented way to the caller
        return Entry(request, array, self.daemon.handle(request.name), site)

    def namespace(self, members: tuple[int, ...] = (), *, anew: bool = True) -> str:
        """Returns a prefix for the names of one more optimizer: none for the first, then ``opt1.`` and so on.

        Each process set has its own count, so that ranks that are not members need not count. After a deadlock the
        count restarts, because one rank may have begun to create an optimizer that the others have not.

        Args:
            members: of the process set; none for the whole world.
            anew: whether the count restarts after a deadlock.
        """
        era = self.era(members, joins=False) if anew else ""
        number = self._namespaces[members, era]
        self._namespaces[members, era] += 1
        which = f"({spans(members)})." if members else ""
        return f"{which}{era}opt{number}." if number or members or era else ""

    def number_call(self, members: tuple[int, ...]) -> str:
        """Returns the id of one more call that the members of a process set make together; equal on all of them."""
        self._calls[members, self.era(members)] += 1
        return self._call(members)

    def withdraw_call(self, members: tuple[int, ...], call: str) -> None:
        """Gives the last id back, because the other members may not have begun the same call."""
        if call == self._call(members):
            self._calls[members, self.era(members)] -= 1

    def _call(self, members: tuple[int, ...]) -> str:
        era = self.era(members)
        which = f"({spans(members)})" if members else ""
        return f"{era}{self._calls[members, era]}{which}"

    @property
    def _group(self) -> _Group | None:
        """The group that this thread builds, if the calling code is part of it."""
        group = self.thread.group
        return group if group is not None and group.holds(inspect.currentframe()) else None

    @property
    def part(self) -> Part | None:
        """The collective call that this thread is in, or None."""
        return self.thread.part

    @part.setter
    def part(self, part: Part | None) -> None:
        self.thread.part = part

    def _request(
        self, kind: Kind, name: str | None, array: np.ndarray, process_set: ProcessSet, **details: Any
    ) -> Request:
        """Creates a request like `request`, as part of the group and the call that this thread is in."""
        part, group = self.thread.part, self.thread.group and self._group
        if part is None and (name is not None or group is None):
            return self.request(kind, name, array, process_set, **details)
        if part is not None:
            self.tell_refused_of_part()
        once = True
        if group is not None:
            group.what = kind, process_set
        if name is None and group is not None:
            members = self._members(process_set)
            name = group.name(lambda: self._number(kind, members) if part is None else part.name(kind, None))
            self.thread.in_doubt = False  # the group remembers its names
        elif part is not None:
            once = part.numbers(name) or not part.steady
            self.thread.in_doubt = True
            name = part.name(kind, name)
        found = self.request(kind, name, array, process_set, **details)
        return msgspec.structs.replace(found, call=part.call if part is not None else "", transient=once)

    def request_in_call(
        self, kind: Kind, name: str, array: np.ndarray, process_set: ProcessSet, **details: Any
    ) -> Request:
        """Creates a request like `request`, as part of the collective call that this thread is in, if any."""
        return self._request(kind, name, array, process_set, **details)

    def _check_reducible(self, array: np.ndarray, op: ReduceOp, prescale: float, postscale: float) -> None:
        scaled = (prescale, postscale) != (1.0, 1.0)
        check_reducible(array.dtype, op, scaled=scaled, truncate=self.daemon.config.as_horovod)

    def request(
        self, kind: Kind, name: str | None, array: np.ndarray, process_set: ProcessSet, **details: Any
    ) -> Request:
        """Creates a request, which can be submitted many times.

        Raises:
            ArgumentError: the name, the process set or the type is unusable.
        """
        members = self._members(process_set)
        if array.dtype.hasobject or not array.dtype.isnative or array.dtype.kind in "SUMm":
            text = f"{array.dtype!r} cannot travel as bytes: convert to a number type in this machine's byte order"
            raise ArgumentError(text)
        loose = kind in _LOOSE and self.daemon.config.check == "numel"
        dtype = name_of(array.dtype)  # before a number is taken, which a refusal takes, too
        return Request(
            kind,
            self._number(kind, members) if name is None else _checked(name),
            dtype,
            (array.size,) if loose else array.shape,
            members=members,
            transient=name is None or is_unnamed(name),
            **details,
        )

    def _members(self, process_set: ProcessSet) -> tuple[int, ...]:
        """Returns the members as requests carry them."""
        if process_set is global_process_set:  # the common case; another set of all ranks gives the same below
            return ()
        world = self.daemon.world
        check_process_set(process_set, world.size)
        return process_set.members(rank=world.rank, size=world.size)

    @property
    def accounted(self) -> int:
        """How many operations this thread has announced or refused; a group counts as one."""
        return self.thread.accounted

    def account(self) -> None:
        """Counts an announced operation; operations of a group are counted with the group."""
        if self.thread.group is None or self._group is None:
            self.thread.accounted += 1
            self.thread.in_doubt = False

    def _concerned(self, process_set: Any) -> tuple[int, ...] | None:
        """Returns the members of a process set that may be unusable; None if this rank is not one of them."""
        world = self.daemon.world
        try:
            return self._members(process_set)
        except ArgumentError:
            ranks = named_ranks(process_set, world.size)
            return ranks if not ranks or world.rank in ranks else None

    def refusal_after(
        self, first: Handle[Any], kind: Kind, name: str, process_set: ProcessSet, error: BaseException
    ) -> None:
        """Fails the other members' part of an operation once another one has completed, unless that fails.

        After ``sys.exit(0)`` it does not: this rank joins or leaves, and the job fails only if the script continues.

        Args:
            first: the other operation; if it fails, it does so on all members, which do not continue then.
            kind: of the operation that this rank does not submit.
            name: its name, which is no number.
            process_set: the members.
            error: the reason.
        """
        part = self.thread.part
        if part is None and exits(error):
            what = "the wait for the first of two operations"
            self.daemon.broken_off(error, what, series=series_of(first.name), all_submitted=True)
            return
        known = name if part is None else part.name(kind, name)
        refused = self._refused(kind, (known,), self._members(process_set), error)
        if part is not None and not part.steady:  # sent if the script goes on, else the call as a whole is refused
            part.refused += refused
            return

        def refuse(done: Handle[Any]) -> None:
            if done.error() is None:
                self._tell(refused)

        first.add_done_callback(Observer(refuse))

    def refuse(self, kind: Kind, names: Sequence[str | None], process_set: Any, error: BaseException) -> None:
        """Counts operations that this rank has refused, and fails the other members' part of them.

        Fails the job if an exception that coordd has not raised leaves it unknown whether they are announced, and after
        ``sys.exit(0)``, which the others need not hear of, if the script continues; see `Daemon.broken_off`.

        Args:
            kind: of the operations.
            names: of one, or of a group; None for each if they have none.
            process_set: the members; an unusable value stands for the ranks that it names, or for all.
            error: the reason.

        Raises:
            ArgumentError: a name is unusable.
        """
        if self._is_unclear(kind, names, process_set, error):
            return
        members, group, part = self._concerned(process_set), self._group, self.thread.part
        if members is None or not names:
            return
        if group is not None:
            group.what = kind, process_set
            return
        self.thread.refused += 1
        self.thread.accounted += 1
        if None in names:
            known = names_in_group(self._number(kind, members) if part is None else part.name(kind, None), names)
        else:
            known = [*names] if part is None else [part.name(kind, name) for name in names]
        refused = self._refused(kind, tuple(_checked(name or "") for name in known), members, error)
        if part is None:
            self._tell(refused)
        elif part.numbers(names[0]) or not part.steady:  # a steady name recurs: its refusal would hit the next call
            part.refused += refused

    def _is_unclear(self, kind: Kind, names: Sequence[str | None], process_set: Any, error: BaseException) -> bool:
        """Returns whether operations cannot be refused: perhaps they are announced, or the process exits.

        Then it fails the job, or notes the exit. In a collective call an exit is refused like an error.
        """
        what = "the submission of an operation"
        if self.thread.part is not None:
            unclear = self.thread.in_doubt and not raised_by_coordd(error)
            if unclear:
                self.daemon.fail(f"was interrupted by {brief(error)} during {what}: ranks are out of step then")
            return unclear
        if not (self.thread.in_doubt or exits(error)):
            return False
        unnamed = self._numbering(kind, self._concerned(process_set) or ())
        joins = not self.thread.in_doubt  # nothing is submitted, so the operations complete if this rank joins
        series = [series_of(name or unnamed) for name in names]
        noted = [self.daemon.broken_off(error, what, series=each, all_submitted=joins) for each in series]
        return any(noted)

    def tell_refused_of_part(self) -> None:
        """Sends the pending refusals of the call that this thread is in, and continues."""
        if (part := self.thread.part) is not None and part.refused:
            told, part.refused = part.refused, []
            self._tell(told)

    def _tell(self, refused: Sequence[Refused]) -> None:
        for each in refused:
            self.daemon.refuse(each)

    def _refused(
        self, kind: Kind, names: tuple[str, ...], members: tuple[int, ...], error: BaseException
    ) -> list[Refused]:
        """Builds the refusals to send; empty if none is needed."""
        daemon, said = self.daemon, refused_names(names)
        if isinstance(error, UNTOLD) or len(members or range(daemon.world.size)) == 1:
            return []
        if daemon.failing or daemon.status.leaving or any(map(daemon.in_flight, (*names, *said))):
            return []
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        site = show_site(call_site(sys._getframe(1)))  # noqa: SLF001 - the documented way to the caller
        reason = f"refused {kind.name.lower()} {names[0]!r}{more} at {site}: {brief(error)[:_LONGEST]}"
        return [Refused(daemon.world.rank, "", reason, members, said)]

    def _number(self, kind: Kind, members: tuple[int, ...]) -> str:
        """Names an unnamed operation; each process set has its own count, because only its members count along.

        A joined rank does not count the operations of the others meanwhile, so all start over when all have joined.
        Joins are counted when all have joined: joins that fail in a deadlock have not been submitted by all.
        """
        self.thread.in_doubt = True
        if kind is Kind.JOIN:
            era, number = "", self._joins[members]
        else:
            era = self.era(members)
            number = next(self._numbers.setdefault((kind, members, era), count()))
        return f"{self._numbering(kind, members)}{era}{number}"

    @staticmethod
    def _numbering(kind: Kind, members: tuple[int, ...]) -> str:
        """Returns what begins the names of the unnamed operations of a kind and a process set; see `series_of`."""
        which = f"({spans(members)})." if members else ""
        return f"{kind.name.lower()}.noname.{which}"

    def number(self, kind: Kind, process_set: ProcessSet) -> str:
        """Takes the name that the next unnamed operation would get; for an operation that consists of several."""
        members, part = self._members(process_set), self.thread.part
        return self._number(kind, members) if part is None else part.name(kind, None)


def _checked(name: Any) -> str:
    """Returns a usable name; a number may be longer than a user's name, for it lists the ranks of its process set.

    Raises:
        ArgumentError: it is unusable.
    """
    return name if isinstance(name, str) and is_unnamed(name) else check_name(name)


def _rows_of(found: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Returns the rows alone, without the number of each member's rows."""
    return found[0]
