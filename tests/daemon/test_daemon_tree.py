"""Daemons on several hosts, with foremen between them and rank 0: the same use and misuse, and the same words."""

from __future__ import annotations

import logging
import re
import threading

import numpy as np
import pytest

from coordd import api
from coordd.errors import MismatchError, PeerError, ShutdownError
from coordd.ops.messages import ReduceOp
from tests.local_ranks import local_ranks

WAIT = 10.0
SIZE = 7


def start(name: str, *, value: float = 1.0, shape: int = 2, members: tuple[int, ...] = ()):
    sets = {"process_set": api.ProcessSet(members)} if members else {}
    return api.operations().allreduce(np.full(shape, value), name=name, op=ReduceOp.SUM, **sets)


@pytest.fixture(params=[7, 4, 3], ids=lambda hosts: f"{hosts} hosts")
def ranks(request):
    """Up to three levels of foremen, for a rank may hear two others of its host and two hosts."""
    with local_ranks(SIZE, simulate_hosts=request.param, fan_in=2, lock_steps=0) as found:
        yield found


def test_steps_end_with_the_same_numbers_everywhere(ranks):
    def body(rank):
        found = []
        for step in range(5):
            handles = [start(f"w{number}", value=rank + number + step) for number in range(40)]
            found.append([handle.result(WAIT)[0] for handle in handles])
        return found

    total = sum(range(SIZE))
    wanted = [[total + SIZE * (number + step) for number in range(40)] for step in range(5)]
    assert ranks.each(body) == [wanted] * SIZE


def test_process_sets_cross_hosts(ranks):
    def body(rank):
        return start("p", value=rank, members=(1, 4, 6)).result(WAIT)[0] if rank in {1, 4, 6} else None

    assert ranks.each(body) == [None, 11, None, None, 11, None, 11]


def test_a_locked_plan_works_across_foremen():
    def body(rank):
        return [start("w", value=step).result(WAIT)[0] for step in range(30)]

    with local_ranks(SIZE, simulate_hosts=4, fan_in=2, lock_steps=2) as found:
        assert found.each(body) == [[SIZE * step for step in range(30)]] * SIZE


def test_a_mismatch_is_told_in_the_same_words_to_all(ranks):
    def body(rank):
        with pytest.raises(MismatchError) as caught:
            start("w", shape=3 if rank == 5 else 2).result(WAIT)
        start("after").result(WAIT)
        return re.sub(r"at \S+", "at X", str(caught.value))

    told = ranks.each(body)
    assert set(told) == {told[0]}
    assert "ranks disagree on the shape of 'w' (ranks 0-4, 6: (2,) at X rank 5: (3,) at X" in told[0]


def test_a_failure_below_reaches_every_rank_with_its_traceback(ranks):
    def body(rank):
        if rank == 6:
            raise ValueError("a bad batch")
        with pytest.raises(PeerError, match="rank 6 failed: ValueError") as caught:
            start("w").result(WAIT)
        return str(caught.value.__cause__)

    with pytest.raises(ValueError, match="a bad batch"):
        ranks.each(body)


def test_the_loss_of_a_rank_reaches_every_other_one(ranks):
    """The daemon of rank 5 ends as if its process had died, while the others wait for it."""

    def body(rank):
        if rank == 5:
            ranks.daemons[5].end(WAIT)
            return "gone"
        with pytest.raises(PeerError) as caught:
            start("w").result(WAIT)
        return (caught.value.rank, "died: its connection closed without a goodbye" in str(caught.value))

    assert ranks.each(body) == [(5, True)] * 5 + ["gone", (5, True)]


@pytest.mark.parametrize("culprit", [0, 2, 4])
def test_the_loss_of_one_to_whom_others_report_reaches_them_too(culprit):
    def body(rank):
        if rank == culprit:
            found.daemons[rank].end(WAIT)
            return culprit
        with pytest.raises(PeerError) as caught:
            start("w").result(WAIT)
        return caught.value.rank

    with local_ranks(SIZE, simulate_hosts=4, fan_in=2) as found:
        assert found.each(body) == [culprit] * SIZE


def test_who_leaves_early_fails_what_the_others_wait_for(ranks):
    def body(rank):
        if rank == 3:
            assert ranks.daemons[3].stop() in {True, False}
            return None
        with pytest.raises(ShutdownError, match="rank 3 left the job"):
            start("w").result(WAIT)
        return ranks.daemons[rank].stop()

    ranks.each(body)


def test_a_stall_names_who_is_missing():
    told = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "'w' (allreduce) waiting for rank 6\n  rank 6 has last submitted nothing" in record.getMessage():
                told.set()

    def body(rank):
        if rank == 6:
            assert told.wait(WAIT)
        return start("w").result(WAIT)[0]

    listener = Listener()
    logging.getLogger("coordd").addHandler(listener)
    try:
        with local_ranks(SIZE, simulate_hosts=4, fan_in=2, stall_seconds=0.5) as found:
            assert found.each(body) == [SIZE] * SIZE
    finally:
        logging.getLogger("coordd").removeHandler(listener)
