"""Receives of what will never be sent: ranks that wait for each other, or for one that has left, are told."""

from __future__ import annotations

import re
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd import api
from coordd.daemon import blocked_script
from coordd.errors import ArgumentError, MismatchError, RefusedError, ShutdownError
from coordd.negotiation.deadlock import BlockedRanks
from coordd.ops.messages import Blocked, Expecting, Goodbye, Left, Traffic, Unmatched
from tests.local_ranks import local_ranks
from tests.star import Star, allreduce, outcome

WAIT = 10.0


def receives(name: str, sender: int, **about) -> Blocked:
    return Blocked(name, peer=sender, **about)


class Circle(Star):
    """Rank 0 waits for "x", which rank 1 has not submitted; rank 1 waits to receive "m" from rank 0."""

    def __init__(self, size: int = 2, *, heard: int = 0, sent: int = 0) -> None:
        super().__init__(size)
        self.handle = self.submit(0, allreduce("x", 2))
        self.report(0)
        self.hear(0)
        self.coordinator.hear(0, Blocked("x", sent=((0, 1, sent),)), now=0.0)
        self.coordinator.hear(1, receives("m", 0, heard=heard), now=0.0)


def test_a_receive_and_a_collective_that_wait_for_each_other_fail():
    star = Circle()
    plan = star.decide()
    [unsent] = plan.unmatched
    assert (unsent.rank, unsent.name, unsent.peer, unsent.number) == (1, "m", 0, 0)
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
    error = star.members[1].deadlocks.error(Unmatched(1, "m", 0, 0, "they wait"), 1)
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
    assert [(unsent.rank, unsent.peer) for unsent in star.decide().unmatched] == [(0, 1), (1, 2), (2, 0)]
    assert star.decide() is None


def test_a_receive_from_a_rank_that_goes_on_waits():
    star = Star(3)
    star.coordinator.hear(0, receives("m", 1), now=0.0)
    star.coordinator.hear(1, receives("m", 2), now=0.0)
    assert star.decide() is None
    star.coordinator.hear(1, Blocked(), now=0.0)
    star.coordinator.hear(2, receives("m", 0), now=0.0)
    assert star.decide() is None


@pytest.mark.parametrize("first", ["question", "goodbye"])
def test_ranks_hear_once_of_one_that_has_left_if_any_has_a_message_of_it_under_way(first):
    star, traffic = Star(3), Traffic(sent=((0, 1), (2, 5)))
    told = [(0, Expecting((1,))), (1, Goodbye(traffic=traffic))]
    for rank, message in told if first == "question" else told[::-1]:
        assert star.decide() is None
        star.coordinator.hear(rank, message, now=0.0)
    assert star.decide().left == (Left(1, traffic),)
    star.coordinator.hear(2, Expecting((1,)), now=0.0)
    assert star.decide() is None


def test_nobody_hears_of_a_rank_that_has_left_if_nobody_asks():
    star = Star(2)
    star.coordinator.hear(1, Goodbye(), now=0.0)
    assert star.decide() is None


@given(st.sets(st.integers(1, 3)))
def test_a_send_waits_in_vain_if_its_receiver_is_blocked_and_has_no_use_for_what_has_come(unclaimed):
    star = Star(2)
    star.coordinator.hear(0, Blocked("m", peer=1, number=2), now=0.0)
    told = tuple((1, 0, number) for number in sorted(unclaimed))
    star.coordinator.hear(1, receives("n", 0, heard=3, unclaimed=told, sent=()), now=0.0)
    assert star.decide() is None  # the third message of rank 0 may be under way to rank 1
    star.coordinator.hear(0, Blocked("m", peer=1, number=2, sent=((0, 1, 3),)), now=0.0)
    plan = star.decide()
    if 2 not in unclaimed:
        assert plan is None
        return
    assert [(each.rank, each.name, each.peer, each.number) for each in plan.unmatched] == [
        (0, "m", 1, 2),
        (1, "n", 0, 0),
    ]
    assert "rank 0 for 'm' (send), not received by rank 1; rank 1 for 'n' (recv), not sent" in plan.unmatched[0].error


