"""What is said of operations that wait too long: by whom, for whom, and what those do."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from coordd import api
from coordd.control.local import MemoryControl
from coordd.errors import PeerError
from coordd.ops.messages import Account
from coordd.ops.process_sets import ProcessSet
from tests.local_ranks import each_rank, local_ranks

WAIT = 10.0


def start(name: str):
    return api.operations().allreduce(np.ones(2), name=name)


class Log:
    """Waits for a text in the log."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    def await_text(self, text: str, *, times: int = 1) -> list[str]:
        deadline, pause = time.monotonic() + WAIT, threading.Event()
        while len(found := [line for line in self._caplog.messages if text in line]) < times:
            assert time.monotonic() < deadline, f"{text!r} is not among {self._caplog.messages}"
            pause.wait(0.01)
        return found


@pytest.fixture
def log(caplog):
    return Log(caplog)


def test_every_rank_is_told_who_is_missing_and_what_that_one_does(log):
    def body(rank):
        start("early").result(WAIT)
        if rank == 2:
            log.await_text("'b' (allreduce), 'a' (allreduce) waiting for rank 2", times=3)
            log.await_text("'mine' (allreduce) waiting for ranks 0, 2", times=3)
        handles = [start(name) for name in ("b", "a")]
        if rank == 0:
            handles[0].result(WAIT)
        handles.append(start("mine"))
        for handle in handles:
            handle.result(WAIT)

    each_rank(3, body, stall_seconds=0.1)
    (told, *_) = log.await_text("waiting for rank 2; submitted here at")
    assert f"'b' (allreduce), 'a' (allreduce) waiting for rank 2; submitted here at {__file__}:" in told
    assert told.startswith("no progress for 0.")
    assert f"rank 2 has last submitted 'early' at {__file__}:" in told
    assert "; its main thread is at\n" in told
    assert "in test_every_rank_is_told_who_is_missing_and_what_that_one_does: " in told


def test_sends_and_receives_are_told_with_their_peers(log):
    def body(rank):
        operations = api.operations()
        if rank == 0:
            handle = operations.recv(None, 1, name="activations")
            log.await_text("'activations' (recv) waiting for rank 1", times=2)
            api.operations().barrier().result(WAIT)
            return handle.result(WAIT).tolist()
        operations.barrier().result(WAIT)
        operations.send(np.ones(1), 0, name="activations").result(WAIT)
        return None

    assert each_rank(2, body, stall_seconds=0.1)[0] == [1.0]


def test_who_has_joined_waits_while_the_others_go_on_and_no_longer(log, caplog):
    def body(rank):
        if rank == 0:
            return api.operations().join().result(WAIT)
        pause = threading.Event()
        for step in range(10):
            start(f"step {step}").result(WAIT)
            pause.wait(0.1)
        assert "(join)" not in caplog.text
        log.await_text("(join) waiting for rank 1")
        return api.operations().join().result(WAIT)

    assert each_rank(2, body, stall_seconds=0.5) == [1, 1]


@pytest.mark.parametrize("way", ["a set of their own", "sends"])
def test_who_has_joined_is_patient_with_what_the_others_do_without_it(way, caplog):
    def body(rank):
        operations = api.operations()
        if rank == 0:
            return operations.join().result(WAIT)
        pause, other = threading.Event(), 3 - rank
        for step in range(12):
            if way == "sends":
                sent = operations.send(np.ones(1), other, name=f"{step}")
                operations.recv(None, other, name=f"{step}").result(WAIT)
                sent.result(WAIT)
            else:
                operations.allreduce(np.ones(1), name=f"{step}", process_set=ProcessSet([1, 2])).result(WAIT)
            pause.wait(0.1)
        return operations.join().result(WAIT)

    (last,) = {int(rank) for rank in each_rank(3, body, stall_seconds=0.3, stall_abort_seconds=0.6)}
    assert last in {1, 2}
    assert "no progress" not in caplog.text


def test_who_has_joined_ends_the_job_when_another_does_nothing_for_too_long():
    def body(rank):
        if rank == 0:
            with pytest.raises(PeerError, match=r"rank 1 kept 'join.noname.0' waiting for \d s"):
                api.operations().join().result(WAIT)
        else:
            daemon, pause = api.operations().daemon, threading.Event()
            while not daemon.failing:
                pause.wait(0.01)

    each_rank(2, body, stall_seconds=0.3, stall_abort_seconds=0.6)


