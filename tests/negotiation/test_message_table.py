"""The coordinator's mind, one situation at a time; the transcripts and the simulation show them together."""

from __future__ import annotations

import pytest

from coordd.ops.messages import Report, Waiting
from tests.minds import knowing, mind, say, told
from tests.star import allreduce

W, V, X = (allreduce(name, 2) for name in "wvx")


# Release


def test_nothing_is_decided_before_the_last_member_has_come():
    made = mind(3)
    made.hear(0, say(W))
    made.hear(2, say(W))
    assert made.decide() is None
    made.hear(1, say(W))
    assert told(made.decide()) == ["w"]
    assert made.decide() is None


def test_plans_are_numbered_and_carry_the_size_of_buckets():
    made = mind(1)
    for sequence in (1, 2):
        made.hear(0, say(W))
        plan = made.decide()
        assert (plan.sequence, plan.fusion_bytes, plan.stop) == (sequence, 64, False)


def test_the_lowest_members_order_counts():
    made = mind()
    made.hear(1, say(X, V, W))
    made.hear(0, say(W, V))
    made.hear(0, say(X))
    assert told(made.decide()) == ["w", "v", "x"]


def test_sets_release_on_their_own():
    made = mind(4)
    made.hear(3, say(allreduce("w", 2, members=(2, 3))))
    made.hear(0, say(allreduce("w", 2, members=(0, 1))))
    made.hear(2, say(allreduce("w", 2, members=(2, 3))))
    assert told(made.decide()) == ["w"]
    made.hear(1, say(allreduce("w", 2, members=(0, 1))))
    assert told(made.decide()) == ["w"]


# What is known travels as bits


def test_known_tensors_are_counted_as_bits():
    made = knowing(W, V)
    made.hear(0, say(seen=1, hits=0b10))
    assert made.decide() is None
    made.hear(1, say(seen=1, hits=0b11))
    assert told(made.decide()) == ["slot 1"]
    made.hear(0, say(seen=2, hits=0b01))
    assert told(made.decide()) == ["slot 0"]


def test_a_rank_that_does_not_know_the_slot_yet_joins_in():
    made = knowing(W)
    made.hear(0, say(seen=1, hits=0b1))
    made.hear(1, say(W, seen=0))
    assert told(made.decide()) == ["slot 0"]


def test_a_rank_with_another_shape_has_the_bits_spelled_out():
    made = knowing(W, size=3)
    made.hear(0, say(seen=1, hits=0b1))
    made.hear(1, say(allreduce("w", 3), seen=1))
    assert made.decide() is None
    made.hear(2, say(seen=1, hits=0b1))
    plan = made.decide()
    assert told(plan) == ["w: shape, refused to [0, 1, 2]"]
    assert plan.responses[0].error == (
        "Mismatched ALLREDUCE tensor shapes: ranks disagree on the shape of 'w' "
        "(ranks 0, 2: (2,) at train.py:1; rank 1: (3,) at train.py:1)"
    )
    made.hear(0, say(seen=2, hits=0b1))
    made.hear(1, say(seen=2, hits=0b1))
    made.hear(2, say(seen=2, hits=0b1))
    assert told(made.decide()) == ["slot 0"]


def test_all_ranks_may_change_a_shape_at_once():
    made = knowing(W)
    made.hear(0, say(allreduce("w", 3), seen=1))
    made.hear(1, say(allreduce("w", 3), seen=1))
    plan = made.decide()
    assert [(response.request.shape, response.slot) for response in plan.responses] == [((3,), 0)]


def test_a_bit_for_a_slot_that_has_changed_hands_means_the_old_tensor():
    own = allreduce("own", 2, members=(0, 1))
    made = knowing(own, size=3, capacity=1)
    other = allreduce("other", 2, members=(2,))
    made.hear(2, say(other))
    assert made.decide().responses[0].slot == 0
    made.hear(0, say(seen=1, hits=0b1))
    made.hear(1, say(seen=1, hits=0b1))
    assert told(made.decide()) == ["own"]


def test_of_several_former_owners_the_one_that_the_rank_knew_is_meant():
    made = knowing(allreduce("own", 2, members=(1, 2)), size=3, capacity=1)
    for name in ("first", "second"):
        made.hear(0, say(allreduce(name, 2, members=(0,))))
        assert made.decide().responses[0].slot == 0
    made.hear(1, say(seen=1, hits=0b1))
    made.hear(2, say(seen=1, hits=0b1))
    assert told(made.decide()) == ["own"]


def test_bits_of_an_old_tensor_keep_their_site():
    made = knowing(allreduce("own", 2, members=(0, 1)), size=3, capacity=1)
    made.hear(2, say(allreduce("other", 2, members=(2,))))
    made.decide()
    made.hear(0, say(seen=1, hits=0b1))
    made.hear(1, say(allreduce("own", 3, members=(0, 1)), seen=1))
    assert "rank 0: (2,) at train.py:1" in made.decide().responses[0].error