def test_what_a_rank_has_taken_meanwhile_does_not_count():
    ranks = BlockedRanks()
    ranks.enter(0b01, Blocked("m", peer=1, number=2))
    ranks.enter(0b10, Blocked("x", unclaimed=((1, 0, 1), (1, 0, 2))))
    assert [wait.number for wait in ranks.messages(ranks.take())] == [2]
    ranks.enter(0b10, Blocked("x", unclaimed=((1, 0, 1),)))
    assert [*ranks.messages(ranks.take())] == []


def test_a_rank_that_has_said_anything_new_is_judged_by_that():
    ranks = BlockedRanks()
    ranks.enter(0b01, receives("m", 1))
    ranks.enter(0b01, receives("n", 1, heard=2))
    ranks.enter(0b10, Blocked("x", sent=((1, 0, 2),)))
    assert [wait.waiting.name for wait in ranks.messages(ranks.take())] == ["n"]


SETTINGS = {"stall_check": False}
LINKS = pytest.mark.parametrize("link", [{}, {"simulate_hosts": 2}], ids=["near", "far"])


def await_told(daemon) -> None:
    """Waits until the script of a rank counts as blocked."""
    deadline = time.monotonic() + WAIT
    while not daemon._loop._blocks.told:
        assert time.monotonic() < deadline, "it does not count as blocked"
        threading.Event().wait(0.01)


def recv(source: int, name: str = "m"):
    return api.operations().recv(None, source, name=name)


def send(destination: int, name: str = "m", *, size: int = 2):
    return api.operations().send(np.arange(float(size)), destination, name=name)


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
def test_ranks_that_send_to_each_other_before_they_receive_are_told_and_go_on(link):
    """As MPI has it, what is large is sent only when it is received."""
    with local_ranks(2, **SETTINGS, **link) as ranks:

        def body(rank):
            with pytest.raises(
                MismatchError, match="rank 0 for 'm' \\(send\\), not received by rank 1; rank 1 for 'm'"
            ):
                send(1 - rank, size=1 << 20).result()
            api.operations().barrier().result(WAIT)
            again = send(1 - rank, size=3)
            found = recv(1 - rank).result(WAIT).tolist()  # not what has failed
            again.result(WAIT)
            return found

        assert ranks.each(body) == [[0.0, 1.0, 2.0]] * 2


@LINKS
def test_a_send_and_a_barrier_that_wait_for_each_other_are_told_and_go_on(link):
    with local_ranks(2, **SETTINGS, **link) as ranks:

        def body(rank):
            ops = api.operations()
            with pytest.raises(MismatchError, match="rank 0 for 'm' \\(send\\), not received by rank 1"):
                (send(1, size=1 << 20) if rank == 0 else ops.barrier()).result()
            ops.barrier().result(WAIT)
            if rank == 0:
                send(1).result(WAIT)
                return [0.0, 1.0]
            return recv(0).result(WAIT).tolist()

        assert ranks.each(body) == [[0.0, 1.0]] * 2


@LINKS
def test_a_send_whose_receiver_comes_late_is_waited_for(link):
    with local_ranks(2, **SETTINGS, **link) as ranks:

        def body(rank):
            if rank == 0:
                send(1, size=1 << 20).result()
            else:
                await_told(ranks.daemons[0])
                assert len(recv(0).result(WAIT)) == 1 << 20
            api.operations().barrier().result(WAIT)

        ranks.each(body)


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


def by_polling(handle):
    deadline = time.monotonic() + WAIT
    while not handle.poll():
        assert time.monotonic() < deadline, "it does not end"
        threading.Event().wait(0.01)


def by_callback(handle):
    ended = threading.Event()
    handle.add_done_callback(lambda _: ended.set())
    assert ended.wait(WAIT)


def in_a_thread(handle):
    thread = threading.Thread(target=handle.wait)
    thread.start()
    thread.join(WAIT)
    assert not thread.is_alive()


@LINKS
@pytest.mark.parametrize("wait", [by_polling, by_callback, in_a_thread])
@pytest.mark.parametrize("what", ["receive", "send"])
def test_messages_to_and_from_a_rank_that_has_left_end_however_they_are_awaited(what, wait, link):
    with local_ranks(2, **SETTINGS, **link) as ranks:

        def body(rank):
            if rank == 0:
                handle = recv(1) if what == "receive" else send(1, size=1 << 20)
                wait(handle)
                with pytest.raises(ShutdownError, match="rank 1 left the job while others still waited for 'm'"):
                    handle.result()
                with pytest.raises(ShutdownError, match="rank 1 left"):  # and what begins now ends at once
                    (recv(1) if what == "receive" else send(1)).result(WAIT)
            ranks.daemons[rank].stop()

        ranks.each(body)


