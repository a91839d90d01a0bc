"""The status of one rank, as it answers a query: plain data, encoded as JSON."""

from __future__ import annotations

import msgspec

__all__ = ["Operation", "Plan", "Question", "Stack", "Standing", "Submission", "Traffic"]


class Question(msgspec.Struct, frozen=True):
    """A status query: for the rank's own status or, with ``ranks``, for the statuses of other ranks."""

    ranks: tuple[int, ...] = ()


class Operation(msgspec.Struct, frozen=True):
    """An operation that this rank has submitted and that has not completed.

    ``stage`` is ``queued`` for the daemon, ``held`` in a bucket of the locked plan, ``announced`` to the other ranks,
    ``agreed`` by all of them, so that its data may be in flight, or ``matched`` for a send or receive. ``members`` is
    the process set, empty for the world. ``missing`` are the ranks that this rank itself knows to be late.
    """

    kind: str
    name: str
    seconds: float
    site: str = ""
    stage: str = "announced"
    members: tuple[int, ...] = ()
    missing: tuple[int, ...] = ()
    bytes: int = 0


class Stack(msgspec.Struct, frozen=True):
    """The stack of a thread, innermost call last, without coordd's own calls; ``inside`` is the outermost of them."""

    thread: str
    lines: tuple[str, ...]
    inside: str = ""


class Submission(msgspec.Struct, frozen=True):
    """The last submission: its name, the line of code that submitted it, and how many seconds ago."""

    name: str
    site: str
    seconds: float


class Plan(msgspec.Struct, frozen=True):
    """The state of negotiation.

    ``seen`` is the last plan that was applied. ``lock`` is the plan that locked ``tensors`` in ``buckets``, which have
    been repeated ``steps`` times since; 0 if no plan is locked. ``hits`` counts the announced tensors that were in the
    response cache, ``misses`` the others.
    """

    seen: int = 0
    lock: int = 0
    steps: int = 0
    buckets: int = 0
    tensors: int = 0
    hits: int = 0
    misses: int = 0


class Traffic(msgspec.Struct, frozen=True):
    """The number of completed operations, and this rank's bytes in them, by kind.

    ``locked`` of the operations were not negotiated. ``memory`` is the shared memory of the host's ranks in bytes.
    """

    operations: dict[str, int] = {}
    bytes: dict[str, int] = {}
    locked: int = 0
    memory: int = 0


class Standing(msgspec.Struct, frozen=True):
    """The status of one rank.

    ``phase`` is ``starting``, ``running``, ``failed`` (explained by ``failure``) or ``leaving``. ``operations`` are
    sorted oldest first, and ``more`` of them are left out. ``lead`` is the average time in seconds from this rank's
    part of an allreduce to the result. ``hosts`` and ``pids`` cover all ranks, once they are connected.
    """

    version: str
    rank: int
    size: int
    host: str
    pid: int
    seconds: float
    phase: str = "starting"
    failure: str = ""
    last: Submission | None = None
    operations: tuple[Operation, ...] = ()
    more: int = 0
    stacks: tuple[Stack, ...] = ()
    plan: Plan = Plan()
    traffic: Traffic = Traffic()
    lead: float = 0.0
    hosts: tuple[str, ...] = ()
    pids: tuple[int, ...] = ()