def test_the_history_ends_where_all_ranks_have_seen():
    made = knowing(*(allreduce(name, 2, members=(0,)) for name in "a"), capacity=1)
    for sequence in range(1, 100):
        made.hear(0, say(allreduce(f"n{sequence}", 2, members=(0,)), seen=sequence))
        assert made.decide() is not None
    assert len(made._replaced) == 99
    made.hear(1, Report(99))
    made.hear(0, say(W, seen=100))
    made.hear(1, say(W, seen=100))
    made.decide()
    assert len(made._replaced) == 1


def test_a_slot_with_bits_under_way_is_not_given_away():
    made = knowing(allreduce("w", 2, members=(0, 1)), size=3, capacity=1)
    made.hear(0, say(seen=1, hits=0b1))
    made.hear(2, say(allreduce("other", 2, members=(2,))))
    assert made.decide().responses[0].slot == -1
    made.hear(1, say(seen=1, hits=0b1))
    assert told(made.decide()) == ["slot 0"]


def test_a_slot_may_be_used_and_given_away_by_the_same_plan():
    made = knowing(W, capacity=1)
    for rank in (0, 1):
        made.hear(rank, say(V, seen=1, hits=0b1))
    plan = made.decide()
    assert told(plan) == ["slot 0", "v"]
    assert plan.responses[0].slot == 0


# Mismatches


def test_a_mismatch_concerns_one_tensor_only():
    made = mind()
    made.hear(0, say(V, W, X))
    made.hear(1, say(X, allreduce("w", 3), V))
    assert told(made.decide()) == ["v", "w: shape, refused to [0, 1]", "x"]


# Fillers


@pytest.mark.parametrize(("fillers", "expected"), [((True, True), "w: void"), ((True, False), "w")])
def test_an_operation_of_fillers_only_is_void(fillers, expected):
    made = mind()
    for rank, filler in enumerate(fillers):
        made.hear(rank, say(W, filler=filler))
    plan = made.decide()
    assert told(plan) == [expected]
    assert (plan.responses[0].slot < 0) == (expected == "w: void")


@pytest.mark.parametrize(("fillers", "expected"), [((1, 1), "void slot 0"), ((1, 0), "slot 0"), ((0, 1), "slot 0")])
def test_known_fillers_too(fillers, expected):
    made = knowing(W)
    for rank, filler in enumerate(fillers):
        made.hear(rank, say(seen=1, hits=0b1, fillers=filler))
    assert told(made.decide()) == [expected]
    for rank in (0, 1):  # nothing of it is remembered
        made.hear(rank, say(seen=2, hits=0b1))
    assert told(made.decide()) == ["slot 0"]


@pytest.mark.parametrize(("first", "second", "expected"), [(1, True, "void slot 0"), (1, False, "slot 0")])
def test_fillers_by_bit_and_by_name_count_alike(first, second, expected):
    made = knowing(W)
    made.hear(0, say(seen=1, hits=0b1, fillers=first))
    made.hear(1, say(W, seen=0, filler=second))
    assert told(made.decide()) == [expected]


def test_fillers_stay_fillers_when_they_are_spelled_out():
    made = knowing(allreduce("w", 2, members=(0, 1)), size=3)
    made.hear(0, say(seen=1, hits=0b1, fillers=0b1))
    made.leave(1 << 2)
    made.hear(1, say(seen=1, hits=0b1, fillers=0b1))
    assert told(made.decide()) == ["w: void"]


def test_fillers_that_disagree_are_told():
    made = mind()
    made.hear(0, say(W, filler=True))
    made.hear(1, say(allreduce("w", 3), filler=True))
    assert told(made.decide()) == ["w: shape, refused to [0, 1]"]


# Who waits for whom


def test_a_rank_is_told_whom_its_own_tensors_wait_for():
    made = knowing(W, V, size=3)
    made.hear(0, say(X, seen=1, hits=0b01))
    made.hear(1, say(seen=1, hits=0b11))
    assert made.waiting(1 << 0) == [Waiting("x", "allreduce", (1, 2)), Waiting("w", "allreduce", (2,))]
    assert made.waiting(1 << 1) == [Waiting("w", "allreduce", (2,)), Waiting("v", "allreduce", (0, 2))]
    assert made.waiting(1 << 2) == []


def test_the_same_name_in_another_set_is_somebody_elses():
    made = mind(4)
    made.hear(0, say(allreduce("w", 2, members=(0, 1))))
    made.hear(3, say(allreduce("w", 2, members=(2, 3))))
    assert made.waiting(1 << 0) == [Waiting("w", "allreduce", (1,))]
    assert made.waiting(1 << 3) == [Waiting("w", "allreduce", (2,))]
