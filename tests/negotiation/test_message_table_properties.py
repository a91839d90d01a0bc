"""What must hold whatever the ranks announce: the order of arrival and the cache change nothing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from coordd.negotiation.message_table import Negotiator
from coordd.ops.handles import Handle
from coordd.ops.messages import Announcement, Plan, Report, Request
from tests.star import Star, allreduce, outcome

SIZE = 4
SETS: dict[str, tuple[int, ...]] = {"a": (), "b": (), "c": (), "d": (), "e": (0, 1), "f": (1, 2, 3), "g": (2,)}


def members(name: str) -> tuple[int, ...]:
    return SETS[name] or tuple(range(SIZE))


def tensor(name: str, length: int = 2) -> Request:
    return allreduce(name, length, members=SETS[name])


# What a rank does with a name in one step: nothing, its usual tensor, another shape, or a filler.
deeds = st.sampled_from(["skip", "usual", "usual", "usual", "other", "filler"])
steps = st.fixed_dictionaries({(name, rank): deeds for name in SETS for rank in members(name)})
arrivals = st.lists(st.integers(0, SIZE - 1), max_size=20)
orders = st.tuples(*[st.permutations(sorted(SETS)) for _ in range(SIZE)])


def announced(step: dict, order: tuple) -> list[list[tuple[str, str]]]:
    """By rank, the names and deeds in its own order."""
    return [
        [(name, step[name, rank]) for name in order[rank] if step.get((name, rank), "skip") != "skip"]
        for rank in range(SIZE)
    ]


def reports(negotiator: Negotiator, said: list[tuple[str, str]], cuts: set[int]) -> list[Report]:
    """What a rank that has seen everything reports: known tensors as bits, in several reports."""
    cache, seen, found = negotiator._cache, negotiator._sequence, []
    hits = fillers = 0
    fresh: list[Announcement] = []
    for number, (name, deed) in enumerate(said):
        request = tensor(name, 3 if deed == "other" else 2)
        if (slot := cache.slot(request)) >= 0:
            hits |= 1 << slot
            fillers |= (deed == "filler") << slot
        else:
            fresh.append(Announcement(request, "train.py:1", deed == "filler"))
        if number in cuts or number == len(said) - 1:
            found.append(Report(seen, hits.to_bytes(2, "little"), fillers.to_bytes(2, "little"), tuple(fresh)))
            hits, fillers, fresh = 0, 0, []
    return found


def plan_after(warm: dict, said: list[list[tuple[str, str]]], cuts: list[set[int]], turns: list[int]) -> Plan | None:
    """The plan after all reports have arrived in this order of ranks; each rank's own order is kept."""
    negotiator = Negotiator(SIZE, cache_capacity=4, fusion_bytes=64)
    for rank in range(SIZE):
        known = [name for name in sorted(SETS) if warm[name] and rank in members(name)]
        negotiator.hear(rank, Report(0, fresh=tuple(Announcement(tensor(name), "train.py:1") for name in known)))
    negotiator.decide()
    queues = [reports(negotiator, said[rank], cuts[rank]) for rank in range(SIZE)]
    rest = [rank for rank in range(SIZE) for _ in queues[rank]]
    for rank in turns + rest:
        if queues[rank]:
            negotiator.hear(rank, queues[rank].pop(0))
    return negotiator.decide()


@settings(deadline=None, max_examples=300)
@given(
    st.fixed_dictionaries(dict.fromkeys(SETS, st.booleans())),
    steps,
    orders,
    st.lists(st.sets(st.integers(0, 6)), min_size=SIZE, max_size=SIZE),
    arrivals,
    arrivals,
)
def test_the_order_in_which_reports_arrive_changes_nothing(  # noqa: PLR0917 - what hypothesis draws
    warm, step, order, cuts, turns, other_turns
):
    said = announced(step, order)
    assert plan_after(warm, said, cuts, turns) == plan_after(warm, said, cuts, other_turns)


def live(script: list[tuple[dict, tuple]], capacity: int, lags: list[int]) -> list[str]:
    """How everything ends, by step, name and rank; a rank with a lag hears of plans only every so many steps."""
    star = Star(SIZE, cache=capacity, fusion=16)
    handles: dict[tuple[int, str, int], Handle[object]] = {}
    busy: dict[tuple[str, int], Handle[object]] = {}
    for number, (step, order) in enumerate(script):
        for rank, said in enumerate(announced(step, order)):
            for name, deed in said:
                if (name, rank) in busy and not busy[name, rank].poll():
                    continue
                request = tensor(name, 3 if deed == "other" else 2)
                handle = star.submit(rank, request, line=number % 2, filler=deed == "filler")
                handles[number, name, rank] = busy[name, rank] = handle
            star.report(rank)
            star.hear(rank)
        star.turn()
        for rank in range(SIZE):
            if number % (lags[rank] + 1) == 0:
                star.follow(rank)
                star.land(rank)
    star.each(star.follow)
    star.each(star.land)
    assert len({tuple(member._cache._requests) for member in star.members}) == 1
    return [f"{key} {outcome(handle)}" for key, handle in handles.items()]


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(steps, orders), min_size=1, max_size=6),
    st.integers(1, 8),
    st.lists(st.integers(0, 2), min_size=SIZE, max_size=SIZE),
)
def test_the_cache_changes_nothing_but_the_messages(script, capacity, lags):
    assert live(script, capacity, lags) == live(script, 0, lags)
