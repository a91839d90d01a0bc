"""The ranks of hosts in one process: each with its own board and heap, mapped by the others as on a real host.

Operations are generators, so all ranks run in one thread, and a seed decides in which order they go on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import count
from typing import Any, TypeVar

import numpy as np
import pytest

from coordd.collectives.dispatch import Plane
from coordd.daemon.wakeup import Bell
from coordd.transport.local import LocalWorld
from coordd.transport.shared_memory import ring_buffer
from coordd.transport.shared_memory.board import Board
from coordd.transport.shared_memory.host_memory import Commons
from coordd.transport.shared_memory.notes import Notes, join
from coordd.transport.shared_memory.segments import lasting

__all__ = ["World", "in_random_order", "lacking", "neighbours", "notes", "planes"]

TURNS = 200_000

Key = TypeVar("Key", bound=Hashable)


@contextmanager
def neighbours(ranks: Sequence[int]) -> Iterator[list[Commons]]:
    """The commons of the ranks of one host."""
    bells = [Bell() for _ in ranks]
    boards, cards = zip(*[Board.create(bell.descriptor) for bell in bells], strict=True)
    found = [
        Commons(ranks, rank, [boards[me] if place == me else Board.of(card) for place, card in enumerate(cards)])
        for me, rank in enumerate(ranks)
    ]
    try:
        yield found
    finally:
        for commons, bell in zip(found, bells, strict=True):
            commons.close()
            bell.close()


@contextmanager
def notes(size: int) -> Iterator[list[Notes]]:
    """What the mailboxes of the ranks of one host have in common."""
    lanes = LocalWorld(size)
    with neighbours(range(size)) as found, ThreadPoolExecutor(size) as threads:
        joined = list(threads.map(lambda commons: join(commons.rank, lanes.join(commons.rank).gather, commons), found))
        yield joined
        for each in joined:
            if each is not None:
                each.close()


def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the second rank that makes rings without memory for them."""
    calls = count()

    def fail_once(size: int) -> tuple[np.ndarray, int]:
        if next(calls) == 1:
            raise OSError("no memory")
        return lasting(size)

    monkeypatch.setattr(ring_buffer, "lasting", fail_once)


@contextmanager
def _hosts(names: Sequence[str]) -> Iterator[list[Commons]]:
    """The commons of every rank of a world, given the host of every rank."""
    groups: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        groups.setdefault(name, []).append(rank)
    found: dict[int, Commons] = {}
    with ExitStack() as stack:
        for group in groups.values():
            found.update(zip(group, stack.enter_context(neighbours(group)), strict=True))
        yield [found[rank] for rank in sorted(found)]


class World:
    """All planes of a world."""

    def __init__(self, planes: list[Plane], lanes: LocalWorld) -> None:
        self.planes = planes
        self.lanes = lanes

    def run(
        self, body: Callable[[Plane], Generator[None, None, Any]], *, ranks: Sequence[int] | None = None, seed: int = 0
    ) -> list[Any]:
        """Runs a body on ranks, in a random order of steps; checks that nothing is left behind."""
        chosen = range(len(self.planes)) if ranks is None else ranks
        results = in_random_order({rank: body(self.planes[rank]) for rank in chosen}, seed)
        assert not self.lanes.collective._sent
        assert not self.lanes.collective._wanted
        return [results[rank] for rank in chosen]

    def lent(self) -> list[int]:
        return [_in_use(plane._commons) for plane in self.planes if plane._commons]


@contextmanager
def planes(names: str, *, way: str = "memory", chunk: int = 4096) -> Iterator[World]:
    """Planes on hosts, one letter a rank; the way is through memory, or over the lane for all."""
    lanes = LocalWorld(len(names))
    with _hosts(names) if way == "memory" else nullcontext([None] * len(names)) as commons:
        yield World(
            [
                Plane(lanes.join(rank).collective, mine, rank=rank, hosts=names, chunk=chunk)
                for rank, mine in enumerate(commons)
            ],
            lanes,
        )


def in_random_order(
    running: Mapping[Key, Generator[None, None, Any]],
    seed: int,
    *,
    ended: Callable[[Key], None] = lambda _: None,
) -> dict[Key, Any]:
    """Advances generators in a random order until all have ended; returns what they return."""
    order = random.Random(seed)
    left, results = dict(running), {}
    for _ in range(TURNS):
        if not left:
            return results
        key = order.choice(list(left))
        # Some come in bursts: then one of them is far ahead of the others.
        for _ in range(order.choice([1, 1, 3, 20])):
            try:
                next(left[key])
            except StopIteration as stop:
                results[key] = stop.value
                del left[key]
                ended(key)
                break
    message = f"{sorted(map(str, left))} do not end"
    raise AssertionError(message)


def _in_use(commons: Commons) -> int:
    """How many blocks of this rank are in use: neither free nor spare."""
    return len(commons.heap._placed) - sum(map(len, commons._spare.values()))
