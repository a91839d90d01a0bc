"""What ranks tell each other: frozen data, nothing else.

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
"""After so many plans who has nothing to report says so: what older reports may refer to can be forgotten then."""


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
    """How values combine; the numbers are Horovod's, but the last.

    An average is divided by the number of members; that of the present only by those of them that have not joined.
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
        """Whether a sum is divided in the end."""
        return self in _AVERAGES


_AVERAGES = frozenset({ReduceOp.AVERAGE, ReduceOp.AVERAGE_PRESENT})


class Request(msgspec.Struct, frozen=True, array_like=True):
    """This tensor of mine is ready.

    ``members`` is the process set, sorted; empty means the whole world. A transient name is used once only, so it is
    not worth a place in the cache. ``call`` is the collective call that the operation is part of, if there is one.
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

    A filler says: I have nothing for this, but will take part with zeros if another rank has something.
    """

    request: Request
    site: str = ""
    filler: bool = False


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """What one rank has new: known tensors as bits over the cache's slots, the others spelled out.

    ``seen`` is the last plan that the rank had carried out; it dates the bits. ``fillers`` are those of the hits that
    the rank only fills up with zeros. ``unlock`` is the lock that the rank has broken, after ``lasted`` steps.

    A foreman's report says what several ranks have new, as far as they are members: ``ranks`` is their bit mask, empty
    for all for whom the sender speaks. No report of theirs will be older than ``floor``; -1 for ``seen``.
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

    ``slot`` is the place in the cache that the tensor gets, -1 for none. ``sizes`` are the members' first dimensions
    of an allgather. ``recipients`` are the ranks that fail; a response without any is for all members. A void response
    ends an operation that all members would only have filled up. Those who are ``absent`` have joined, and take part
    with nothing. ``refuser`` is the rank that has refused the collective call of which the operation is part.
    ``deadlock`` is the plan that has ended a deadlock by errors, of which this is one; -1 of other responses.
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
    """A send or receive of a rank fails, because its ``peer`` waits, too; ``error`` says for what.

    A send has the ``number`` that it has among all from this rank to its peer; a receive has 0.
    """

    rank: int
    name: str
    peer: int
    number: int
    error: str


class Traffic(msgspec.Struct, frozen=True, array_like=True):
    """The messages of a rank that leaves; those of a pair of ranks are counted from 1.

    How many it has ``sent`` to each receiver, and ``heard`` of from each sender; of these it has ``unclaimed`` ones, by
    sender and number, which it will not receive, and it still ``wants`` some from these ranks.
    """

    sent: tuple[tuple[int, int], ...] = ()
    heard: tuple[tuple[int, int], ...] = ()
    unclaimed: tuple[tuple[int, int], ...] = ()
    wants: tuple[int, ...] = ()


class Left(msgspec.Struct, frozen=True, array_like=True):
    """A rank has left."""

    rank: int
    traffic: Traffic


class Plan(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """What all ranks now do, in this order: the hits by ascending slot, then the responses.

    ``voids`` are the slots of operations that end without a result, because all members would only have filled up.
    ``lock`` are slots by bucket that are negotiated no more; the lock is called by this plan's sequence, which the plan
    that ends it has in ``unlock``. ``unmatched`` are sends and receives that fail, and ``left`` ranks that have
    left, if any rank has asked for them by `Expecting`.
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


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A rank has arrived."""

    version: str
    digest: str
    pid: int
    host: str


class Muster(msgspec.Struct, frozen=True, array_like=True, tag="muster"):
    """All the ranks of a bit mask have arrived; their hellos, ascending by rank."""

    ranks: bytes
    hellos: tuple[Hello, ...]

    def by_rank(self) -> dict[int, Hello]:
        """Says who has said which hello."""
        ranks = int.from_bytes(self.ranks, "little")
        numbers = (rank for rank in range(ranks.bit_length()) if ranks >> rank & 1)
        return dict(zip(numbers, self.hellos, strict=True))


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """All ranks have arrived; or ``refusal`` says why the job cannot start. Process ids and hosts are by rank."""

    pids: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    refusal: str = ""


class Goodbye(msgspec.Struct, frozen=True, array_like=True, tag="goodbye"):
    """A rank will submit nothing more; or some ranks will not, whose bit mask a foreman gives.

    Only of a rank that has sent or received messages there is ``traffic``.
    """

    ranks: bytes = b""
    traffic: Traffic | None = None


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """A rank has refused a collective call, or its part of some operations: what others announce of them fails.

    ``call`` is the call's id, equal on all members, and ``members`` its process set, empty for the whole world. Each
    member that leaves the call by an exception says so once, after all that it has announced as part of the call.
    Without a call, ``names`` are operations and groups: the message stands in place of the rank's announcement of each.
    ``reason`` is a sentence about the rank, without its number. ``seen`` is the last plan that it had carried out.
    """

    rank: int
    call: str
    reason: str
    members: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    seen: int = 0


class Loss(msgspec.Struct, frozen=True, array_like=True, tag="loss"):
    """The connection to a rank below a foreman has closed, perhaps because that process is ``stopped``."""

    rank: int
    stopped: bool = False


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """Who failed, why in one line, and the traceback where there is one."""

    rank: int
    reason: str
    traceback: str = ""

    @classmethod
    def death(cls, rank: int, place: str, *, stopped: bool = False) -> Self:
        """A process is gone, or is ``stopped`` and so does not answer; ``place`` is where it was."""
        if stopped:
            text = f"({place}) does not answer: its process is stopped, by SIGSTOP, SIGTSTP or a debugger"
            return cls(rank, text)
        return cls(rank, f"({place}) died: its connection closed without a goodbye")


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """The job has failed."""

    failure: Failure


class Inquiry(msgspec.Struct, frozen=True, array_like=True, tag="inquiry"):
    """Others wait for you: what are you doing? It is for ``ranks``, or, without any, for who gets it.

    One with a ``number`` is not of the coordinator but of the rank ``asker``, and wants all that there is to tell.
    """

    ranks: tuple[int, ...] = ()
    number: int = 0
    asker: int = 0


class Account(msgspec.Struct, frozen=True, array_like=True, tag="account"):
    """What a rank is doing: its main thread's stack, innermost call last, what it submitted last, and when.

    It is ``idle`` for so many seconds: since it has submitted, sent or received something.
    To an inquiry with a ``number`` it is an ``answer`` instead, in JSON, for the rank ``asker``.
    """

    rank: int
    stack: str = ""
    last: str = ""
    number: int = 0
    asker: int = 0
    answer: bytes = b""
    idle: float = 0.0


class Waiting(msgspec.Struct, frozen=True, array_like=True):
    """An operation that waits, and the ranks it waits for; none if its data is on the way."""

    name: str
    operation: str
    missing: tuple[int, ...] = ()


class Overdue(msgspec.Struct, frozen=True, array_like=True, tag="overdue"):
    """These tensors of mine have waited too long: which ranks are missing, and what do they do?

    ``matched`` are the sends and receives among them, whose peer only this rank knows. ``ranks`` is the bit mask of
    those that ask the same, which a foreman gives.
    """

    seconds: float
    names: tuple[str, ...] = ()
    matched: tuple[Waiting, ...] = ()
    ranks: bytes = b""


class Blocked(msgspec.Struct, frozen=True, array_like=True, tag="blocked"):
    """A rank's script waits for the operation ``name``, and submits nothing more before that is done.

    Without a name it does so no more. ``seen`` is the last plan that the rank had carried out, and ``ranks`` the bit
    mask of those that wait for the same, which a foreman gives.

    The operation is a receive from a ``peer`` of which ``heard`` messages have come so far, or a send to it if that has
    a ``number``, counted from 1. ``sent`` is how many messages the rank has sent, by itself and the receiver, and
    ``unclaimed`` are those that have come, and for which no receive has begun, by itself, the sender and the number.
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
        """What ranks that wait for the same have in common."""
        return Blocked(self.name, peer=self.peer, number=self.number, heard=self.heard)


class Expecting(msgspec.Struct, frozen=True, array_like=True, tag="expecting"):
    """Messages to or from these ranks have been under way for a while: have they left, or once they do, say so."""

    peers: tuple[int, ...]


class StallReport(msgspec.Struct, frozen=True, array_like=True, tag="stall"):
    """Who waits for whom, and what those do; ``silent`` are the ranks that did not answer the inquiry."""

    seconds: float
    waiting: tuple[Waiting, ...]
    accounts: tuple[Account, ...]
    silent: tuple[int, ...] = ()


class Recording(msgspec.Struct, frozen=True, array_like=True, tag="recording"):
    """From now on all ranks record a timeline in a folder, or, without one, do not; ``number`` counts such orders."""

    number: int
    folder: str = ""
    cycles: bool = False


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """What time is it on rank 0? Here it is ``sent``."""

    sent: float


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """The answer to what was asked at ``sent``: on rank 0 it is ``now``."""

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
