"""What a rank has submitted of a call that it refuses, while plans are locked: never announced after the refusal."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from coordd.errors import MismatchError
from coordd.ops.messages import Blocked, Kind, Request
from tests.negotiation.test_worker_lock import X, locked, run, submit
from tests.star import Star, allreduce, outcome


def of(name: str, call: str):
    return allreduce(name, 2, call=call)


def about_to_lock(*step: Request) -> Star:
    """Two ranks that submit these in turns, and a plan that locks them, of which no rank has heard."""
    star = Star(2, lock_steps=2)
    while True:
        for request in step:
            submit(star, request)
            star.each(star.report)
            star.each(star.hear)
            if star.decide().lock:
                return star
            star.each(star.follow)
            star.each(star.land)


def test_what_a_rank_has_given_its_word_on_fails_with_the_call_that_it_refuses():
    star = locked(of("a", "fit #1"))
    handle = star.submit(1, of("a", "fit #1"))
    star.report(1)
    star.refuse(1, "fit #1")
    run(star)
    assert outcome(handle).startswith("RefusedError: rank 1 refused fit #1")
    handles = submit(star, of("a", "fit #2"))
    run(star)
    assert [outcome(handle) for handle in handles] == ["done", "done"]


def test_two_refusals_with_an_announcement_between_them_keep_their_order():
    star = locked(of("a", "fit #1"))
    star.submit(1, of("a", "fit #1"))
    star.report(1)
    star.refuse(0, "fit #1")
    star.refuse(0, "fit #2")
    star.refuse(1, "fit #1")
    stale = star.submit(1, of("x", "fit #2"))
    star.report(1)
    star.refuse(1, "fit #2")
    run(star)
    fresh = star.submit(0, of("x", "fit #3"))
    run(star)
    assert outcome(stale).startswith("RefusedError")
    assert outcome(fresh) == "pending"


def test_what_a_lock_takes_back_is_not_announced_after_the_refusal():
    """The others may have left the call too, and what came then would be paired with the next call's."""
    star = about_to_lock(of("a", "fit #1"), of("b", "fit #1"))
    stale = star.submit(1, of("a", "fit #1"))
    star.report(1)
    star.refuse(1, "fit #1")
    star.hear(1)
    star.decide()
    star.follow(0)
    star.refuse(0, "fit #1")
    run(star)
    fresh = star.submit(0, of("a", "fit #2"))
    run(star)
    assert outcome(stale).startswith("RefusedError")
    assert outcome(fresh) == "pending"
    other = star.submit(1, of("a", "fit #2"))
    run(star)
    assert [outcome(fresh), outcome(other)] == ["done", "done"]


def test_a_lock_holds_nothing_of_what_was_submitted_after_a_refusal():
    """The other ranks would pair it with the operation of which this rank has refused its part."""
    a, b = allreduce("a", 2), allreduce("b", 2)
    star = about_to_lock(a, b)
    refused = star.submit(0, a)
    star.report(0)
    star.refuse(1, "it", "a")
    ahead = star.submit(1, a)
    star.report(1)
    run(star)
    assert outcome(refused).startswith("RefusedError: rank 1 refused it")
    assert outcome(ahead) == "pending"
    behind = star.submit(0, a)
    run(star)
    assert [outcome(ahead), outcome(behind)] == ["done", "done"]


def test_no_lock_holds_an_operation_of_a_call_that_is_refused():
    """A rank that is still inside would give its word, which those that have left the call never answer."""
    star = Star(3, lock_steps=2)
    inside = of("a", "fit #1")
    for number in range(3):
        submit(star, inside)
        assert not star.settle().lock
        if number < 2:
            submit(star, X)
            assert not star.settle().lock
    for rank in (0, 1):
        star.submit(rank, X)
        star.report(rank)
        star.refuse(rank, "fit #1")
        star.hear(rank)
    star.decide()
    star.submit(2, X)
    star.report(2)
    star.hear(2)
    assert not star.decide().lock
    handle = star.submit(2, inside)
    run(star)
    assert outcome(handle).startswith("RefusedError: rank 0 refused fit #1")


