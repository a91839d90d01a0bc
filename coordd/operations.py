"""The operations on NumPy arrays that every framework plugin is built from.

Each is asynchronous and in place; it checks its arguments here, on the caller's line, before anything is announced.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from itertools import count
from operator import index
from typing import Any

import numpy as np

from coordd.daemon import Daemon
from coordd.errors import ArgumentError, spans
from coordd.handles import Handle, call_site
from coordd.mailbox import Letter
from coordd.messages import Kind, ReduceOp, Request
from coordd.process_sets import ProcessSet, global_process_set
from coordd.table import Entry, Site

__all__ = ["Operations"]

_LONGEST_NAME = 1024
Land = Callable[[np.ndarray], Any]


class Operations:
    """The operations of one daemon; it numbers those that have no name."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self._namespaces = count()
        self._numbers: dict[tuple[Kind, tuple[int, ...]], Iterator[int]] = {}

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
        root = _rank(root)
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
        land: Land | None = None,
    ) -> Handle[Any]:
        """Joins the members' arrays along the first dimension, which may differ, in the order of ranks.

        Raises:
            ArgumentError: the array has no dimension.
        """
        if not array.ndim:
            text = (
                f"tried to ALLGATHER a rank-zero tensor ({name or 'unnamed'}): give it a first dimension, as in x[None]"
            )
            raise ArgumentError(text)
        return self.submit(self.request(Kind.ALLGATHER, name, array, process_set), array, land=land)

    def barrier(self, *, process_set: ProcessSet = global_process_set) -> Handle[Any]:
        """Completes when all members have come."""
        nothing = np.empty(0, np.uint8)
        return self.submit(self.request(Kind.BARRIER, None, nothing, process_set), nothing)

    def send(self, array: np.ndarray, destination: int, *, name: str) -> Handle[Any]:
        """Sends to the one rank that receives under this name; needs no negotiation.

        Raises:
            ArgumentError: there is no such rank, or the name is unusable.
        """
        return self._post(array, destination, name, outgoing=True)

    def recv(self, array: np.ndarray | None, source: int, *, name: str, land: Land | None = None) -> Handle[Any]:
        """Receives what a rank sends under this name, into ``array`` or, if that is None, into a new one.

        Raises:
            ArgumentError: there is no such rank, or the name is unusable.
        """
        return self._post(array, source, name, outgoing=False, land=land)

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
        world = self.daemon.world
        members = process_set.members(rank=world.rank, size=world.size)
        if array.dtype.hasobject or not array.dtype.isnative:
            text = f"{array.dtype!r} cannot travel as bytes: convert to a number type in this machine's byte order"
            raise ArgumentError(text)
        return Request(
            kind,
            self._number(kind, members) if name is None else _checked(name),
            _name_of(array.dtype),
            array.shape,
            members=members,
            transient=name is None,
            **details,
        )

    def _number(self, kind: Kind, members: tuple[int, ...]) -> str:
        """Names what has no name; every process set counts for itself, for only its members count along."""
        number = next(self._numbers.setdefault((kind, members), count()))
        which = f"({spans(members)})." if members else ""
        return f"{kind.name.lower()}.noname.{which}{number}"

    def _post(
        self, array: np.ndarray | None, peer: int, name: str, *, outgoing: bool, land: Land | None = None
    ) -> Handle[Any]:
        peer, size = _rank(peer), self.daemon.world.size
        if not 0 <= peer < size:
            text = f"{name!r}: there is no rank {peer} in a world of {size}"
            raise ArgumentError(text)
        handle = self.daemon.handle(_checked(name))
        self.daemon.post(Letter(name, peer, array, handle, outgoing=outgoing, land=land))
        return handle


def check_reducible(dtype: np.dtype[Any], op: ReduceOp, *, scaled: bool) -> None:
    """Refuses reductions that would be wrong or have no meaning.

    Raises:
        ArgumentError: naming the dtype, the operation and what to use instead.
    """
    why = ""
    name = _name_of(dtype)
    inexact = dtype.kind in "fc" or name == "bfloat16"
    if name.startswith("float8"):
        why = "eight-bit floats cannot be added up: reduce in bfloat16 and convert"
    elif dtype.kind not in "?biufc" and name != "bfloat16":
        why = "use a numeric type"
    elif dtype.kind == "b" and op in {ReduceOp.SUM, ReduceOp.AVERAGE}:
        why = "use Max for 'any', Min for 'all', or convert to integers to count"
    elif op is ReduceOp.AVERAGE and not inexact:
        why = "an average of integers would be truncated: use Sum, or convert to a float"
    elif scaled and not inexact:
        why = "prescale and postscale factors would be truncated: convert to a float"
    elif dtype.kind == "c" and op in {ReduceOp.MIN, ReduceOp.MAX}:
        why = "complex numbers have no order"
    if why:
        text = f"Tensor type {name} is not supported for {op.name.lower()}: {why}"
        raise ArgumentError(text)


@functools.cache
def _name_of(dtype: np.dtype[Any]) -> str:
    """The name of a type, which NumPy composes anew each time."""
    return dtype.name


def _checked(name: str) -> str:
    """Makes sure that every rank can be told the name."""
    if not isinstance(name, str):
        text = f"a name is a string, not {name!r}"
        raise ArgumentError(text)
    try:
        length = len(name.encode())
    except UnicodeEncodeError as error:
        text = f"the name {name[:40]!r} cannot be written in UTF-8"
        raise ArgumentError(text) from error
    if not 1 <= length <= _LONGEST_NAME:
        text = f"a name has 1 to {_LONGEST_NAME} bytes; this one has {length}: {name[:40]!r}"
        raise ArgumentError(text)
    return str(name)


def _rank(number: int) -> int:
    """Takes any integer, such as NumPy's, as Python's own, which is what messages carry."""
    return int(index(number))
