"""What rank 0 does beside training: it greets, plans, fails, and finds out who keeps whom waiting."""

from __future__ import annotations

import pytest

from coordd.negotiation.channel import LOST
from coordd.negotiation.coordinator import Coordinator
from coordd.ops.messages import (
    Abort,
    Account,
    Failure,
    Goodbye,
    Hello,
    Inquiry,
    Kind,
    Message,
    Overdue,
    Plan,
    Recording,
    Request,
    StallReport,
    Waiting,
    Welcome,
)
from tests.star import Star, allreduce

W = allreduce("w", 2)


def empty(size: int = 3) -> Coordinator:
    return Coordinator(size, cache_capacity=8, fusion_bytes=64)


def hello(rank: int, *, version: str = "1", digest: str = "d") -> Hello:
    return Hello(version, digest, 100 + rank, f"h{rank}")


def said(star: Star, kind: type) -> list:
    """What the coordinator says to rank 0, of one kind."""
    return [message for message in star.turn() if isinstance(message, kind)]


def announce(star: Star, rank: int, *requests: object) -> None:
    for request in requests:
        star.submit(rank, request)
    star.report(rank)
    star.hear(rank)


def complain(star: Star, rank: int, *names: str, seconds: float = 5.0, matched: tuple[Waiting, ...] = ()) -> None:
    star.coordinator.hear(rank, Overdue(seconds, names, matched), now=star.now)


def account(star: Star, rank: int) -> Account:
    """Has a rank answer an inquiry."""
    answer = Account(rank, "train.py:1 in main: read()", "nothing yet")
    star.coordinator.hear(rank, answer, now=star.now)
    return answer


# Arrival


def test_everybody_is_welcome_when_the_last_has_come():
    coordinator = empty()
    for rank in (2, 0):
        coordinator.hear(rank, hello(rank), now=0.0)
        assert coordinator.turn(0.0) == []
    coordinator.hear(1, hello(1), now=0.0)
    welcome = Welcome((100, 101, 102), ("h0", "h1", "h2"))
    assert coordinator.turn(0.0) == [(0, welcome), (1, welcome), (2, welcome)]


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (hello(1, version="2"), "different versions of coordd (ranks 0, 2: 1; ranks 1: 2): make them equal"),
        (hello(1, digest="e"), "different settings (ranks 0, 2: d; ranks 1: e): make them equal"),
    ],
)
def test_ranks_that_do_not_fit_together_are_refused(odd, text):
    coordinator = empty()
    for rank in range(3):
        coordinator.hear(rank, odd if rank == 1 else hello(rank), now=0.0)
    assert {message.refusal for _, message in coordinator.turn(0.0)} == {f"the ranks have {text}"}


# Plans


def test_one_plan_goes_to_everybody():
    star = Star(3)
    for rank in star.ranks:
        announce(star, rank, W)
    star.turn()
    [plan] = star.down[0]
    assert plan.sequence == 1
    assert star.down[0] == star.down[1] == star.down[2]


def test_the_first_order_to_record_goes_to_everybody_once():
    coordinator = empty(2)
    start, stop = Recording(1, "folder"), Recording(2)
    told = []
    for rank, order in [(1, start), (0, start), (0, stop), (1, stop), (1, start)]:
        coordinator.hear(rank, order, now=0.0)
        told += coordinator.turn(0.0)
    assert told == [(0, start), (1, start), (0, stop), (1, stop)]


def test_without_news_nothing_is_said():
    star = Star(2)
    star.turn()
    announce(star, 0, W)
    assert star.turn() == []


def test_the_last_plan_stops_all_ranks_once():
    star = Star(2)
    announce(star, 0, W)
    announce(star, 1, W)
    for rank in star.ranks:
        star.coordinator.hear(rank, Goodbye(), now=0.0)
    first, last = said(star, Plan)
    assert (first.sequence, first.stop, last.sequence, last.stop) == (1, False, 2, True)
    assert star.turn() == []


# Failure


def test_the_first_failure_is_told_to_everybody_and_ends_the_planning():
    star = Star(2)
    star.coordinator.hear(1, Abort(Failure(1, "raised ValueError", "Traceback")), now=0.0)
    star.coordinator.hear(0, Abort(Failure(0, "raised PeerError")), now=0.0)
    announce(star, 0, W)
    announce(star, 1, W)
    star.down[1].clear()
    assert star.turn() == [Abort(Failure(1, "raised ValueError", "Traceback"))]
    assert list(star.down[1]) == [Abort(Failure(1, "raised ValueError", "Traceback"))]
    assert star.turn() == []


