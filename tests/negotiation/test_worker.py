"""One rank's side: plans become buckets, refusals and voids; caches and numbers stay alike on all ranks."""

from __future__ import annotations

import pytest

from coordd.errors import DuplicateNameError, MismatchError, ShutdownError
from coordd.ops.messages import Kind, Plan, Report, Request
from tests.star import Star, allreduce, outcome

W, V, X = (allreduce(name, 2) for name in "wvx")


def everywhere(star: Star, *requests: Request, **details: object) -> list[list]:
    """Submits on all members of each request's set; returns the handles by request, then rank."""
    return [[star.submit(rank, each, **details) for rank in each.members or star.ranks] for each in requests]


def names(buckets: list) -> list[tuple[int, list[str]]]:
    return [(bucket.sequence, [entry.request.name for entry in bucket.entries]) for bucket in buckets]


def test_a_plan_becomes_the_same_buckets_everywhere():
    star = Star(2, fusion=16)
    everywhere(star, W, V, X)
    star.each(star.report)
    star.each(star.hear)
    star.decide()
    assert names(star.follow(0)) == names(star.follow(1)) == [(1, ["w", "v"]), (2, ["x"])]


def test_every_rank_holds_its_own_entries():
    star = Star(2)
    everywhere(star, W)
    star.each(star.report)
    star.each(star.hear)
    star.decide()
    for rank in star.ranks:
        [bucket] = star.follow(rank)
        assert bucket.entries == (star.members[rank].table.find("w"),)


def test_hits_come_by_slot_and_before_what_is_new():
    star = Star(2)
    everywhere(star, W, V)
    star.settle()
    everywhere(star, X, V, W)
    star.each(star.report)
    star.each(star.hear)
    assert star.decide().hits == b"\x03"
    assert names(star.follow(0)) == [(2, ["w", "v", "x"])]


def test_buckets_of_other_sets_are_numbered_too():
    star = Star(3, fusion=0)
    everywhere(star, allreduce("a", members=(0, 1)), allreduce("b", members=(1, 2)), allreduce("c", members=(0, 2)))
    star.each(star.report)
    star.each(star.hear)
    star.decide()
    assert [names(star.follow(rank)) for rank in star.ranks] == [
        [(1, ["a"]), (2, ["c"])],
        [(1, ["a"]), (3, ["b"])],
        [(2, ["c"]), (3, ["b"])],
    ]


def test_an_allgather_is_told_all_first_dimensions():
    star = Star(3)
    for rank in star.ranks:
        star.submit(rank, Request(Kind.ALLGATHER, "g", "float32", (rank, 4)))
    star.each(star.report)
    star.each(star.hear)
    star.decide()
    assert [bucket.sizes for rank in star.ranks for bucket in star.follow(rank)] == [(0, 1, 2)] * 3


def test_a_mismatch_fails_one_tensor_in_the_same_words_everywhere():
    star = Star(2)
    ours, theirs = star.submit(0, W, line=31), star.submit(1, allreduce("w", 3), line=40)
    others = everywhere(star, V)
    star.settle()
    text = (
        "Mismatched ALLREDUCE tensor shapes: "
        "ranks disagree on the shape of 'w' (rank 0: (2,) at train.py:31; rank 1: (3,) at train.py:40)"
    )
    for handle in (ours, theirs):
        with pytest.raises(MismatchError) as caught:
            handle.result(0)
        assert str(caught.value) == text
        assert (caught.value.name, caught.value.attribute) == ("w", "shape")
    assert [outcome(handle) for handle in others[0]] == ["done", "done"]
    again = everywhere(star, W)
    star.settle()
    assert [outcome(handle) for handle in again[0]] == ["done", "done"]


def test_sites_are_told_as_they_were_at_the_last_submission():
    star = Star(2)
    for line in (10, 20, 20):
        everywhere(star, W, line=line)
        star.settle()
    star.submit(0, allreduce("w", 3), line=30)
    last = star.submit(1, W, line=20)
    assert star.report(1).hits == b"\x01"
    star.settle()
    assert "rank 0: (3,) at train.py:30; rank 1: (2,) at train.py:20" in outcome(last)
    star.submit(0, W, line=30)
    last = star.submit(1, allreduce("w", 3), line=20)
    star.settle()
    assert "rank 0: (2,) at train.py:30; rank 1: (3,) at train.py:20" in outcome(last)


def test_a_duplicate_is_refused_here_and_not_counted_there():
    star = Star(2)
    first, second = star.submit(0, W), star.submit(0, W)
    with pytest.raises(DuplicateNameError):
        second.result(0) if star.report(0) else None
    star.hear(0)
    assert star.decide() is None
    star.submit(1, W)
    star.settle()
    assert outcome(first) == "done"


def test_fillers_end_without_a_result_if_nobody_has_one():
    star = Star(2)
    for _ in range(3):
        [handles] = everywhere(star, W, filler=True)
        star.settle()
        assert [outcome(handle) for handle in handles] == ["void", "void"]
        handles = [star.submit(rank, W, filler=bool(rank)) for rank in star.ranks]
        star.settle()
        assert [outcome(handle) for handle in handles] == ["done", "done"]


def test_a_void_concerns_only_its_members():
    star = Star(3)
    mine = allreduce("w", members=(0, 1))
    for _ in range(2):
        other = star.submit(2, allreduce("w", members=(2,)))
        [handles] = everywhere(star, mine, filler=True)
        star.settle()
        assert [outcome(handle) for handle in (*handles, other)] == ["void", "void", "done"]
        everywhere(star, mine)
        star.settle()


def test_who_waits_for_a_rank_that_left_is_told_who_it_was():
    star = Star(3)
    handles = [star.submit(rank, W) for rank in (0, 2)]
    star.each(star.report)
    star.leave(2)
    star.settle()
    for handle in handles:
        with pytest.raises(ShutdownError, match="rank 2 left the job while others still waited for 'w'") as caught:
            handle.result(0)
        assert caught.value.ranks == (2,)


def test_all_ranks_stop_after_all_have_left():
    star = Star(2)
    star.leave(0)
    assert star.settle() is None
    star.leave(1)
    assert star.settle().stop
    assert [member.stopped for member in star.members] == [True, True]


def test_a_rank_that_does_not_submit_gives_a_sign_of_life_now_and_then():
    star, signs = Star(2), []
    for _ in range(1000):
        star.submit(0, allreduce("w", members=(0,)))
        star.settle()
        signs += [sign.seen for sign in star.up[1]]
    assert signs == [256, 512, 768]


def test_a_sign_of_life_tells_only_what_was_seen():
    member = Star(2).members[1]
    dues = [member.follow(Plan(sequence)) for sequence in range(1, 257)]
    assert [due.messages for due in dues] == [[]] * 255 + [[Report(256)]]
    assert not member.announce([]).messages
