"""The control messages: frozen data, nothing else.

The protocol is functions on these values; the daemon and the simulator use the same ones.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Self

import msgspec

from coordd.errors import ArgumentError

__all__ = [
    "SILENT_PLANS",
    "Abort",
    "Account",
    "Announcement",
    "Blocked",
    "Expecting",
    "Failure",
    "Flushed",
    "Goodbye",
    "Hello",
    "Inquiry",
    "Kind",
    "Loss",
    "Message",
    "Muster",
    "Overdue",
    "Ping",
    "Plan",
    "Pong",
    "Recording",
    "ReduceOp",
    "Refused",
    "Report",
    "Request",
    "Response",
    "StallReport",
    "Waiting",
    "Welcome",
]

SILENT_PLANS = 256
"""An idle rank sends an empty report after this many plans, so that the coordinator can free old cache slots."""


class Kind(IntEnum):
    """The negotiated operations."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    BARRIER = 3
    ALLTOALL = 4
    REDUCESCATTER = 5
    JOIN = 6


class ReduceOp(IntEnum):
    """How values combine; the numbers are Horovod's, except the last.

    `AVERAGE` divides by the number of members; `AVERAGE_PRESENT` only by the number of members that have not joined.
    """

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5
    AVERAGE_PRESENT = 6

    @classmethod
    def _missing_(cls, value: object) -> None:
        text = f"op is {value!r}, and must be Average, Sum, Adasum, Min, Max, Product or AveragePresent"
        raise ArgumentError(text)

    @property
    def averages(self) -> bool:
        """Whether the sum is divided in the end."""
        return self in _AVERAGES


_AVERAGES = frozenset({ReduceOp.AVERAGE, ReduceOp.AVERAGE_PRESENT})


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that is ready on one rank.

    ``members`` is the process set, sorted; empty means the whole world. A ``transient`` name is used once only, so it
    is not worth a cache slot. ``call`` is the collective call that the operation is part of, if there is one.
    """

    kind: Kind
    name: str
    dtype: str = "uint8"
    shape: tuple[int, ...] = ()
    op: ReduceOp = ReduceOp.SUM
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    members: tuple[int, ...] = ()
    transient: bool = False
    call: str = ""


class Announcement(msgspec.Struct, frozen=True, array_like=True):
    """A request that the coordinator does not know yet, and the line of code that made it.

    A ``filler`` has no data of its own, but takes part with zeros if another rank has data.
    """

    request: Request
    site: str = ""
    filler: bool = False


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """The new tensors of one rank: cached ones as bits over the cache's slots, the others spelled out.

    ``seen`` is the last plan that the rank had carried out; it dates the bits. ``fillers`` are the hits for which the
    rank contributes only zeros. ``unlock`` is the lock that the rank has broken, after ``lasted`` steps.

    A report of an aggregator (foreman) covers several ranks, as far as they are members: ``ranks`` is their bit mask,
    empty for all ranks below the sender. No later report of theirs will be older than ``floor``; -1 stands for
    ``seen``.
    """

    seen: int
    hits: bytes = b""
    fillers: bytes = b""
    fresh: tuple[Announcement, ...] = ()
    unlock: int = 0
    lasted: int = 0
    ranks: bytes = b""
    floor: int = -1


class Response(msgspec.Struct, frozen=True, array_like=True):
    """One entry of a plan: carry out ``request``, or fail it with ``error``.

    ``slot`` is the cache slot that the tensor gets, -1 for none. ``sizes`` are the members' first dimensions of an
    allgather. ``recipients`` are the ranks that fail; a response without any is for all members. A ``void`` response
    ends an operation for which all members have only fillers. The ``absent`` ranks have joined, and contribute nothing.
    ``refuser`` is the rank that has refused the collective call of the operation. ``deadlock`` is the plan that ended a
    deadlock by errors including this one; -1 in other responses.
    """

    request: Request
    slot: int = -1
    sizes: tuple[int, ...] = ()
    error: str = ""
    attribute: str = ""
    recipients: tuple[int, ...] = ()
    left: tuple[int, ...] = ()
    void: bool = False
    absent: tuple[int, ...] = ()
    refuser: int = -1
    deadlock: int = -1


class Unmatched(msgspec.Struct, frozen=True, array_like=True):
    """A send or receive that fails because its ``peer`` waits, too; ``error`` names the operation that it waits for.

    ``number`` counts a send among all from this rank to its peer; it is 0 for a receive.
    """

    rank: int
    name: str
    peer: int
    number: int
    error: str


class Traffic(msgspec.Struct, frozen=True, array_like=True):
    """The message counts of a rank that leaves; the messages of a pair of ranks are counted from 1.

    ``sent`` is the count by receiver, ``heard`` the count of received headers by sender. ``unclaimed`` are those of
    them that it will not receive, by sender and number. ``wants`` are the ranks from which it still waits for messages.
    """

    sent: tuple[tuple[int, int], ...] = ()
    heard: tuple[tuple[int, int], ...] = ()
    unclaimed: tuple[tuple[int, int], ...] = ()
    wants: tuple[int, ...] = ()


class Left(msgspec.Struct, frozen=True, array_like=True):
    """A rank that has left."""

    rank: int
    traffic: Traffic


class Plan(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """What all ranks now do, in this order: the hits by ascending slot, then the responses.

    ``voids`` are the slots of operations that end without a result, because all members have only fillers. ``lock`` are
    the slots, by bucket, that are no longer negotiated; the lock's number is this plan's sequence, and the plan that
    ends it has that number in ``unlock``. ``unmatched`` are sends and receives that fail, and ``left`` are ranks that
    have left, if any rank has asked for them by `Expecting`. With ``flush`` every rank acknowledges the plan by
    `Flushed`.
    """

    sequence: int
    hits: bytes = b""
    voids: bytes = b""
    responses: tuple[Response, ...] = ()
    fusion_bytes: int = 0
    stop: bool = False
    lock: tuple[tuple[int, ...], ...] = ()
    unlock: int = 0
    unmatched: tuple[Unmatched, ...] = ()
    left: tuple[Left, ...] = ()
    flush: bool = False


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A rank has started."""

    version: str
    digest: str
    pid: int
    host: str


