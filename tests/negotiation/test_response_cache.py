"""The response cache: slots are given, kept, used and reused alike wherever the same plans are followed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.negotiation.response_cache import ResponseCache
from coordd.ops.messages import Kind, Request, Response
from tests.star import allreduce


def answered(cache: ResponseCache, request: Request, *, pinned: int = 0) -> int:
    """Has a plan answer a request, as the coordinator does."""
    slot = cache.place(request, pinned=pinned)
    if slot >= 0:
        cache.store(Response(request, slot=slot))
    return slot


def filled(capacity: int) -> ResponseCache:
    cache = ResponseCache(capacity)
    for number in range(capacity):
        assert answered(cache, allreduce(f"w{number}")) == number
    return cache


def test_slots_are_given_in_the_order_of_plans():
    cache = filled(3)
    assert len(cache) == 3
    assert [cache.request(slot).name for slot in range(3)] == ["w0", "w1", "w2"]
    assert [cache.slot_of(f"w{number}") for number in range(4)] == [0, 1, 2, -1]


def test_only_an_equal_request_is_a_hit():
    cache = filled(1)
    assert cache.slot(allreduce("w0")) == 0
    assert cache.slot(allreduce("w0", 5)) == -1
    assert cache.slot(allreduce("w0", members=(0, 1))) == -1
    assert cache.slot(allreduce("other")) == -1


def test_a_changed_tensor_keeps_its_slot():
    cache = filled(2)
    assert answered(cache, allreduce("w0", 5)) == 0
    assert cache.slot(allreduce("w0", 5)) == 0
    assert cache.slot(allreduce("w0")) == -1


def test_the_slot_that_was_used_longest_ago_is_reused():
    cache = filled(3)
    cache.touch([0])
    assert answered(cache, allreduce("new")) == 1
    assert answered(cache, allreduce("newer")) == 2
    assert answered(cache, allreduce("newest")) == 0
    assert cache.slot_of("w1") == -1


def test_who_had_to_go_is_returned():
    cache = filled(1)
    assert cache.store(Response(allreduce("new"), slot=0)) == allreduce("w0")
    assert cache.store(Response(allreduce("new", 3), slot=0)) == allreduce("new")


@pytest.mark.parametrize("request_", [allreduce("w0", 5), allreduce("new")])
def test_a_slot_with_announced_bits_stays_as_it_is(request_):
    cache = filled(1)
    assert answered(cache, request_, pinned=0b1) == -1
    assert cache.slot(allreduce("w0")) == 0


@pytest.mark.parametrize("kind", Kind)
def test_only_what_comes_again_unchanged_is_worth_a_slot(kind):
    expected = -1 if kind in {Kind.ALLGATHER, Kind.JOIN} else 0
    assert answered(ResponseCache(1), Request(kind, "w", shape=(1,))) == expected
    assert answered(ResponseCache(1), Request(kind, "w", shape=(1,), transient=True)) == -1


def test_without_capacity_nothing_is_cached():
    cache = ResponseCache(0)
    assert answered(cache, allreduce("w")) == -1
    assert cache.slot(allreduce("w")) == -1
    assert len(cache) == 0


def test_a_rank_remembers_its_own_object_and_its_site():
    cache, mine = filled(1), allreduce("w0")
    assert cache.site(0) != "train.py:1"
    cache.adopt(0, mine, "train.py:1")
    assert cache.request(0) is mine
    assert cache.site(0) == "train.py:1"


def test_a_new_tensor_has_no_site_yet_even_if_it_is_the_unknown_one():
    cache = filled(1)
    cache.adopt(0, allreduce("w0"), None)
    assert cache.site(0) is None
    answered(cache, allreduce("w0", 5))
    assert cache.site(0) is not None


def test_nobody_elses_object_is_taken_over():
    cache = filled(1)
    cache.adopt(0, allreduce("w0", 9), "train.py:1")
    assert cache.request(0) == allreduce("w0")
    assert cache.site(0) != "train.py:1"


answers = st.tuples(st.sampled_from("abcdef"), st.integers(0, 1), st.integers(0, 7), st.integers(0, 7))


@given(st.integers(0, 4), st.lists(answers, max_size=40))
def test_what_follows_the_same_plans_holds_the_same(capacity, plans):
    """One cache chooses, the other only follows; the model is a dictionary."""
    chooses, follows = ResponseCache(capacity), ResponseCache(capacity)
    model: dict[int, Request] = {}
    for name, length, used, pinned in plans:
        touched = [slot for slot in range(len(chooses)) if used >> slot & 1]
        request = allreduce(name, length)
        chooses.touch(touched)
        slot = chooses.place(request, pinned=pinned)
        if slot < 0:
            continue
        assert not (slot in model and pinned >> slot & 1)
        response = Response(request, slot=slot)
        assert chooses.store(response) == follows.store(response) == model.get(slot)
        model[slot] = request
    for cache in (chooses, follows):
        assert [cache.request(slot) for slot in range(len(cache))] == [model[slot] for slot in sorted(model)]
        assert all(cache.slot(request) == slot for slot, request in model.items())
    assert len(model) <= capacity
    assert len({request.name for request in model.values()}) == len(model)
