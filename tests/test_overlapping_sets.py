"""Process sets that have ranks in common, on real planes, while buckets of one set wait behind others of it.

The buckets come from `Member`, as in the daemon, so their numbers and slots are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import pytest

from coordd.collectives.scheduler import Flights
from coordd.negotiation.tensor_table import Entry
from coordd.negotiation.worker import Member
from coordd.ops.messages import Kind, Plan, ReduceOp, Request, Response
from tests.neighbours import World, planes

LARGE, SMALL = 200_000, 3
PAIR = (0, 1)


class Result:
    """A handle that keeps what it gets."""

    submitted = 0.0

    def __init__(self, name: str) -> None:
        self.name = name
        self.value: np.ndarray | None = None

    def land(self, value: np.ndarray, convert: Callable[[Any], Any] | None) -> None:
        assert self.value is None
        self.value = np.array(value)


class Rank:
    """A rank's member and operations in flight; each plan has one bucket."""

    def __init__(self, plane: Any) -> None:
        self.rank = plane.rank
        self.member = Member(self.rank, cache_capacity=0)
        self.flights = Flights(plane, self)
        self.results: dict[str, Result] = {}

    def landed(self, entries: list[Entry]) -> None:
        for entry in entries:
            self.member.table.release(entry)

    def follow_all(self, requests: list[Request], *, first: int = 1) -> None:
        """This rank reduces and sends 2 to the power of its number, times the number of the plan."""
        for number, request in enumerate(requests, first):
            self._follow(number, request, np.full(request.shape, float(number << self.rank)))

    def _follow(self, number: int, request: Request, array: np.ndarray) -> None:
        if not request.members or self.rank in request.members:
            result = self.results[request.name] = Result(request.name)
            self.member.announce([Entry(request, array, result)])
        for bucket in self.member.follow(Plan(number, responses=(Response(request),))).buckets:
            self.flights.start(bucket)

    def finished(self) -> Generator[None, None, None]:
        while self.flights:
            self.flights.advance()
            yield


def started(world: World, requests: list[Request]) -> list[Rank]:
    """Ranks that have followed all plans."""
    ranks = [Rank(plane) for plane in world.planes]
    for rank in ranks:
        rank.follow_all(requests)
    return ranks


def reduction(name: str, size: int, members: tuple[int, ...]) -> Request:
    return Request(Kind.ALLREDUCE, name, "float64", (size,), ReduceOp.SUM, members=members, transient=True)


def broadcasts(first: int, stop: int) -> list[Request]:
    return [
        Request(Kind.BROADCAST, f"world.{number}", "float64", (SMALL,), root=2, transient=True)
        for number in range(first, stop)
    ]


def check(ranks: list[Rank], requests: list[Request], *, first: int = 1) -> None:
    for number, request in enumerate(requests, first):
        members = request.members or range(len(ranks))
        senders = [request.root] if request.kind is Kind.BROADCAST else members
        wanted = sum(number << rank for rank in senders)
        for rank in members:
            value = ranks[rank].results[request.name].value
            assert value is not None, f"{request.name} has not landed on rank {rank}"
            assert set(value.tolist()) == {wanted}, f"{request.name} on rank {rank}"


def test_what_waits_behind_its_own_set_is_not_taken_for_finished():
    """Sums of a pair wait behind four large ones, and the world goes on for more than 64 numbers meanwhile."""
    requests = [
        *broadcasts(1, 2),
        *(reduction(f"large.{number}", LARGE, PAIR) for number in range(2, 6)),
        *(reduction(f"small.{number}", SMALL, PAIR) for number in range(6, 14)),
        *broadcasts(14, 66),
        *(reduction(f"alone.{number}", SMALL, (2,)) for number in range(66, 70)),
        *broadcasts(70, 140),
    ]
    with planes("aaa") as world:
        ranks = started(world, requests)
        world.run(lambda plane: ranks[plane.rank].finished(), seed=3)
        check(ranks, requests)


@pytest.mark.parametrize(("way", "period"), [("memory", 64), ("lane", 1024)])
def test_a_bucket_of_another_set_that_starts_first_on_one_rank_only_is_not_confused(way, period):
    """Rank 0 has the pair's fifth sum in line when it starts one of the world; rank 1 starts them the other way round.

    The periods are those with which slots and tags once came again; MPI promises 32 thousand tags.
    """
    pair = [reduction(f"pair.{number}", SMALL, PAIR) for number in range(1, 6)]
    alone = [reduction(f"alone.{number}", SMALL, (2,)) for number in range(6, 5 + period)]
    requests = [*pair, *alone, reduction("world", SMALL, ())]
    with planes("aaa", way=way) as world:
        for plane in world.planes:
            plane.lane.tags = 1 << 15
        ranks = [Rank(plane) for plane in world.planes]
        for rank in (ranks[0], ranks[2]):
            rank.follow_all(requests)
            rank.flights.advance()
        ranks[1].follow_all(pair)
        for _ in range(3):
            ranks[1].flights.advance()
        ranks[1].follow_all(requests[5:], first=6)
        world.run(lambda plane: ranks[plane.rank].finished())
        check(ranks, requests)


@pytest.mark.parametrize("way", ["memory", "lane"])
def test_a_set_does_not_wait_for_another_however_far_it_is_ahead(way):
    """One rank of a pair does not come; the other one and the third finish 500 operations without it."""
    requests = [*(reduction(f"pair.{number}", SMALL, PAIR) for number in range(1, 9))]
    requests += [reduction(f"others.{number}", SMALL, (1, 2)) for number in range(9, 509)]
    with planes("aaa", way=way) as world:
        ranks = started(world, requests)
        awake = ranks[1:]
        while ranks[2].flights or len(ranks[1].flights) > 8:
            moved = [rank.flights.advance() for rank in awake]
            assert any(moved)
        check(ranks, requests[8:], first=9)
        world.run(lambda plane: ranks[plane.rank].finished())
        check(ranks, requests)


def test_more_sets_with_a_common_rank_than_have_slots_of_their_own_wait_for_each_other_and_end():
    """All pairs and triples of six ranks, in one order on all ranks, again and again."""
    sets = [
        tuple(rank for rank in range(6) if mask >> rank & 1) for mask in range(1 << 6) if mask.bit_count() in {2, 3}
    ]
    requests = [reduction(f"{number}", SMALL, sets[number * 7 % len(sets)]) for number in range(1, 1000)]
    with planes("aaaaaa") as world:
        ranks = started(world, requests)
        world.run(lambda plane: ranks[plane.rank].finished(), seed=1)
        check(ranks, requests)