class Muster(msgspec.Struct, frozen=True, array_like=True, tag="muster"):
    """All ranks of a bit mask have started; their hellos, ascending by rank."""

    ranks: bytes
    hellos: tuple[Hello, ...]

    def by_rank(self) -> dict[int, Hello]:
        """Returns the hellos by rank."""
        ranks = int.from_bytes(self.ranks, "little")
        numbers = (rank for rank in range(ranks.bit_length()) if ranks >> rank & 1)
        return dict(zip(numbers, self.hellos, strict=True))


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """All ranks have started; or ``refusal`` is why the job cannot start. Process ids and hosts are by rank."""

    pids: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    refusal: str = ""


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag="goodbye"):
    """A rank submits nothing more; from an aggregator (foreman), ``ranks`` is the bit mask of several such ranks.

    Only a rank that has sent or received messages has ``traffic``.
    """

    ranks: bytes = b""
    traffic: Traffic | None = None


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """A rank has refused a collective call, or its part of some operations: the other ranks' part of them fails.

    ``call`` is the call's id, equal on all members, and ``members`` its process set, empty for the whole world. Each
    member that leaves the call by an exception sends this once, after everything that it has announced as part of the
    call. Without a call, ``names`` are operations and groups: the message stands in place of the rank's announcement of
    each. ``reason`` is a sentence about the rank, without its number.
    """

    rank: int
    call: str
    reason: str
    members: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


class Flushed(msgspec.Struct, frozen=True, array_like=True, tag="flushed"):
    """A rank has announced all that it submitted before it carried out a plan.

    If the plan gave the rank the error of a deadlock, also all that its script submitted before it got that error.
    """

    rank: int
    plan: int


class Loss(msgspec.Struct, frozen=True, array_like=True, tag="loss"):
    """The connection to a rank below an aggregator has closed, perhaps because its process is ``stopped``."""

    rank: int
    stopped: bool = False


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """The failed rank, the reason in one line, and the traceback where there is one."""

    rank: int
    reason: str
    traceback: str = ""

    @classmethod
    def death(cls, rank: int, place: str, *, stopped: bool = False) -> Self:
        """A process is gone, or is ``stopped`` and so does not answer; ``place`` is where it ran."""
        if stopped:
            text = f"({place}) does not answer: its process is stopped, by SIGSTOP, SIGTSTP or a debugger"
            return cls(rank, text)
        return cls(rank, f"({place}) died: its connection closed without a goodbye")


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """The job has failed."""

    failure: Failure


