"""Whatever way the data takes: hosts in one process, each with its common memory, and a lane between them."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordd.collectives.dispatch import Plane, Spot
from coordd.collectives.ring import Group
from coordd.negotiation.bucket import Bucket, Locked
from coordd.negotiation.coordinator_lock import MOST_LINES
from coordd.negotiation.sequence_numbers import Numbering
from coordd.ops.messages import Kind, ReduceOp, Request
from coordd.transport.local import LocalWorld
from coordd.transport.shared_memory.board import SLOTS
from tests.neighbours import planes
from tests.transport.arithmetic import COMBINE, expected, same_bits, values

Steps = Generator[None, None, Any]

FLOAT = np.dtype(np.float32)
worlds = st.one_of(
    st.integers(1, 4).map(lambda count: "a" * count),
    st.text("ab", min_size=2, max_size=5),
    st.text("abc", min_size=3, max_size=6),
)
ways = st.sampled_from(["memory", "lane"])
seeds = st.integers(0, 1 << 32)
sizes = st.one_of(st.integers(0, 12), st.integers(0, 3000), st.integers(8000, 40_000))


def spot(stamp: int) -> Spot:
    return Spot(3, stamp, 5 * Group.tags_per_operation)


def on_levels(names: Sequence[str], inputs: dict[int, np.ndarray], request: Request) -> np.ndarray:
    """Sums on each host in the order of its ranks, averaged there, then over hosts; rounded to 16 bits at the end."""
    groups: dict[str, list[np.ndarray]] = {}
    for rank in sorted(inputs):
        groups.setdefault(names[rank], []).append(inputs[rank])
    if len(groups) == 1:
        return expected([*inputs.values()], request.op, request.prescale, request.postscale)
    op = ReduceOp.SUM if request.op is ReduceOp.AVERAGE else request.op
    dtype = next(iter(inputs.values())).dtype
    wide = np.dtype(np.float32) if dtype == np.float16 else dtype
    parts = []
    for group in groups.values():
        part = expected([expected([array], op, request.prescale).astype(wide) for array in group], op)
        if request.op is ReduceOp.AVERAGE:
            part = part / wide.type(len(inputs))
        parts.append(part)
    return expected(parts, op, 1.0, request.postscale).astype(dtype)


@settings(deadline=None, max_examples=120)
@given(
    names=worlds,
    dtype=st.sampled_from(["float32", "float64", "float16"]),
    op=st.sampled_from(list(COMBINE)),
    lengths=st.lists(sizes, min_size=1, max_size=4),
    scales=st.sampled_from([(1.0, 1.0), (0.5, 2.0)]),
    agreed=st.booleans(),
    chosen=st.integers(1, 63),
    resident=st.booleans(),
    seed=seeds,
)
@example(
    names="aaab",
    dtype="float32",
    op=ReduceOp.AVERAGE,
    lengths=[30_000, 5],
    scales=(1.0, 1.0),
    agreed=False,
    chosen=63,
    resident=True,
    seed=1,
)
def test_a_reduction_on_levels_is_the_sum_of_the_hosts_sums(
    *, names, dtype, op, lengths, scales, agreed, chosen, resident, seed
):
    """Bitwise, for any ranks on any hosts, however uneven; and on all members alike."""
    ranks = [rank for rank in range(len(names)) if chosen >> rank & 1] or list(range(len(names)))
    members = () if len(ranks) == len(names) or not agreed else tuple(ranks)
    ranks = ranks if members else list(range(len(names)))
    request = Request(Kind.ALLREDUCE, "x", dtype, op=op, prescale=scales[0], postscale=scales[1], members=members)
    given_ = {rank: [values(np.dtype(dtype), n, seed + 9 * rank + i) for i, n in enumerate(lengths)] for rank in ranks}
    with planes(names) as host, np.errstate(all="ignore"):
        arrays = {rank: [array.copy() for array in mine] for rank, mine in given_.items()}
        kept = [0] * len(names)
        if resident:
            for rank, mine in arrays.items():
                place = host.planes[rank]._commons.heap.allocate(mine[0].nbytes + 1)[:-1].view(dtype)
                place[...] = mine[0]
                mine[0] = place
                kept[rank] = 1
        moved = host.run(
            lambda plane: plane.reduce(spot(1), request, arrays[plane.rank], agreed=agreed), ranks=ranks, seed=seed
        )
        wanted = [
            on_levels(names, {rank: mine[i] for rank, mine in given_.items()}, request) for i in range(len(lengths))
        ]
        assert all(moved)
        for mine in arrays.values():
            assert all(same_bits(array, other) for array, other in zip(mine, wanted, strict=True))
        assert host.lent() == kept


@settings(deadline=None, max_examples=100)
@given(names=worlds, way=ways, size=sizes, data=st.data(), prescale=st.sampled_from([1.0, 0.5]), seed=seeds)
@example(names="aab", way="memory", size=9000, data=None, prescale=0.5, seed=1)
@example(names="ab", way="memory", size=3, data=None, prescale=1.0, seed=2)
@example(names="aa", way="lane", size=3, data=None, prescale=1.0, seed=3)
def test_ranks_agree_on_words_wherever_they_are(*, names, way, size, data, prescale, seed):
    """One that will not is enough: nothing moves, inputs stay bit for bit; the next occurrence is none the worse."""
    everyone = range(len(names))
    refusing = data.draw(st.sets(st.sampled_from(everyone))) if data else {0}
    request = Request(Kind.ALLREDUCE, "x", "float32", op=ReduceOp.AVERAGE, prescale=prescale)
    given_ = [values(FLOAT, size, seed + rank) for rank in everyone]
    arrays = [array.copy() for array in given_]

    def body(plane: Plane) -> Steps:
        if plane.rank in refusing:
            yield from plane.refuse(spot(1))
            first = False
        else:
            first = yield from plane.reduce(spot(1), request, [arrays[plane.rank]], agreed=False)
        if not refusing:
            return first, True
        assert same_bits(arrays[plane.rank], given_[plane.rank])
        return first, (yield from plane.reduce(spot(2), request, [arrays[plane.rank]], agreed=False))

    with planes(names, way=way) as host:
        assert host.run(body, seed=seed) == [(not refusing, True)] * len(names)
        assert not any(host.lent())
    wanted = on_levels(names if way == "memory" else "x" * len(names), dict(enumerate(given_)), request)
    assert all(same_bits(array, wanted) for array in arrays)


@settings(deadline=None, max_examples=80)
@given(names=worlds, way=ways, size=sizes, chosen=st.integers(1, 63), root=st.integers(0, 5), seed=seeds)
def test_a_broadcast_copies_the_roots_array(*, names, way, size, chosen, root, seed):
    members = tuple(rank for rank in range(len(names)) if chosen >> rank & 1) or tuple(range(len(names)))
    root %= len(members)
    arrays = {rank: values(FLOAT, size, seed + rank) for rank in members}
    wanted = arrays[members[root]].copy()
    with planes(names, way=way) as host:
        host.run(lambda plane: plane.broadcast(spot(1), members, arrays[plane.rank], root), ranks=members, seed=seed)
        assert not any(host.lent())
    assert all(same_bits(array, wanted) for array in arrays.values())


@settings(deadline=None, max_examples=80)
@given(names=worlds, way=ways, lengths=st.lists(sizes, min_size=6, max_size=6), chosen=st.integers(1, 63), seed=seeds)
def test_an_allgather_joins_blocks_of_any_size(names, way, lengths, chosen, seed):
    members = tuple(rank for rank in range(len(names)) if chosen >> rank & 1) or tuple(range(len(names)))
    given_ = {rank: values(FLOAT, lengths[rank], seed + rank) for rank in members}
    blocks = {
        me: [array.copy() if rank == me else np.zeros_like(array) for rank, array in given_.items()] for me in members
    }
    with planes(names, way=way) as host:
        host.run(lambda plane: plane.allgather(spot(1), members, blocks[plane.rank]), ranks=members, seed=seed)
        assert not any(host.lent())
    for mine in blocks.values():
        assert all(same_bits(block, wanted) for block, wanted in zip(mine, given_.values(), strict=True))


@settings(deadline=None, max_examples=40)
@given(names=worlds, seed=seeds, count=st.integers(1, 12))
def test_operations_of_any_kind_follow_each_other_in_the_same_places(names, seed, count):
    """Two at a time, in the tags that their numbers give them, and in so few slots that they are used again."""
    source = random.Random(seed)
    everyone = tuple(range(len(names)))
    plans = []
    for number in range(1, count + 1):
        members = tuple(sorted(source.sample(everyone, source.randint(1, len(everyone)))))
        bucket = Bucket(number, Request(Kind.BARRIER, "x"), (), (), slot=number)
        place = Spot.of_bucket(bucket)._replace(slot=number % 3)
        plans.append((source.choice(["reduce", "broadcast", "allgather"]), members, place, source.randint(0, 9000)))
    found = {}

    def one(plane: Plane, number: int) -> Steps:
        kind, members, place, size = plans[number]
        array = np.full(size, 1 << plane.rank, np.int64)
        if kind == "reduce":
            request = Request(Kind.ALLREDUCE, "x", "int64", members=members)
            yield from plane.reduce(place, request, [array])
        elif kind == "broadcast":
            yield from plane.broadcast(place, members, array, len(members) - 1)
        else:
            blocks = [array if rank == plane.rank else np.zeros(size, np.int64) for rank in members]
            yield from plane.allgather(place, members, blocks)
            array = sum(blocks)
        found[number, plane.rank] = np.unique(array).tolist()

    def body(plane: Plane) -> Steps:
        waiting = [one(plane, number) for number, plan in enumerate(plans) if plane.rank in plan[1]]
        active: list[Steps] = []
        while waiting or active:
            active += [waiting.pop(0) for _ in range(min(2 - len(active), len(waiting)))]
            active = [steps for steps in active if next(steps, active) is not active]
            yield

    with planes(names) as host:
        host.run(body, seed=seed)
        assert not any(host.lent())
    for (number, _), values_ in found.items():
        kind, members, _, size = plans[number]
        wanted = 1 << members[-1] if kind == "broadcast" else sum(1 << rank for rank in members)
        assert values_ == ([wanted] if size else [])


@pytest.mark.parametrize(
    ("names", "way", "heralded"), [("aa", "memory", True), ("ab", "memory", False), ("aa", "lane", False)]
)
def test_only_one_host_through_memory_rings_for_everything(names, way, heralded):
    with planes(names, way=way) as host:
        assert [plane.heralded for plane in host.planes] == [heralded] * 2
        for plane in host.planes:
            plane.fall_asleep(data=True)
            plane.wake_up()


def test_those_who_have_not_come_are_known_on_their_host():
    request = Request(Kind.ALLREDUCE, "x", "float32")
    with planes("aaab") as host:
        first, second, third, far = host.planes
        assert first.missing(spot(1)) == (1, 2)
        steps = [plane.reduce(spot(1), request, [np.ones(3, np.float32)], agreed=False) for plane in (first, third)]
        for one in steps:
            next(one)
        assert [plane.missing(spot(1)) for plane in (first, second)] == [(1,), ()]
        assert far.missing(spot(1)) == ()
    with planes("ab", way="lane") as host:
        assert host.planes[0].missing(spot(1)) == ()


def test_a_rank_that_waits_for_the_end_of_the_previous_operation_is_not_missing_itself():
    request = Request(Kind.ALLREDUCE, "x", "float32")
    with planes("aa") as host:
        first, second = host.planes
        slow, fast = (plane.reduce(spot(1), request, [np.ones(3, np.float32)], agreed=False) for plane in host.planes)
        next(slow)
        assert next(fast, "finished") == "finished"
        following = second.reduce(spot(2), request, [np.ones(3, np.float32)], agreed=False)
        next(following)
        assert second.missing(spot(2)) == (0,)
        assert next(slow, "finished") == "finished"
        next(following)
        assert first.missing(spot(2)) == ()


def test_after_a_failure_lent_memory_is_never_lent_again():
    """Others may still write to it: an operation that is thrown away keeps what it has borrowed."""
    with planes("aa") as host:
        plane = host.planes[0]
        request = Request(Kind.ALLREDUCE, "x", "float32")
        steps = plane.reduce(spot(1), request, [np.ones(100_000, np.float32)])
        next(steps)
        steps.close()
        assert not plane._commons._spare


@pytest.mark.parametrize("tags", [1 << 15, 1 << 23, 1 << 30])
def test_spots_of_what_can_be_in_flight_together_never_meet(tags):
    """Thirty-two thousand tags are the least that MPI promises."""
    lane = LocalWorld(1).join(0).collective
    lane.tags = tags
    numbering, barrier = Numbering(), Request(Kind.BARRIER, "x")
    numbered = [numbering.next((0, 1 + number % 99)) for number in range(3000)]
    negotiated = [Spot.of_bucket(Bucket(number, barrier, (), (), slot=slot)) for number, slot in numbered]
    locked = [Spot.of_word(Locked(9, index, 5), lane) for index in range(MOST_LINES)]
    assert max(found.slot for found in (*negotiated, *locked)) < SLOTS
    assert not {found.slot for found in negotiated} & {found.slot for found in locked}
    assert len({found.slot for found in locked}) == len(locked)
    used = [set(range(found.tag, found.tag + Group.tags_per_operation + 1)) for found in locked]
    assert sum(map(len, used)) == len(set().union(*used))
    assert max(map(max, used)) < tags
    assert max(found.tag for found in negotiated) + Group.tags_per_operation <= min(map(min, used))
    slots = {found.slot for found in negotiated}
    assert len(slots) == len({found.tag for found in negotiated}) == len({found[::2] for found in negotiated}) > 200


def test_occurrences_of_locked_buckets_have_growing_stamps():
    lane = LocalWorld(1).join(0).collective
    words = [Locked(lock, 3, occurrence) for lock in (4, 5, 900) for occurrence in (1, 2, 1 << 20)]
    stamps = [Spot.of_word(word, lane).stamp for word in words]
    assert stamps == sorted(set(stamps))
