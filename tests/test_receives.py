"""Receives of what will never be sent: ranks that wait for each other, or for one that has left, are told."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd import api
from coordd.deadlock import BlockedRanks
from coordd.errors import MismatchError, ShutdownError
from coordd.messages import Blocked, Goodbye, Unsent
from tests.local_ranks import local_ranks
from tests.star import Star, allreduce, outcome

WAIT = 10.0


def receives(name: str, sender: int, *, heard: int = 0, seen: int = 0, sent=()) -> Blocked:
    return Blocked(name, seen, sender=sender, heard=heard, sent=sent)


class Circle(Star):
    """Rank 0 waits for "x", which rank 1 has not submitted; rank 1 waits to receive "m" from rank 0."""

    def __init__(self, size: int = 2, *, heard: int = 0, sent: int = 0) -> None:
        super().__init__(size)
        self.handle = self.submit(0, allreduce("x", 2))
        self.report(0)
        self.hear(0)
        self.coordinator.hear(0, Blocked("x", sent=((1, sent),)), now=0.0)
        self.coordinator.hear(1, receives("m", 0, heard=heard), now=0.0)


def test_a_receive_and_a_collective_that_wait_for_each_other_fail():
    star = Circle()
    plan = star.decide()
    [unsent] = plan.unsent
    assert (unsent.rank, unsent.name, unsent.sender) == (1, "m", 0)
    wanted = "rank 0 for 'x' (allreduce), not submitted by rank 1; rank 1 for 'm' (recv), not sent by rank 0"
    assert f"ranks wait for each other: {wanted}; let all" in unsent.error
    star.each(star.follow)
    assert outcome(star.handle).startswith(f"MismatchError: {unsent.error}")


@given(st.integers(0, 3), st.integers(0, 3))
def test_a_message_that_is_under_way_ends_the_wait_by_itself(heard, sent):
    """The sender has sent as much when it began to wait; what the receiver has not heard of that is on its way."""
    plan = Circle(heard=heard, sent=sent).decide()
    assert (plan is not None) == (heard == sent)


def test_a_rank_whose_receive_has_failed_begins_anew():
    """What the others have given up it owes only if it announces it before it has heard."""
    star = Circle()
    star.decide()
    star.each(star.follow)
    assert outcome(star.handle).startswith("MismatchError")
    error = star.members[1].deadlocks.error(Unsent(1, "m", 0, "they wait"), 1)
    assert star.members[1].deadlocks.last(()) == -1
    error.when_heard()
    assert star.members[1].deadlocks.last(()) == star.members[0].deadlocks.last(()) == 1
    handles = [star.submit(rank, allreduce("x", 2)) for rank in star.ranks]
    star.each(star.report)
    star.each(star.hear)
    star.decide()
    star.each(star.follow)
    star.each(star.land)
    assert [outcome(handle) for handle in handles] == ["done"] * 2


def test_what_a_rank_has_announced_before_its_receive_fails_belongs_to_what_has_failed():
    star = Circle()
    late = star.submit(1, allreduce("x", 2))
    star.report(1)
    star.decide()
    star.each(star.hear)
    star.decide()
    star.each(star.follow)
    assert outcome(late).startswith("MismatchError: ranks wait for each other")


def test_ranks_that_only_receive_from_each_other_fail():
    star = Star(3)
    for rank in star.ranks:
        star.coordinator.hear(rank, receives("m", (rank + 1) % 3), now=0.0)
    assert [(unsent.rank, unsent.sender) for unsent in star.decide().unsent] == [(0, 1), (1, 2), (2, 0)]
    assert star.decide() is None


def test_a_receive_from_a_rank_that_goes_on_waits():
    star = Star(3)
    star.coordinator.hear(0, receives("m", 1), now=0.0)
    star.coordinator.hear(1, receives("m", 2), now=0.0)
    assert star.decide() is None
    star.coordinator.hear(1, Blocked(), now=0.0)
    star.coordinator.hear(2, receives("m", 0), now=0.0)
    assert star.decide() is None


@pytest.mark.parametrize("first", ["receiver", "sender"])
@pytest.mark.parametrize("sent", [0, 1])
def test_a_receive_from_a_rank_that_has_left_fails_once_all_that_it_has_sent_has_come(first, sent):
    star = Star(3)
    told = [(0, receives("m", 1)), (1, Goodbye(sent=((0, sent), (2, 5))))]
    for rank, message in told if first == "receiver" else told[::-1]:
        star.coordinator.hear(rank, message, now=0.0)
    plan = star.decide()
    if sent:
        assert plan is None
        star.coordinator.hear(0, receives("m", 1, heard=1), now=0.0)
        plan = star.decide()
    assert plan.unsent == (Unsent(0, "m", 1),)
    error = star.members[0].deadlocks.error(plan.unsent[0], plan.sequence)
    assert isinstance(error, ShutdownError)
    assert error.ranks == (1,)


def test_a_rank_that_has_said_anything_new_is_judged_by_that():
    ranks = BlockedRanks()
    ranks.enter(0b01, receives("m", 1))
    ranks.enter(0b01, receives("n", 1, heard=2))
    ranks.enter(0b10, Blocked("x", sent=((0, 2),)))
    assert [(rank, blocked.name) for rank, blocked in ranks.receives(ranks.take())] == [(0, "n")]


SETTINGS = {"stall_check": False}
LINKS = pytest.mark.parametrize("link", [{}, {"simulate_hosts": 2}], ids=["near", "far"])


def recv(source: int, name: str = "m"):
    return api.operations().recv(None, source, name=name)


def send(destination: int, name: str = "m"):
    return api.operations().send(np.arange(2.0), destination, name=name)


@LINKS
def test_ranks_that_receive_from_each_other_are_told_and_go_on(link):
    with local_ranks(2, **SETTINGS, **link) as ranks:

        def body(rank):
            with pytest.raises(MismatchError, match="rank 0 for 'm' \\(recv\\), not sent by rank 1; rank 1 for 'm'"):
                recv(1 - rank).result()
            sent = send(1 - rank)
            found = recv(1 - rank).result().tolist()
            sent.result(WAIT)
            return found

        assert ranks.each(body) == [[0.0, 1.0]] * 2


@LINKS
def test_a_receive_and_a_barrier_that_wait_for_each_other_are_told_and_go_on(link):
    with local_ranks(3, **SETTINGS, **link) as ranks:

        def body(rank):
            ops = api.operations()
            unawaited = recv(0, "later") if rank == 1 else None  # what only lies there keeps no rank from being told
            with pytest.raises(MismatchError, match="ranks wait for each other"):
                (recv(0) if rank == 2 else ops.barrier()).result()
            for each in (1, 2) if rank == 0 else ():
                send(each, "later").result(WAIT)
            found = (unawaited or recv(0, "later")).result().tolist() if rank else []
            ops.barrier().result()
            return found

        assert ranks.each(body) == [[], [0.0, 1.0], [0.0, 1.0]]


@LINKS
def test_who_receives_from_a_rank_that_has_left_is_told(link):
    with local_ranks(2, **SETTINGS, **link) as ranks:

        def body(rank):
            if rank == 0:
                assert recv(1).result().tolist() == [0.0, 1.0]
                with pytest.raises(ShutdownError, match="rank 1 left the job while others still waited for 'm'"):
                    recv(1).result()
            else:
                send(0).result(WAIT)
            ranks.daemons[rank].stop()

        ranks.each(body)


def test_a_sender_that_takes_its_time_is_waited_for():
    with local_ranks(2, **SETTINGS) as ranks:

        def body(rank):
            ops = api.operations()
            if rank == 0:
                found = recv(1).result().tolist()
                ops.barrier().result()
                return found
            watch = ranks.daemons[0]._loop._blocks
            while not watch.told:  # the other one counts as blocked
                pass
            send(0)
            ops.barrier().result()
            return [0.0, 1.0]

        assert ranks.each(body) == [[0.0, 1.0]] * 2