class Inquiry(msgspec.Struct, frozen=True, array_like=True, tag="inquiry"):
    """Asks ranks for which others wait what they are doing; without ``ranks``, it is for the rank that receives it.

    With a ``number`` it comes not from the coordinator but from the rank ``asker``, for its status query.
    """

    ranks: tuple[int, ...] = ()
    number: int = 0
    asker: int = 0


class Account(msgspec.Struct, frozen=True, array_like=True, tag="account"):
    """What a rank is doing: its main thread's stack, innermost call last, its last submission, and when.

    ``idle`` is the number of seconds since it last submitted, sent or received something. In reply to an inquiry with a
    ``number``, it carries an ``answer`` instead, in JSON, for the rank ``asker``.
    """

    rank: int
    stack: str = ""
    last: str = ""
    number: int = 0
    asker: int = 0
    answer: bytes = b""
    idle: float = 0.0


class Waiting(msgspec.Struct, frozen=True, array_like=True):
    """An operation that waits, and the ranks that it waits for; none if its data is in flight."""

    name: str
    operation: str
    missing: tuple[int, ...] = ()


class Overdue(msgspec.Struct, frozen=True, array_like=True, tag="overdue"):
    """Tensors of a rank that have waited too long; asks which ranks are missing, and what they are doing.

    ``matched`` are the sends and receives among them, whose peer only this rank knows. ``ranks`` is the bit mask of the
    ranks that ask the same, set by an aggregator (foreman).
    """

    seconds: float
    names: tuple[str, ...] = ()
    matched: tuple[Waiting, ...] = ()
    ranks: bytes = b""


class Blocked(msgspec.Struct, frozen=True, array_like=True, tag="blocked"):
    """A rank's script waits for the operation ``name``, and submits nothing more before that is done.

    Without a name it no longer waits. ``seen`` is the last plan that the rank had carried out, and ``ranks`` the bit
    mask of the ranks that wait for the same operation, set by an aggregator (foreman).

    The operation is a receive from a ``peer`` with ``heard`` messages arrived from it so far, or a send to it if that
    has a ``number``, counted from 1. ``sent`` is how many messages the rank has sent, by itself and the receiver, and
    ``unclaimed`` are the messages that have arrived and for which no receive has begun, by itself, the sender and the
    number.
    """

    name: str = ""
    seen: int = 0
    ranks: bytes = b""
    peer: int = -1
    number: int = 0
    heard: int = 0
    sent: tuple[tuple[int, int, int], ...] = ()
    unclaimed: tuple[tuple[int, int, int], ...] = ()

    @property
    def wait(self) -> Blocked:
        """The part of the message that is equal on all ranks that wait for the same operation."""
        return Blocked(self.name, peer=self.peer, number=self.number, heard=self.heard)


class Expecting(msgspec.Struct, frozen=True, array_like=True, tag="expecting"):
    """Messages to or from these ranks have been in flight for a while; asks for a notice when they have left."""

    peers: tuple[int, ...]


class StallReport(msgspec.Struct, frozen=True, array_like=True, tag="stall"):
    """Which ranks wait for which, and what the missing ranks are doing; ``silent`` ranks did not answer the inquiry."""

    seconds: float
    waiting: tuple[Waiting, ...]
    accounts: tuple[Account, ...]
    silent: tuple[int, ...] = ()


class Recording(msgspec.Struct, frozen=True, array_like=True, tag="recording"):
    """Starts a timeline in a folder on all ranks, or, without one, ends it; ``number`` counts such orders."""

    number: int
    folder: str = ""
    cycles: bool = False


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Asks for the time on rank 0; ``sent`` is the time on the sender."""

    sent: float


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """The answer to the ping of ``sent``: the time on rank 0 is ``now``."""

    sent: float
    now: float


Message = (
    Report
    | Plan
    | Hello
    | Muster
    | Welcome
    | Goodbye
    | Refused
    | Flushed
    | Loss
    | Abort
    | Overdue
    | Blocked
    | Expecting
    | Inquiry
    | Account
    | StallReport
    | Recording
    | Ping
    | Pong
)
