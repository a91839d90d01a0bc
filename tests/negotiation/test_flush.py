"""Acknowledged plans: a refusal or a pending error applies to exactly what a rank submitted before the plan."""

from __future__ import annotations

import pytest

from coordd.ops.messages import Blocked, Flushed, Kind, Refused, Report, Request
from tests.negotiation.test_worker_lock import run, submit
from tests.negotiation.test_worker_refusals import assert_in_step, catch_deadlock, in_a_circle, meet
from tests.star import Star, allreduce, outcome

MEET = Request(Kind.BARRIER, "meet", transient=True)
D, E = allreduce("d", 2), allreduce("e", 2)


def assert_refused(star: Star, rank: int, name: str):
    """A refusal reaches all other ranks."""
    star.refuse(rank, name, name)
    star.hear(rank)
    others = [star.submit(other, allreduce(name, 2)) for other in star.ranks if other != rank]
    run(star)
    assert [outcome(handle)[:12] for handle in others] == ["RefusedError"] * len(others)


def restarted_and_locked() -> Star:
    """Two ranks that got the error of a deadlock, and then lock ``d``."""
    star = Star(2, lock_steps=2)
    catch_deadlock(star)
    for _ in range(9):
        submit(star, D)
        if star.settle().lock:
            return star
    raise AssertionError


def open_vote_at_a_barrier():
    """Rank 1 has voted on ``d``, which rank 0 has refused, and its script has passed a barrier; the vote is open."""
    star = restarted_and_locked()
    handle = star.submit(1, D)
    star.report(1)
    star.refuse(0, "d", "d")
    barriers = submit(star, MEET)
    star.each(star.report)
    star.each(star.hear)
    assert star.decide().flush
    star.each(star.follow)
    star.each(star.land)
    assert [outcome(barrier) for barrier in barriers] == ["done"] * 2
    assert outcome(handle) == "pending"
    return star, handle


def test_a_rank_gets_the_refusal_of_what_it_voted_on_before_a_barrier():
    """The vote fails only after the barrier, so the announcement comes after that, too."""
    star, handle = open_vote_at_a_barrier()
    assert not any(isinstance(message, Flushed) for message in star.up[1])
    star.meet(1)
    assert [type(message) for message in star.up[1]] == [Report, Flushed]
    run(star)
    assert outcome(handle).startswith("RefusedError: rank 0 refused d")
    assert_in_step(star, "d")


def test_what_is_submitted_after_a_barrier_waits_for_open_votes():
    """It is announced after the acknowledgement, so an older refusal of that name does not apply to it."""
    star = restarted_and_locked()
    voted = star.submit(1, D)
    star.report(1)
    star.refuse(0, "e", "e")  # rank 1 has given up its part
    submit(star, MEET)
    star.each(star.report)
    star.each(star.hear)
    assert star.decide().flush
    star.each(star.follow)
    star.each(star.land)
    new = star.submit(1, E)
    assert star.report(1) is None
    star.meet(1)
    run(star)
    assert [outcome(voted), outcome(new)] == ["pending", "pending"]
    rest = [star.submit(0, D), star.submit(0, E)]
    run(star)
    assert [outcome(handle) for handle in (voted, new, *rest)] == ["done"] * 4


def test_a_rank_gets_a_refusal_until_its_script_knows_of_a_deadlock():
    """Its daemon knows of the deadlock before its script, which has a part of a failed operation in flight."""
    star, members = Star(4), (0, 2, 3)
    star.refuse(1, "d", "d")
    waits = {rank: star.submit(rank, allreduce(name, 2, members=members)) for rank, name in ((0, "x"), (3, "y"))}
    beside = star.submit(2, allreduce("x", 2, members=members))
    star.each(star.report)
    star.each(star.hear)
    for rank, wait in waits.items():
        star.coordinator.hear(rank, Blocked(wait.name, star.members[rank].seen), now=star.now)
    star.decide()
    star.each(star.follow)
    handle = star.submit(2, D)
    run(star)
    assert outcome(handle).startswith("RefusedError: rank 1 refused d")
    assert all(outcome(each).startswith("MismatchError") for each in (*waits.values(), beside))
    meet(star)
    assert_in_step(star, "d")


def test_two_ranks_refuse_an_operation_before_and_after_a_deadlock_is_found_out():
    star = Star(5)
    star.refuse(1, "d", "d")
    star.hear(1)
    beside = star.submit(2, allreduce("x", 2))
    held = []

    def refuse():
        star.refuse(2, "d", "d")
        held.append(star.up[2].pop())

    handles = [*in_a_circle(star, {0: "x", 4: "y"}, refuse), beside]
    star.up[2].extend(held)
    star.hear(2)
    run(star)
    assert all(outcome(handle).startswith("MismatchError") for handle in handles)
    late = star.submit(3, D)
    run(star)
    assert outcome(late).startswith("RefusedError")
    meet(star)
    assert_in_step(star, "d")