def test_a_rank_that_does_not_answer_is_told(log, monkeypatch):
    """Its answer gets lost here; a process that is stopped would give none, either."""
    send = MemoryControl.send

    def lossy(control, rank, message):
        if not isinstance(message, Account):
            send(control, rank, message)

    monkeypatch.setattr(MemoryControl, "send", lossy)

    def body(rank):
        if rank == 0:
            return start("w").result(WAIT)
        log.await_text("rank 1 does not answer: the process is stopped, dead, or holds Python's lock")
        return start("w").result(WAIT)

    each_rank(2, body, stall_seconds=0.1)


def test_a_coordinator_that_does_not_answer_is_told(log, monkeypatch):
    from coordd.ops.messages import Overdue

    send = MemoryControl.send

    def lossy(control, rank, message):
        if not isinstance(message, Overdue):
            send(control, rank, message)

    monkeypatch.setattr(MemoryControl, "send", lossy)

    def body(rank):
        if rank == 1:
            return start("w").result(WAIT)
        (told,) = log.await_text("does not answer")
        assert "waiting for 'w', and rank 0, the coordinator (pid " in told
        return start("w").result(WAIT)

    with local_ranks(2, stall_seconds=0.1) as ranks:
        ranks.each(body)


def test_reports_come_more_and_more_rarely(log, caplog):
    def body(rank):
        if rank == 1:
            pause = threading.Event()
            pause.wait(1.0)
        return start("w").result(WAIT)

    with local_ranks(2, stall_seconds=0.1) as ranks:
        ranks.each(body)
    log.await_text("waiting for rank 1")
    reports = [message for message in caplog.messages if "waiting for rank 1" in message]
    assert len(reports) <= 2 * 4  # on two ranks: after 0.1, 0.2, 0.4 and 0.8 seconds


def test_a_wait_beyond_the_limit_ends_the_job():
    def body(rank):
        if rank == 0:
            with pytest.raises(PeerError, match=r"rank 1 kept 'w' waiting for 0 s \(stall_abort_seconds\)") as caught:
                start("w").result(WAIT)
            return caught.value.rank
        with pytest.raises(PeerError, match="rank 1 kept 'w' waiting"):
            api.operations().recv(None, 0, name="never").result(WAIT)
        return None

    assert each_rank(2, body, stall_seconds=0.05, stall_abort_seconds=0.1)[0] == 1


def test_the_check_can_be_turned_off(caplog):
    def body(rank):
        if rank == 1:
            pause = threading.Event()
            pause.wait(0.3)
        return start("w").result(WAIT)

    each_rank(2, body, stall_check=False, stall_seconds=0.05)
    assert "no progress" not in caplog.text


def test_a_wait_beyond_the_limit_ends_the_job_where_nothing_is_reported(caplog):
    def body(rank):
        if rank == 0:
            with pytest.raises(PeerError, match=r"rank 1 kept 'w' waiting for 0 s \(stall_abort_seconds\)"):
                start("w").result(WAIT)
        else:
            with pytest.raises(PeerError, match="rank 1 kept 'w' waiting"):
                api.operations().recv(None, 0, name="never").result(WAIT)

    each_rank(2, body, stall_check=False, stall_abort_seconds=0.2)
    assert "no progress" not in caplog.text


@pytest.mark.parametrize("stopped", [False, True])
def test_a_wait_beyond_the_limit_ends_the_job_where_the_coordinator_does_not_answer(stopped, monkeypatch):
    """What it is asked gets lost here; a process that is stopped does not read it, either."""
    from coordd.ops.messages import Overdue

    send = MemoryControl.send

    def lossy(control, rank, message):
        if not isinstance(message, Overdue):
            send(control, rank, message)

    monkeypatch.setattr(MemoryControl, "send", lossy)
    monkeypatch.setattr("coordd.daemon.stall_inspector.is_stopped", lambda _: stopped)
    state = "its process is stopped" if stopped else "it is the coordinator"

    def body(rank):
        text = rf"rank 0 does not answer, and kept 'w' waiting for \d s \(stall_abort_seconds\): {state}"
        if rank == 1:
            with pytest.raises(PeerError, match=text) as caught:
                start("w").result(WAIT)
            return caught.value.rank
        daemon, pause = api.operations().daemon, threading.Event()
        while not daemon.failing:
            pause.wait(0.01)
        return daemon.blame(WAIT).rank

    assert each_rank(2, body, stall_seconds=0.1, stall_abort_seconds=0.3) == [0, 0]