def test_a_lost_rank_is_a_failure_with_pid_and_host():
    star = Star(3)
    star.coordinator.hear(2, LOST, now=0.0)
    [abort] = said(star, Abort)
    assert abort.failure.rank == 2
    assert abort.failure.reason == "(pid 102 on h) died: its connection closed without a goodbye"


def test_a_rank_that_is_lost_before_it_came_is_a_failure():
    coordinator = empty()
    coordinator.hear(1, LOST, now=0.0)
    assert "(not yet arrived) died" in coordinator.turn(0.0)[0][1].failure.reason


def test_a_rank_that_dies_after_its_goodbye_is_a_failure_while_others_work():
    """They may still need data from it, and would wait for ever."""
    star = Star(2)
    star.coordinator.hear(1, Goodbye(), now=0.0)
    star.turn()
    star.coordinator.hear(1, LOST, now=0.0)
    assert [abort.failure.rank for abort in said(star, Abort)] == [1]


def test_connections_close_when_all_have_stopped():
    star = Star(2)
    for rank in star.ranks:
        star.coordinator.hear(rank, Goodbye(), now=0.0)
    star.turn()
    star.coordinator.hear(1, LOST, now=0.0)
    assert star.turn() == []


# Stalls


def test_those_who_are_missing_are_asked_and_their_answers_told_to_all():
    star = Star(3)
    announce(star, 0, W)
    announce(star, 1, W)
    star.turn()
    star.each(lambda rank: star.down[rank].clear())
    complain(star, 0, "w")
    star.turn()
    assert [list(messages) for messages in star.down] == [[], [], [Inquiry()]]
    answer = account(star, 2)
    [report] = said(star, StallReport)
    assert report == StallReport(5.0, (Waiting("w", "allreduce", (2,)),), (answer,))
    assert star.down[2][-1] == report
    assert star.coordinator.deadline is None


def test_who_does_not_answer_within_a_second_is_silent():
    star = Star(3)
    announce(star, 0, W)
    complain(star, 0, "w")
    star.turn()
    assert star.coordinator.deadline == 1.0
    answer = account(star, 1)
    star.now = 0.999
    assert said(star, StallReport) == []
    star.now = 1.0
    assert said(star, StallReport) == [StallReport(5.0, (Waiting("w", "allreduce", (1, 2)),), (answer,), silent=(2,))]


def test_complaints_of_several_ranks_join_one_report():
    star = Star(4)
    pairs = [allreduce("a", members=(0, 1)), allreduce("b", members=(2, 3))]
    announce(star, 0, pairs[0])
    announce(star, 2, pairs[1])
    complain(star, 0, "a", seconds=5.0)
    star.turn()
    star.now = 0.5
    complain(star, 2, "b", seconds=6.0)
    star.turn()
    account(star, 1)
    assert said(star, StallReport) == []
    account(star, 3)
    [report] = said(star, StallReport)
    assert report.seconds == 6.0
    assert report.waiting == (Waiting("a", "allreduce", (1,)), Waiting("b", "allreduce", (3,)))
    assert [answer.rank for answer in report.accounts] == [1, 3]


def test_nobody_is_asked_twice_or_called_silent_before_its_time():
    star = Star(3)
    announce(star, 0, W)
    complain(star, 0, "w")
    star.now = 0.9
    announce(star, 1, W, allreduce("v"))
    complain(star, 1, "w", "v")
    star.turn()
    assert [sum(isinstance(message, Inquiry) for message in messages) for messages in star.down] == [1, 1, 1]
    star.now = 1.0
    [report] = said(star, StallReport)
    assert report.silent == (1, 2)
    assert report.waiting[-1] == Waiting("v", "allreduce", (0, 2))


def test_the_askers_own_set_is_meant():
    star = Star(4)
    announce(star, 0, allreduce("w", members=(0, 1)))
    announce(star, 2, allreduce("w", members=(2, 3)))
    complain(star, 0, "w")
    star.now = 1.0
    assert said(star, StallReport)[0].waiting == (Waiting("w", "allreduce", (1,)),)


def test_what_is_agreed_upon_waits_for_its_data_so_everybody_is_asked():
    star = Star(2)
    announce(star, 0, W)
    announce(star, 1, W)
    star.turn()
    complain(star, 0, "w")
    assert said(star, Inquiry) == [Inquiry()]
    for rank in star.ranks:
        account(star, rank)
    assert said(star, StallReport)[0].waiting == (Waiting("w", "transfer"),)


