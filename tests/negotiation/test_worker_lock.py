"""A locked plan on the ranks: what is silent, what breaks it, and that every operation still ends."""

from __future__ import annotations

import pytest

from coordd.errors import DuplicateNameError, MismatchError, ShutdownError
from coordd.ops.handles import Handle
from coordd.ops.messages import Plan, Report, Request
from tests.star import Star, allreduce, outcome

A, B, X = (allreduce(name, 2) for name in "abx")


def submit(star: Star, *requests: Request, **details: object) -> list[Handle]:
    return [star.submit(rank, request, **details) for rank in star.ranks for request in requests]


def locked(*requests: Request, size: int = 2, **details: int) -> Star:
    """Ranks that have just locked these."""
    star = Star(size, lock_steps=2, **details)
    for _ in range(3):
        submit(star, *requests)
        plan = star.settle()
    assert plan.lock
    return star


def run(star: Star) -> None:
    """Moves everything until nothing moves any more."""
    for _ in range(8):
        star.settle()
        star.each(star.meet)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_locked_step_says_nothing(size):
    star = locked(A, B, size=size)
    for _ in range(5):
        handles = submit(star, A, B)
        star.each(star.report)
        assert not any(star.up)
        star.each(star.meet)
        assert {outcome(handle) for handle in handles} == {"done"}


def test_buckets_hold_their_entries_in_the_order_of_the_lock():
    star = locked(A, B)
    submit(star, B, A)
    star.each(star.report)
    for rank in star.ranks:
        [word] = star.meet(rank)
        assert [entry.request.name for entry in word.bucket.entries] == ["a", "b"]
        assert (word.bucket.request, word.bucket.sequence) == (A, 0)


def test_another_line_of_code_makes_no_difference():
    star = locked(A)
    submit(star, A, line=99)
    star.each(star.report)
    assert not any(star.up)


def test_what_is_not_locked_is_negotiated_beside_it_under_the_usual_numbers():
    star = locked(A)
    submit(star, A, X)
    star.each(star.report)
    star.each(star.hear)
    star.decide()
    assert [bucket.sequence for rank in star.ranks for bucket in star.follow(rank)] == [4, 4]


@pytest.mark.parametrize(
    "other", [allreduce("a", 3), allreduce("a", 2, dtype="int64"), allreduce("a", 2, members=(0,)), allreduce("a", 2)]
)
def test_whatever_contradicts_the_lock_breaks_it_and_is_negotiated(other):
    star = locked(A, B)
    star.submit(0, B)
    star.submit(0, other, filler=other == A)
    report = star.report(0)
    assert report.unlock == 3
    assert [told.request.name for told in report.fresh] + [*report.hits] in (["a", 2], [3])


def test_a_duplicate_breaks_nothing():
    star = locked(A, B)
    star.submit(0, A)
    again = star.submit(0, A)
    assert star.report(0) is None
    assert isinstance(again.error(), DuplicateNameError)
    assert not star.words


def test_a_wait_breaks_only_what_it_may_be_waiting_for():
    star = locked(A, B, fusion=0)
    star.submit(0, A)
    star.report(0)
    assert star.wait(0) is None
    star = locked(A, B)
    star.submit(0, A)
    star.report(0)
    assert star.wait(0) == Report(3, hits=b"\x01", unlock=3)


def test_a_refused_bucket_is_announced_once_and_ends_alike_everywhere():
    star = locked(A, B, size=3)
    handles = submit(star, A, B)
    star.report(0)
    star.report(1)
    star.unlock(2)
    run(star)
    assert {outcome(handle) for handle in handles} == {"done"}
    assert all(not member._locks and not len(member.table) for member in star.members)


def test_a_mismatch_names_all_values_though_one_was_locked():
    star = locked(A)
    ours, theirs = star.submit(0, A, line=7), star.submit(1, allreduce("a", 9), line=8)
    run(star)
    for handle in (ours, theirs):
        with pytest.raises(MismatchError, match=r"rank 0: \(2,\) at train.py:7; rank 1: \(9,\) at train.py:8"):
            handle.result(0)


@pytest.mark.parametrize("waited", [False, True])
def test_what_was_waited_for_before_the_lock_came_is_not_held_back(waited):
    """Nobody says a second time that he waits for a tensor that is taken back, so it must not wait for company."""
    star = Star(2, lock_steps=2)
    for requests in ((A, B, X), (A, B, X), (A, B)):
        submit(star, *requests)
        star.settle()
    star.submit(0, A)
    star.report(0)
    if waited:
        star.wait(0)
    submit(star, X)
    star.each(star.report)
    star.each(star.hear)
    assert star.decide().lock == ((0, 1), (2,))
    star.follow(0)
    assert [report.unlock for report in star.up[0]] == [4] * waited


@pytest.mark.parametrize(("early", "how"), [((A,), "ShutdownError"), ((A, B), "done")])
def test_a_rank_that_left_before_it_knew_of_the_lock_lets_nobody_wait(early, how):
    """What it had announced is complete and moves, or it is not and fails on all ranks."""
    star = Star(2, lock_steps=2)
    for requests in ((A, B, X), (A, B, X), (A, B)):
        submit(star, *requests)
        star.settle()
    handles = [star.submit(1, request) for request in early]
    submit(star, X)
    star.each(star.report)
    star.each(star.hear)
    assert star.decide().lock == ((0, 1), (2,))
    star.leave(1)
    star.follow(0)
    handles += [star.submit(0, request) for request in early]
    star.report(0)
    if how != "done":
        star.unlock(0)
    run(star)
    assert {outcome(handle).partition(":")[0] for handle in handles} == {how}
    star.leave(0)
    star.settle()
    assert star.members[0].stopped


def test_what_is_refused_after_the_goodbye_fails_without_a_word():
    star = locked(A)
    handle = star.submit(1, A)
    star.report(1)
    assert star.leave(1) == Report(3, unlock=3, lasted=1)
    star.unlock(0)
    star.meet(1)
    with pytest.raises(ShutdownError, match="rank 1 left"):
        handle.result(0)
    assert [type(message).__name__ for message in star.up[1]] == ["Report", "Goodbye"]


def test_a_broken_lock_is_told_only_by_those_who_broke_it():
    star = locked(A, size=3)
    star.unlock(1)
    star.hear(1)
    assert star.decide() == Plan(4, fusion_bytes=1 << 20, unlock=3)
    star.each(star.follow)
    assert not any(star.up)
    assert sorted(star.words[3, 0, 1]) == [0, 1, 2]
    star.unlock(1)
    assert not any(star.up)
