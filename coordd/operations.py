"""The operations on NumPy arrays that every framework plugin is built from.

Each is asynchronous and in place; it checks its arguments here, on the caller's line, before anything is announced.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, cast

import numpy as np

from coordd.arguments import check_name, check_rank, check_reducible, check_rows, check_splits, name_of
from coordd.daemon import Daemon
from coordd.errors import ArgumentError, spans
from coordd.handles import Handle, call_site
from coordd.mailbox import Letter
from coordd.messages import Kind, ReduceOp, Request
from coordd.process_sets import ProcessSet, global_process_set
from coordd.table import Entry, Site

__all__ = ["Operations"]

_LOOSE = frozenset({Kind.ALLREDUCE, Kind.BROADCAST})
Land = Callable[[np.ndarray], Any]


class Operations:
    """The operations of one daemon; it numbers those that have no name."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self._joins: Counter[tuple[int, ...]] = Counter()
        self.uneven = False
        """Whether to join before leaving."""
        self.memo: dict[Any, Any] = {}
        """What plugins keep for as long as this daemon runs."""
        self._namespaces = count()
        self._numbers: dict[tuple[Kind, tuple[int, ...], int], Iterator[int]] = {}

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
            prescale: factor applied before, in the array's type.
            postscale: factor applied after.
            process_set: who takes part.
            land: runs on the daemon's thread when the data has arrived; its value becomes the result.

        Raises:
            ArgumentError: the dtype does not allow it; names the dtype and what to do.
        """
        op = ReduceOp(op)
        check_reducible(array.dtype, op, scaled=(prescale, postscale) != (1.0, 1.0))
        request = self.request(
            Kind.ALLREDUCE, name, array, process_set, op=op, prescale=float(prescale), postscale=float(postscale)
        )
        return self.submit(request, array, land=land)

    def broadcast(
        self,
        array: np.ndarray,
        root: int,
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        land: Land | None = None,
    ) -> Handle[Any]:
        """Copies the root's array into everybody's, in place.

        Raises:
            ArgumentError: the root, a global rank, is not a member.
        """
        root = check_rank(root)
        members = process_set.ranks or range(self.daemon.world.size)
        if root not in members:
            text = f"broadcast received invalid root rank {root} for provided process set: members are {tuple(members)}"
            raise ArgumentError(text)
        return self.submit(self.request(Kind.BROADCAST, name, array, process_set, root=root), array, land=land)

    def allgather(
        self,
        array: np.ndarray,
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        land: Callable[..., Any] | None = None,
        sized: bool = False,
    ) -> Handle[Any]:
        """Joins the members' arrays along the first dimension, which may differ, in the order of ranks.

        With ``sized``, ``land`` gets also how many rows each member had, of those that have joined none.

        Raises:
            ArgumentError: the array has no dimension.
        """
        check_rows(array, name, Kind.ALLGATHER)
        entry = self._entry(self.request(Kind.ALLGATHER, name, array, process_set), array)
        entry.land = land
        if sized and land is not None:
            entry.sized = True
            entry.land = lambda found: land(*found)
        self.daemon.submit(entry)
        return cast("Handle[Any]", entry.handle)

    def alltoall(
        self,
        array: np.ndarray,
        splits: Any = None,
        *,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
        land: Callable[[np.ndarray, Any], Any] | None = None,
    ) -> Handle[Any]:
        """Gives each member its rows of the array, and joins the rows that the members have for this rank.

        Args:
            array: any number of rows; they are equally long on all members.
            splits: how many rows each member gets, in the order of ranks; by default the same number each.
            name: the same on all members.
            process_set: who takes part.
            land: runs on the daemon's thread with the rows and how many each member sent; its value is the result.

        Raises:
            ArgumentError: the array has no dimension, or the splits do not fit.
        """
        given = check_rows(array, name, Kind.ALLTOALL)
        rows = check_splits(splits, given, process_set.count(self.daemon.world.size))
        entry = self._entry(self.request(Kind.ALLTOALL, name, array[:0], process_set), array)
        entry.splits, entry.sized = rows, True
        entry.land = _rows_of if land is None else lambda found: land(*found)
        self.daemon.submit(entry)
        return cast("Handle[Any]", entry.handle)

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
        """Reduces an array over the members; each gets its rows of the result, the first ones one more if need be.

        Raises:
            ArgumentError: the array has no dimension, or its dtype does not allow it.
        """
        op = ReduceOp(op)
        check_rows(array, name, Kind.REDUCESCATTER)
        if op is ReduceOp.ADASUM:
            text = "Adasum is of whole tensors: use allreduce, or another operation"
            raise ArgumentError(text)
        check_reducible(array.dtype, op, scaled=(prescale, postscale) != (1.0, 1.0))
        request = self.request(
            Kind.REDUCESCATTER, name, array, process_set, op=op, prescale=float(prescale), postscale=float(postscale)
        )
        return self.submit(request, array, land=land)

    def join(self, *, process_set: ProcessSet = global_process_set) -> Handle[Any]:
        """Takes part with nothing in all that the other members do, until they have joined, too.

        The result is the rank that was the last to join, as an array without a dimension.
        """
        nothing = np.empty(0, np.uint8)
        request = self.request(Kind.JOIN, None, nothing, process_set)
        entry = self._entry(request, nothing)
        entry.patient = True
        entry.land = functools.partial(self._joined, request.members)
        self.daemon.submit(entry)
        return cast("Handle[Any]", entry.handle)

    def joins(self, members: tuple[int, ...]) -> int:
        """Counts how often all members of a set, or of one that contains it, have joined; equal on all of them."""
        return sum(
            times for joined, times in list(self._joins.items()) if not joined or (members and {*members} <= {*joined})
        )

    def _joined(self, members: tuple[int, ...], last: np.ndarray) -> np.ndarray:
        """Notes that all have joined, so that names that count operations are those of all members again."""
        self._joins[members] += 1
        return last

    def barrier(self, *, process_set: ProcessSet = global_process_set) -> Handle[Any]:
        """Completes when all members have come."""
        nothing = np.empty(0, np.uint8)
        return self.submit(self.request(Kind.BARRIER, None, nothing, process_set), nothing)

    def send(self, array: np.ndarray, destination: int, *, name: str) -> Handle[Any]:
        """Sends to the one rank that receives under this name; needs no negotiation.

        Raises:
            ArgumentError: there is no such rank, or the name is unusable.
        """
        letter = self._letter(array, destination, name, outgoing=True)
        self.daemon.post(letter)
        return letter.handle

    def recv(
        self, array: np.ndarray | None, source: int, *, name: str, land: Land | None = None, lazy: bool = False
    ) -> Handle[Any]:
        """Receives what a rank sends under this name, into ``array`` or, if that is None, into a new one.

        With ``lazy`` this may begin as late as when the handle is waited for, but it does not disturb the daemon.

        Raises:
            ArgumentError: there is no such rank, or the name is unusable.
        """
        letter = self._letter(array, source, name, outgoing=False, land=land)
        self.daemon.post(letter, lazy=lazy)
        return letter.handle

    def submit(  # called for every gradient, and keywords cost time
        self,
        request: Request,
        array: np.ndarray,
        land: Land | None = None,
        filler: bool = False,  # noqa: FBT001, FBT002 - as above
        site: Site = None,
    ) -> Handle[Any]:
        """Announces a request that was made before; the fast path of the optimizers.

        Args:
            request: from `request`.
            array: what is reduced or filled, in place.
            land: runs on the daemon's thread when the data has arrived; its value becomes the result.
            filler: take part only if another rank does so in earnest; the array holds zeros, the result may be None.
            site: the line of code to name in errors; by default that which called.
        """
        handle: Handle[Any] = self.daemon.handle(request.name)
        if site is None:
            site = call_site(sys._getframe(1))  # noqa: SLF001 - the documented way to the caller
        self.daemon.submit(Entry(request, array, handle, site, land, filler))
        return handle

    def _entry(self, request: Request, array: np.ndarray) -> Entry:
        """Makes an entry with a new handle, of the line that has called the caller."""
        site = call_site(sys._getframe(2))  # noqa: SLF001 - the documented way to the caller
        return Entry(request, array, self.daemon.handle(request.name), site)

    def namespace(self) -> str:
        """Returns a prefix for the names of one more optimizer: none for the first, then ``opt1.`` and so on."""
        number = next(self._namespaces)
        return f"opt{number}." if number else ""

    def request(
        self, kind: Kind, name: str | None, array: np.ndarray, process_set: ProcessSet, **details: Any
    ) -> Request:
        """Makes a request, once for many submissions.

        Raises:
            ArgumentError: the name, the process set or the type is unusable.
        """
        if not isinstance(process_set, ProcessSet):
            text = f"process_set is a {type(process_set).__name__}, and must be a ProcessSet, as ProcessSet([0, 1])"
            raise ArgumentError(text)
        world = self.daemon.world
        members = process_set.members(rank=world.rank, size=world.size)
        if array.dtype.hasobject or not array.dtype.isnative or array.dtype.kind in "SUMm":
            text = f"{array.dtype!r} cannot travel as bytes: convert to a number type in this machine's byte order"
            raise ArgumentError(text)
        loose = kind in _LOOSE and self.daemon.config.check == "numel"
        return Request(
            kind,
            self._number(kind, members) if name is None else check_name(name),
            name_of(array.dtype),
            (array.size,) if loose else array.shape,
            members=members,
            transient=name is None,
            **details,
        )

    def _number(self, kind: Kind, members: tuple[int, ...]) -> str:
        """Names what has no name; every process set counts for itself, for only its members count along.

        Who has joined does not count what the others do meanwhile, so all begin anew when all have.
        """
        joins = 0 if kind is Kind.JOIN else self.joins(members)
        number = next(self._numbers.setdefault((kind, members, joins), count()))
        which = f"({spans(members)})." if members else ""
        after = f"{joins}." if joins else ""
        return f"{kind.name.lower()}.noname.{which}{after}{number}"

    def _letter(
        self, array: np.ndarray | None, peer: int, name: str, *, outgoing: bool, land: Land | None = None
    ) -> Letter:
        peer, size = check_rank(peer), self.daemon.world.size
        if not 0 <= peer < size:
            text = f"{name!r}: there is no rank {peer} in a world of {size}"
            raise ArgumentError(text)
        handle = self.daemon.handle(check_name(name), peer=peer)
        return Letter(name, peer, array, handle, outgoing=outgoing, land=land)


def _rows_of(found: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """The rows alone, without how many each member had."""
    return found[0]