def test_ranks_that_have_waited_for_each_other_know_all_sets_of_which_something_failed():
    """Also those of which their own part is still to come; a rank that was not told of it knows once it is."""
    star = Star(3)
    world, pair = allreduce("w", 2), allreduce("p", 2, members=(0, 1))
    waits = {0: star.submit(0, world), 1: star.submit(1, pair)}
    star.each(star.report)
    star.each(star.hear)
    for rank, request in enumerate((world, pair)):
        star.coordinator.hear(rank, Blocked(request.name, 0), now=star.now)
    plan = star.decide()
    star.each(star.follow)
    heard = [star.members[rank].deadlocks for rank in star.ranks]
    assert heard[0].last(()) == -1  # the script has not asked yet
    assert [outcome(handle).split(":")[0] for handle in waits.values()] == ["MismatchError"] * 2
    number = plan.sequence
    assert [(each.last(()), each.last((0, 1))) for each in heard] == [(number, number), (number, number), (-1, -1)]
    late = star.submit(2, world)
    run(star)
    assert outcome(late).startswith("MismatchError")
    assert heard[2].last(()) == number
    joins = [star.submit(rank, Request(Kind.JOIN, "join", transient=True)) for rank in star.ranks]
    run(star)
    assert [outcome(handle) for handle in joins] == ["done"] * 3
    assert [each.last(()) for each in heard] == [-1] * 3


def waiting_for_each_other(late: bool):
    """Rank 0 waits for "a", rank 1 for "b"; ranks 1 and 2 have submitted "c"; rank 2's "a" is under way or ``late``."""
    star = Star(3)
    for name in "abc":  # known to all, so that bits are told as well
        submit(star, allreduce(name, 2))
        run(star)
    handles = [star.submit(rank, allreduce(name, 2)) for rank, name in ((0, "a"), (1, "b"), (1, "c"), (2, "c"))]
    star.each(star.report)
    star.each(star.hear)
    if not late:
        handles.append(star.submit(2, allreduce("a", 2)))
        star.report(2)
    for rank, name in enumerate("ab"):
        star.coordinator.hear(rank, Blocked(name, star.members[rank].seen), now=star.now)
    star.decide()
    return star, handles


@pytest.mark.parametrize("late", [False, True])
def test_what_a_rank_submits_before_it_has_heard_of_a_deadlock_belongs_to_what_has_failed(late):
    """Else the next operation of that name on the others would be paired with it."""
    star, handles = waiting_for_each_other(late)
    star.each(star.follow)
    if late:
        handles.append(star.submit(2, allreduce("a", 2)))
    run(star)
    again = star.submit(0, allreduce("a", 2))
    run(star)
    assert [handle.poll() and type(handle.error()) for handle in handles] == [MismatchError] * 5
    assert "'a' was submitted by rank 0" in str(handles[4].error())
    assert outcome(again) == "pending"
    others = [star.submit(rank, allreduce("a", 2)) for rank in (1, 2)]
    run(star)
    assert [outcome(handle) for handle in (again, *others)] == ["done"] * 3


def test_what_a_rank_submits_once_it_has_heard_of_a_deadlock_is_new():
    star, handles = waiting_for_each_other(late=True)
    star.each(star.follow)
    assert all(outcome(handle).startswith("MismatchError") for handle in handles)
    fresh = submit(star, allreduce("a", 2))
    run(star)
    assert [outcome(handle) for handle in fresh] == ["done"] * 3


def in_a_circle(star: Star, waits: dict[int, str], before: Callable[[], object] = lambda: None):
    """Has ranks wait for each other, each for an operation of its own; ``before`` happens before that is found out."""
    handles = [star.submit(rank, allreduce(name, 2)) for rank, name in waits.items()]
    star.each(star.report)
    before()
    star.each(star.hear)
    for rank, name in waits.items():
        star.coordinator.hear(rank, Blocked(name, star.members[rank].seen), now=star.now)
    star.decide()
    return handles


def catch_deadlock(star: Star):
    """Ranks 0 and 1 wait for each other, and both scripts get the error."""
    handles = in_a_circle(star, {0: "x", 1: "y"})
    run(star)
    assert all(outcome(handle).startswith("MismatchError") for handle in handles)


