"""Every operation goes on, and every end comes, where the stall check is off: reporting is no part of progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from coordd import api
from coordd.errors import MismatchError
from coordd.ops.messages import ReduceOp
from tests.local_ranks import local_ranks

WAIT = 10.0
STEPS = 12
SETTINGS = {"stall_check": False, "cycle_ms": 200.0}  # the window keeps the two tensors of a step together


def start(name: str, value: float = 1.0):
    return api.operations().allreduce(np.full(3, value), name=name, op=ReduceOp.SUM)


def await_sleep(daemon) -> None:
    """Waits until the daemon has nothing to do, and remembers no wait: then what is submitted stays together."""
    inbox, pause, deadline = daemon.status.parts.inbox, threading.Event(), time.monotonic() + WAIT
    while not inbox._deep or inbox._hurried:
        assert time.monotonic() < deadline, "the daemon does not sleep"
        pause.wait(0.0005)


def lock_in(rank: int, daemon, together: threading.Barrier) -> None:
    """Repeats a step until its two tensors are one bucket of a locked plan."""
    for _ in range(STEPS):
        await_sleep(daemon)
        handles = [start("a"), start("b")]
        assert [handle.result(WAIT)[0] for handle in handles] == [2.0, 2.0]
    assert daemon.status.parts.member.lock is not None, f"no plan is locked on rank {rank}"
    assert daemon.status.parts.member.lock.buckets == 1
    together.wait(WAIT)  # who goes on breaks it, on all ranks


def by_polling(handle) -> None:
    pause, deadline = threading.Event(), time.monotonic() + WAIT
    while not handle.poll():
        assert time.monotonic() < deadline, f"{handle} does not end"
        pause.wait(0.001)


def by_callback(handle) -> None:
    landed = threading.Event()
    handle.add_done_callback(lambda _: landed.set())
    assert landed.wait(WAIT), f"{handle} does not end"


def by_waiting(handle) -> None:
    handle.result(WAIT)


WAYS = {"poll": by_polling, "callback": by_callback, "wait": by_waiting}


@pytest.mark.parametrize("shared_memory", [True, False], ids=["memory", "lane"])
@pytest.mark.parametrize("way", WAYS)
def test_half_a_locked_bucket_is_reduced_however_its_result_is_awaited(way, shared_memory):
    await_: Callable = WAYS[way]
    with local_ranks(2, **SETTINGS, shared_memory=shared_memory) as ranks:
        together = threading.Barrier(2)

        def body(rank):
            lock_in(rank, ranks.daemons[rank], together)
            await_sleep(ranks.daemons[rank])
            first = start("a")
            await_(first)  # what comes now may need its value
            second = start("b", float(first.result(0.0)[0]))
            await_(second)
            assert second.result(0.0)[0] == 4.0

        ranks.each(body)


def test_half_a_locked_bucket_is_reduced_for_a_rank_that_has_all_of_it():
    """Rank 1 has to hear from rank 0 before it goes on, which waits for what rank 1 holds back."""
    with local_ranks(2, **SETTINGS) as ranks:
        together = threading.Barrier(2)

        def body(rank):
            lock_in(rank, ranks.daemons[rank], together)
            await_sleep(ranks.daemons[rank])
            first = start("a")
            if rank == 1:
                threading.Event().wait(0.2)  # by then it is taken in, and to wait for a message does not tell of it
                api.operations().recv(np.empty(1), 0, name="go").result(WAIT)
            second = start("b")
            assert first.result(WAIT)[0] == 2.0
            if rank == 0:
                api.operations().send(np.ones(1), 1, name="go").result(WAIT)
            assert second.result(WAIT)[0] == 2.0

        ranks.each(body)


def test_a_locked_plan_outlasts_steps_without_a_pause():
    with local_ranks(2, **SETTINGS) as ranks:
        together = threading.Barrier(2)

        def body(rank):
            for _ in range(5):
                lock_in(rank, ranks.daemons[rank], together)
            return ranks.daemons[rank].status.parts.member.lock.lasted

        assert min(ranks.each(body)) > 2 * STEPS


@pytest.mark.parametrize("what", ["receive", "receive from afar", "send"])
def test_leaving_does_not_wait_for_messages_that_nobody_takes(what):
    settings = {"simulate_hosts": 2} if what == "receive from afar" else {}
    with local_ranks(2, **SETTINGS, **settings) as ranks:

        def body(rank):
            api.operations().barrier().result(WAIT)
            if rank == 0:
                ops = api.operations()
                handle = ops.send(np.ones(2), 1, name="x") if what == "send" else ops.recv(None, 1, name="x")
            since = time.monotonic()
            assert ranks.daemons[rank].stop()
            assert ranks.daemons[rank].status.ended.wait(WAIT)
            if rank == 0:
                assert handle.wait(0.0)
            return time.monotonic() - since

        assert max(ranks.each(body)) < 4.0


@pytest.mark.parametrize("shared_memory", [True, False], ids=["memory", "lane"])
def test_ranks_that_wait_for_each_others_words_on_locked_buckets_are_told(shared_memory):
    """Each has given its word on the bucket that it waits for, so no bucket is partly filled."""

    def begin(name: str):
        return api.operations().allreduce(np.ones(40_000), name=name, op=ReduceOp.SUM)

    with local_ranks(2, stall_check=False, shared_memory=shared_memory) as ranks:

        def body(rank):
            for _ in range(3 * STEPS):
                for handle in [begin("a"), begin("b")]:
                    handle.result(WAIT)
            lock = ranks.daemons[rank].status.parts.member.lock
            assert lock is not None
            assert lock.buckets == 2
            with pytest.raises(MismatchError, match="ranks wait for each other"):
                begin("ab"[rank]).result()
            api.operations().barrier().result()
            return [handle.result(WAIT)[0] for handle in [begin("a"), begin("b")]]

        assert ranks.each(body) == [[2.0, 2.0]] * 2