@LINKS
@pytest.mark.parametrize("first", [True, False])
def test_a_send_to_a_rank_that_has_left_and_still_wants_another_message_ends(link, first):
    """Which of the messages it wants the sender cannot tell, if it has not heard of the leave."""
    with local_ranks(2, **SETTINGS, **link) as ranks:

        def body(rank):
            daemon = ranks.daemons[rank]
            if rank == 1:
                wanted = recv(0, "a")
                threading.Thread(target=daemon.stop).start()
                while not daemon._loop._said_goodbye:
                    threading.Event().wait(0.01)
                return wanted
            while not ranks.daemons[1]._loop._said_goodbye:
                threading.Event().wait(0.01)
            ended = [send(1, "a")] if first else []
            ended.append(send(1, "a" if first else "b", size=1 << 20))
            for handle in ended:
                assert handle.wait(WAIT)
            daemon.stop()
            return None

        wanted = ranks.each(body)[1]
        assert wanted.wait(WAIT)
        assert (wanted.error() is None) == first


def assert_usable(step: int, *, refuses: bool) -> None:
    if refuses:
        raise ValueError(step)


@LINKS
def test_what_is_refused_on_one_side_takes_its_turn_on_the_other(link):
    """Else the next message of that name would be matched with it."""
    with local_ranks(2, **SETTINGS, **link) as ranks:

        def body(rank):
            peer, ops, found = 1 - rank, api.operations(), []
            for step in range(4):
                try:
                    with ops.refusing(peer, "m", outgoing=rank == 0):
                        assert_usable(step, refuses=step == 1 + rank)
                        handle = ops.send(np.full(2, step), 1, name="m") if rank == 0 else recv(0)
                    found.append(handle.result(WAIT)[0])
                except (ValueError, RefusedError) as error:
                    found.append(str(error))
            return found

        _, received = ranks.each(body)
        assert (received[0], received[3]) == (0, 3)
        assert re.fullmatch(r"rank 0 refused to send 'm' at \S+test_receives.py:\d+: ValueError: 1", received[1])
        assert received[2] == "2"  # its own error


def test_a_peer_that_there_is_not_can_be_told_nothing():
    with local_ranks(1) as ranks:

        def body(_):
            refusing = api.operations().refusing(7, "m", outgoing=True)
            with pytest.raises(ArgumentError, match="there is no rank 7"), refusing:
                send(7)

        ranks.each(body)


def test_a_thread_that_only_sends_and_receives_counts_as_one_that_may_do_so_again():
    with local_ranks(1) as ranks:

        def body(_):
            send(0)
            return blocked_script._submitters[threading.get_ident()] > 0, recv(0).result(WAIT).tolist()

        assert ranks.each(body) == [(True, [0.0, 1.0])]


def test_messages_of_others_keep_no_rank_from_being_told():
    with local_ranks(3, **SETTINGS) as ranks:
        over = threading.Event()

        def body(rank):
            ops, count = api.operations(), 0
            if rank == 2:
                while not over.wait(0.2):
                    send(1, f"news {count}")
                    count += 1
                return count
            try:
                with pytest.raises(MismatchError, match="ranks wait for each other"):
                    (ops.barrier() if rank == 0 else recv(0)).result()
            finally:
                over.set()
            return 0

        told = ranks.each(body)[2]
        for count in range(told):
            with api.using(ranks.daemons[1]):
                recv(2, f"news {count}").result(WAIT)


def test_a_sender_that_takes_its_time_is_waited_for():
    with local_ranks(2, **SETTINGS) as ranks:

        def body(rank):
            ops = api.operations()
            if rank == 0:
                found = recv(1).result().tolist()
                ops.barrier().result()
                return found
            await_told(ranks.daemons[0])
            send(0)
            ops.barrier().result()
            return [0.0, 1.0]

        assert ranks.each(body) == [[0.0, 1.0]] * 2