def test_a_late_rank_gets_the_error_of_a_deadlock_also_if_a_barrier_overtakes_its_announcement():
    """An aggregator may hold the announcement back, and forward the barrier, for which all ranks below have come."""
    star = Star(4)
    catch_deadlock(star)
    late = star.submit(3, allreduce("x", 2))
    star.report(3)
    held = star.up[3].pop()
    submit(star, MEET)
    star.each(star.report)
    star.each(star.hear)
    assert star.decide().flush
    star.each(star.follow)
    star.each(star.land)
    star.up[3].appendleft(held)
    run(star)
    assert outcome(late).startswith("MismatchError")
    assert_in_step(star, "x")


def test_a_refusal_after_the_error_of_a_deadlock_follows_the_acknowledgement():
    """Else it would count as from before the error, and the other rank, which has restarted, would wait for ever."""
    star = restarted_and_locked()
    voted = star.submit(1, D)
    handles = in_a_circle(star, {0: "x", 1: "y"})
    star.each(star.follow)
    assert all(outcome(handle).startswith("MismatchError") for handle in handles)
    star.refuse(1, "f", "f")
    assert not any(isinstance(message, Flushed | Refused) for message in star.up[1])
    star.hear(0)
    star.meet(1)
    assert [type(message) for message in star.up[1]][-3:] == [Report, Flushed, Refused]
    run(star)
    assert outcome(voted) == "pending"
    other = star.submit(0, allreduce("f", 2))
    run(star)
    assert outcome(other).startswith("RefusedError: rank 1 refused f")
    assert_in_step(star, "f")


def test_a_rank_that_never_asks_for_the_error_of_a_deadlock_goes_on_after_a_barrier():
    """Its later refusals are news to the others, which got the error."""
    star = Star(3)
    beside = star.submit(2, allreduce("x", 2))
    catch_deadlock(star)
    meet(star)
    assert_refused(star, 2, "d")
    assert outcome(beside).startswith("MismatchError")
    assert_in_step(star, "d")


@pytest.mark.parametrize("refuses", [False, True])
def test_a_rank_that_never_asks_for_the_error_of_a_deadlock_takes_part_again_after_a_barrier(refuses):
    """Also in an operation that failed then, and of which it had no part."""
    star = Star(3)
    star.submit(2, allreduce("x", 2))
    catch_deadlock(star)
    meet(star)
    if refuses:
        assert_refused(star, 2, "y")
    assert_in_step(star, "y")


def test_the_error_of_a_later_deadlock_ends_earlier_ones_too():
    """Also what failed in an earlier one, for whose error the script never asks."""
    star = Star(2)
    first = in_a_circle(star, {0: "a", 1: "b"})
    run(star)
    assert outcome(first[1]).startswith("MismatchError")  # rank 0 does not ask
    second = in_a_circle(star, {0: "c", 1: "d"})
    run(star)
    assert all(outcome(handle).startswith("MismatchError") for handle in second)
    assert [member.deadlocks.last(()) for member in star.members] == [star.members[0].seen] * 2
    assert_in_step(star, "b")


@pytest.mark.parametrize("refuses", [False, True])
def test_the_errors_of_a_deadlock_are_over_when_all_have_joined(refuses):
    """Also for a rank that has none of the failed operations, and refuses its next one of that name or submits it."""
    star = Star(3)
    catch_deadlock(star)
    submit(star, Request(Kind.JOIN, "join", transient=True))
    run(star)
    if refuses:
        assert_refused(star, 2, "x")
    assert_in_step(star, "x")


def test_a_join_of_some_ranks_does_not_end_the_errors_of_operations_of_all():
    star = Star(3)
    catch_deadlock(star)
    some = Request(Kind.JOIN, "join", transient=True, members=(0, 2))
    joins = [star.submit(rank, some) for rank in (0, 2)]
    run(star)
    late = star.submit(2, allreduce("x", 2))
    run(star)
    assert [outcome(handle) for handle in joins] == ["done"] * 2
    assert outcome(late).startswith("MismatchError")


def test_a_barrier_of_some_ranks_does_not_count_as_one_with_the_refusing_rank():
    star = Star(4)
    catch_deadlock(star)
    star.refuse(2, "d", "d")
    some = Request(Kind.BARRIER, "some", transient=True, members=(0, 1))
    few = [star.submit(rank, some) for rank in (0, 1)]
    run(star)
    late = [star.submit(rank, allreduce(name, 2)) for rank in (2, 3) for name in "xy"]
    late.append(star.submit(3, D))
    run(star)
    assert [outcome(handle) for handle in few] == ["done"] * 2
    assert [outcome(handle)[:12] for handle in late] == ["MismatchErro"] * 4 + ["RefusedError"]
    meet(star)
    assert_in_step(star, "d")