def test_sends_and_receives_are_told_as_the_asker_knows_them():
    star = Star(2)
    complain(star, 0, matched=(Waiting("m", "recv", (1,)),))
    star.turn()
    account(star, 1)
    assert said(star, StallReport)[0].waiting == (Waiting("m", "recv", (1,)),)


def broken_lock(star: Star) -> None:
    """Rank 0 breaks a lock under which w waits, because that has taken too long."""
    for _ in range(3):
        for rank in star.ranks:
            star.submit(rank, W)
        star.settle()
    star.submit(0, W)
    star.report(0)
    star.unlock(0)
    star.hear(0)


def test_after_a_lock_was_broken_ranks_have_time_to_say_what_they_wait_for():
    star = Star(3, lock_steps=2)
    broken_lock(star)
    complain(star, 0, "w")
    star.turn()
    for rank in star.ranks:
        account(star, rank)
    assert said(star, StallReport) == []
    announce(star, 1, allreduce("v"))
    complain(star, 1, "v")
    star.now = 1.0
    assert [waiting.name for waiting in said(star, StallReport)[0].waiting] == ["w", "v"]


def test_after_a_lock_was_broken_nobody_is_blamed_before_that_either():
    star = Star(3, lock_steps=2, abort_seconds=10.0)
    broken_lock(star)
    complain(star, 0, matched=(Waiting("w", "locked allreduce", (2,)),), seconds=10.0)
    assert said(star, Abort) == []
    star.now = 1.0
    [abort] = said(star, Abort)
    assert abort.failure == Failure(2, "kept 'w' waiting for 10 s (stall_abort_seconds)")


def test_an_answer_that_nobody_asked_for_is_dropped():
    star = Star(2)
    account(star, 1)
    star.turn()
    assert star.turn() == []


def test_a_stall_that_is_too_long_ends_the_job():
    star = Star(3, abort_seconds=10.0)
    announce(star, 0, W)
    announce(star, 1, W)
    complain(star, 0, "w", seconds=9.9)
    assert said(star, Abort) == []
    complain(star, 0, "w", seconds=10.0)
    assert said(star, Abort) == [Abort(Failure(2, "kept 'w' waiting for 10 s (stall_abort_seconds)"))]


JOIN = Request(Kind.JOIN, "j", transient=True)


def waits_for_joining(*idle: float, abort_seconds: float = 0.0) -> list[list[Message]]:
    """What is said when rank 0 has joined for 5 s, and others have done nothing for so long; None does not answer."""
    star = Star(3, abort_seconds=abort_seconds)
    announce(star, 0, JOIN)
    complain(star, 0, "j")
    star.turn()
    for rank, seconds in enumerate(idle, 1):
        if seconds is not None:
            star.coordinator.hear(rank, Account(rank, idle=seconds), now=star.now)
    star.now += 1.0
    messages = star.turn()
    return [[message for message in messages if isinstance(message, kind)] for kind in (StallReport, Abort)]


@pytest.mark.parametrize("idle", [(0.0, 4.9), (1.0, 1.0)])
def test_who_has_joined_is_not_stalled_while_the_others_do_something(idle):
    reports, aborts = waits_for_joining(*idle, abort_seconds=1.0)
    assert [report.waiting for report in reports] == [()]
    assert aborts == []


@pytest.mark.parametrize("idle", [(0.0, 5.0), (9.0, 9.0), (0.0, None)])
def test_who_has_joined_is_stalled_when_another_does_nothing_or_does_not_answer(idle):
    reports, _ = waits_for_joining(*idle)
    assert [report.waiting for report in reports] == [(Waiting("j", "join", (1, 2)),)]
    _, aborts = waits_for_joining(*idle, abort_seconds=1.0)
    assert [abort.failure.reason for abort in aborts] == ["kept 'j' waiting for 5 s (stall_abort_seconds)"]


def test_a_question_of_one_rank_to_others_and_their_answers_are_handed_on():
    coordinator = empty()
    coordinator.hear(1, Inquiry((0, 2), number=7, asker=1), now=0.0)
    question = Inquiry(number=7, asker=1)
    assert coordinator.turn(0.0) == [(0, question), (2, question)]
    answer = Account(2, number=7, asker=1, answer=b"{}")
    coordinator.hear(2, answer, now=0.0)
    assert coordinator.turn(0.0) == [(1, answer)]
    assert coordinator.deadline is None