def assert_in_step(star: Star, name: str):
    """The next operations of a name pair rightly."""
    for _ in range(2):
        first = star.submit(0, allreduce(name, 2))
        run(star)
        assert outcome(first) == "pending"
        rest = [star.submit(rank, allreduce(name, 2)) for rank in star.ranks[1:]]
        run(star)
        assert [outcome(handle) for handle in (first, *rest)] == ["done"] * len(star.ranks)


def meet(star: Star):
    handles = submit(star, Request(Kind.BARRIER, "meet", transient=True))
    run(star)
    assert [outcome(handle) for handle in handles] == ["done"] * len(star.ranks)


@pytest.mark.parametrize("late", [False, True])
def test_what_a_rank_has_refused_before_ranks_waited_for_each_other_is_over_then(late):
    """Also if the refusal comes only after the verdict."""
    star = Star(2)

    def refuse():
        star.refuse(0, "d", "d")
        held.extend([star.up[0].pop()] if late else [])

    held = []
    handles = in_a_circle(star, {0: "a", 1: "b"}, refuse)
    star.up[0].extend(held)
    star.hear(0)
    run(star)
    assert all(outcome(handle).startswith("MismatchError") for handle in handles)
    assert_in_step(star, "d")


def test_a_refusal_before_the_script_has_heard_that_ranks_waited_for_each_other_is_part_of_that():
    star = Star(2)
    first = star.submit(0, allreduce("x", 2))
    handles = in_a_circle(star, {0: "a", 1: "b"})
    star.each(star.follow)
    star.refuse(1, "x", "x")
    run(star)
    assert all(outcome(handle).startswith("MismatchError") for handle in (first, *handles))
    assert_in_step(star, "x")


@pytest.mark.parametrize("together", [False, True])
def test_a_rank_that_comes_late_gets_the_error_of_a_deadlock_unless_it_has_met_the_others_since(together):
    star = Star(3)
    catch_deadlock(star)
    if together:
        meet(star)
        assert_in_step(star, "x")
    else:
        late = star.submit(2, allreduce("x", 2))
        run(star)
        assert outcome(late).startswith("MismatchError")


def test_ranks_that_got_the_error_of_a_deadlock_do_not_get_a_refusal_from_before_they_met():
    """The refusing rank has carried out the plan with the errors, but it got none, so it names nothing that failed."""
    star = Star(4)
    in_a_circle(star, {0: "x", 1: "y"})
    run(star)
    star.refuse(2, "d", "d")
    late = star.submit(3, allreduce("x", 2))
    run(star)
    assert outcome(late).startswith("MismatchError")
    meet(star)
    assert_in_step(star, "d")


def test_ranks_that_got_no_error_get_a_refusal_also_after_a_barrier():
    star = Star(2)
    star.refuse(0, "d", "d")
    meet(star)
    handle = star.submit(1, allreduce("d", 2))
    run(star)
    assert outcome(handle).startswith("RefusedError")
    assert_in_step(star, "d")


def test_ranks_outside_the_set_with_which_others_announce_it_have_nothing_to_do_with_a_refusal():
    """One rank names a larger set by mistake."""
    star = Star(3)
    star.refuse(0, "x", "x")
    handle = star.submit(1, allreduce("x", 2, members=(0, 1)))
    run(star)
    assert outcome(handle).startswith("RefusedError")
    assert_in_step(star, "x")


def test_what_a_script_has_not_heard_of_when_all_have_joined_is_forgotten():
    star = Star(2)
    alone = [star.submit(rank, allreduce(name, 2)) for rank, name in enumerate("ab")]
    star.each(star.report)
    star.each(star.hear)
    for rank, name in enumerate("ab"):
        star.coordinator.hear(rank, Blocked(name, 0), now=star.now)
    run(star)
    for rank in star.ranks:
        star.submit(rank, Request(Kind.JOIN, "join", transient=True))
    run(star)
    assert all(outcome(handle).startswith("MismatchError") for handle in alone)
    assert [member.deadlocks.last(()) for member in star.members] == [-1, -1]
