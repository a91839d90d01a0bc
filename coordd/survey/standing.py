"""What one rank tells of itself when it is asked: plain data, written as JSON."""

from __future__ import annotations

import msgspec

__all__ = ["Operation", "Plan", "Question", "Stack", "Standing", "Submission", "Traffic"]


class Question(msgspec.Struct, frozen=True):
    """What are you doing? Or, with ``ranks``: what do those say, whom you can reach?"""

    ranks: tuple[int, ...] = ()


class Operation(msgspec.Struct, frozen=True):
    """What this rank has submitted and not got back.

    ``stage`` is ``queued`` for the daemon, ``held`` in a bucket of the locked plan, ``announced`` to the other ranks,
    ``agreed`` by all of them, so that its data may be on the way, or ``matched`` for a send or receive. ``members`` is
    the process set, empty for the world. ``missing`` are ranks that this one itself knows to be late.
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
    """Where a thread is, innermost call last; without coordd's own calls, of which the outermost is ``inside``."""

    thread: str
    lines: tuple[str, ...]
    inside: str = ""


class Submission(msgspec.Struct, frozen=True):
    """What was submitted last, where, and how many seconds ago."""

    name: str
    site: str
    seconds: float


class Plan(msgspec.Struct, frozen=True):
    """How ranks agree at present.

    ``seen`` is the last plan carried out. ``lock`` is the plan that locked ``tensors`` in ``buckets``, which have come
    ``steps`` times since; 0 if nothing is locked. Of what was announced, ``hits`` were in the cache, ``misses`` not.
    """

    seen: int = 0
    lock: int = 0
    steps: int = 0
    buckets: int = 0
    tensors: int = 0
    hits: int = 0
    misses: int = 0


class Traffic(msgspec.Struct, frozen=True):
    """What this rank has brought to operations that are done: how many, and how many bytes, by kind.

    ``locked`` of them were not negotiated. ``memory`` is what it holds in common with the ranks of its host, in bytes.
    """

    operations: dict[str, int] = {}
    bytes: dict[str, int] = {}
    locked: int = 0
    memory: int = 0


class Standing(msgspec.Struct, frozen=True):
    """What one rank is doing.

    ``phase`` is ``starting``, ``running``, ``failed``, which ``failure`` explains, or ``leaving``. Of its operations,
    oldest first, ``more`` are left out. ``lead`` is how many seconds an allreduce takes as a rule from this rank's part
    to the result. ``hosts`` and ``pids`` are those of all ranks, once they have met.
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
