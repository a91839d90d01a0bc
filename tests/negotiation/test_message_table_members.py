"""Who takes part: process sets that contradict each other, and ranks that leave."""

from __future__ import annotations

from tests.minds import knowing, mind, say, told
from tests.star import allreduce

W, V = allreduce("w", 2), allreduce("v", 2)

# Process sets that contradict each other

A, B = allreduce("w", 2, members=(0, 1)), allreduce("w", 2, members=(0, 1, 2))


def test_two_ranks_that_mean_each_other_in_different_sets_are_told():
    made = mind(4)
    made.hear(0, say(A))
    made.hear(1, say(B))
    plan = made.decide()
    assert told(plan) == ["w: process set, refused to [0, 1]"]
    assert plan.responses[0].error == (
        "ranks disagree on the process set of 'w' (rank 0: (0-1) at train.py:1; rank 1: (0-2) at train.py:1)"
    )


def test_who_comes_later_is_told_the_same():
    made = mind(4)
    made.hear(0, say(A))
    made.hear(1, say(B))
    first = made.decide()
    made.hear(2, say(B, V))
    plan = made.decide()
    assert told(plan) == ["w: process set, refused to [2]"]
    assert plan.responses[0].error == first.responses[0].error
    made.hear(2, say(B))
    assert made.decide() is None  # from now on the name is like any other


def test_a_refusal_that_is_owed_waits_for_the_announcement_that_it_concerns():
    """Rank 2 has used the name in a set of its own before it comes to the one that is contradicted."""
    made = mind(4)
    made.hear(0, say(A))
    made.hear(1, say(B))
    made.decide()
    made.hear(2, say(allreduce("w", 2, members=(2, 3))))
    made.hear(3, say(allreduce("w", 2, members=(2, 3))))
    assert told(made.decide()) == ["w"]
    made.hear(2, say(B))
    assert told(made.decide()) == ["w: process set, refused to [2]"]


def test_every_contradiction_is_owed_on_its_own():
    made = mind(3)
    for _ in range(2):
        made.hear(0, say(A))
        made.hear(1, say(B))
        assert told(made.decide()) == ["w: process set, refused to [0, 1]"]
    for _ in range(2):
        made.hear(2, say(B))
        assert told(made.decide()) == ["w: process set, refused to [2]"]


def test_cached_sets_contradict_too():
    made = knowing(A, size=3)
    made.hear(0, say(seen=1, hits=0b1))
    made.hear(1, say(B, seen=1))
    assert told(made.decide()) == ["w: process set, refused to [0, 1]"]


def test_overlapping_sets_without_a_contradiction_take_their_turn():
    made = mind(3)
    early = allreduce("w", 2, members=(1, 2))
    made.hear(2, say(early))
    made.hear(0, say(A))
    made.hear(1, say(A))
    assert told(made.decide()) == ["w"]
    made.hear(1, say(early))
    assert told(made.decide()) == ["w"]


# Ranks that leave


def test_what_waits_for_a_rank_that_leaves_is_refused():
    made = mind(3)
    made.hear(0, say(W))
    made.leave(1 << 2)
    assert told(made.decide()) == ["w: [2] left, refused to [0]"]
    made.hear(1, say(W))
    assert told(made.decide()) == ["w: [2] left, refused to [1]"]


def test_what_a_rank_that_leaves_has_announced_is_refused_to_it_too():
    made = mind(3)
    made.hear(2, say(W))
    made.hear(0, say(W))
    made.leave(1 << 2)
    assert told(made.decide()) == ["w: [2] left, refused to [0, 2]"]


def test_bits_are_refused_as_well():
    made = knowing(W, V)
    made.hear(0, say(seen=1, hits=0b11))
    made.hear(1, say(seen=1, hits=0b01))
    made.leave(1 << 1)
    assert told(made.decide()) == ["v: [1] left, refused to [0]", "w"]


def test_what_all_have_announced_is_carried_out_though_one_has_left():
    made = mind()
    made.hear(0, say(W))
    made.hear(1, say(W))
    made.leave(1 << 1)
    assert told(made.decide()) == ["w"]


def test_sets_without_the_rank_that_left_go_on():
    made = knowing(A, size=3)
    made.leave(1 << 2)
    for sequence in (1, 2):
        for rank in (0, 1):
            made.hear(rank, say(seen=sequence, hits=0b1))
        assert told(made.decide()) == ["w"]


def test_a_rank_that_left_is_the_reason_before_a_contradiction_is():
    """Rank 0 was refused and has gone on to another set, while rank 1 is still where rank 0 was."""
    made = mind(3)
    made.leave(1 << 2)
    made.hear(0, say(B))
    made.decide()
    made.hear(0, say(A))
    made.hear(1, say(B))
    assert told(made.decide()) == ["w: [2] left, refused to [1]"]
    made.hear(1, say(A))
    assert told(made.decide()) == ["w"]


def test_a_rank_that_had_left_is_the_reason_before_a_later_contradiction_is():
    made = mind(4)
    made.leave(1 << 3)
    made.hear(0, say(A))
    made.hear(1, say(B))
    made.decide()
    made.hear(2, say(W))  # for all ranks, so it cannot be the announcement that was contradicted
    assert told(made.decide()) == ["w: [3] left, refused to [2]"]
    made.hear(2, say(B))
    assert told(made.decide()) == ["w: process set, refused to [2]"]


def test_all_have_left():
    made = mind()
    made.leave(1 << 0)
    assert not made.finished
    made.leave(1 << 1)
    assert made.finished
