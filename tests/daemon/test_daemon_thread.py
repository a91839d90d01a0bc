"""The daemon's thread is never blocked by user code that runs on it, and its end resolves every handle."""

from __future__ import annotations

import os
import sys
import threading
import time

import numpy as np
import pytest
import torch

import coordd
import coordd.torch as cd
from coordd import api
from coordd.config import Config
from coordd.daemon import event_loop
from coordd.daemon.daemon import Daemon
from coordd.daemon.message_queue import Inbox
from coordd.daemon.rendezvous import local_world
from coordd.daemon.wakeup import Bell
from coordd.errors import CoorddError, DeadlockError, ShutdownError
from coordd.ops.handles import Handle
from coordd.ops.messages import ReduceOp
from tests.local_ranks import local_ranks
from tests.torch_plugin.training import together

WAIT = 10.0

BLOCKING = {
    "result": lambda daemon: start("inner").result(),
    "result with a limit": lambda daemon: start("inner").result(WAIT),
    "wait": lambda daemon: start("inner").wait(),
    "arrays": lambda daemon: coordd.allreduce(np.ones(2), name="inner"),
    "barrier": lambda daemon: coordd.barrier(),
    "tensors": lambda daemon: cd.allreduce(torch.ones(2), name="inner"),
    "objects": lambda daemon: cd.broadcast_object({"x": 1}, name="inner"),
    "receive": lambda daemon: cd.recv(torch.ones(1), 0, name="inner"),
    "leaving": lambda daemon: coordd.leaving(),
    "stop": lambda daemon: daemon.stop(),
    "another daemon": lambda daemon: Daemon(Config(), local_world(1)[0]).start(),
}


def start(name: str):
    return api.operations().allreduce(np.ones(2), name=name, op=ReduceOp.SUM)


@pytest.fixture
def ranks():
    with local_ranks(2) as found:
        yield found


def caught(daemon, block) -> BaseException | None:
    """What it raises to do that on the thread of this rank's daemon."""
    found: list[BaseException | None] = []
    ended = threading.Event()

    def on_it(handle):
        with api.using(daemon):
            try:
                block(daemon)
                found.append(None)
            except BaseException as error:
                found.append(error)
                raise
            finally:
                ended.set()

    start("outer").add_done_callback(on_it)
    assert ended.wait(WAIT), "the daemon's thread is blocked"
    return found[0]


@pytest.mark.parametrize("what", BLOCKING)
def test_a_callback_that_would_wait_is_told_and_the_daemon_goes_on(ranks, what):
    def body(rank):
        error = caught(ranks.daemons[rank], BLOCKING[what])
        assert isinstance(error, DeadlockError)
        assert "would block coordd's own thread" in str(error)
        return start("later").result(WAIT).tolist()

    assert ranks.each(body) == [[2.0, 2.0]] * 2


def test_a_callback_may_not_wait_on_any_thread():
    """Else it would depend on how fast the ranks are, on which of them it deadlocks."""
    handle, errors = Handle("x"), []
    handle.resolve(1)

    def wait(done):
        assert done.result() == 1
        assert not Handle("y").wait(0.0)
        with pytest.raises(DeadlockError, match="waiting for 'y' would block") as raised:
            Handle("y").wait(WAIT)
        errors.append(raised.value)

    handle.add_done_callback(wait)
    assert len(errors) == 1
    assert not Handle("z").wait(0.001)


def test_shutdown_in_a_callback_is_refused_before_it_has_done_anything():
    coordd.init()
    try:
        daemon, ended, errors = api.operations().daemon, threading.Event(), []

        def leave(_):
            try:
                coordd.shutdown()
            except CoorddError as error:
                errors.append(error)
            ended.set()

        api.operations().allreduce(np.ones(1)).add_done_callback(leave)
        assert ended.wait(WAIT)
        assert isinstance(errors[0], DeadlockError)
        assert api.operations().daemon is daemon
        assert coordd.allreduce(np.ones(1)).tolist() == [1.0]
    finally:
        coordd.shutdown()


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_a_conversion_fails_its_operation_alone_whatever_it_raises(ranks, error):
    def convert(_):
        raise error

    def body(rank):
        handle = api.operations().allreduce(np.ones(1), name="x", land=convert)
        with pytest.raises(error):
            handle.result(WAIT)
        return start("later").result(WAIT).tolist()

    assert ranks.each(body) == [[2.0, 2.0]] * 2


def test_a_conversion_that_would_wait_is_told(ranks):
    def body(rank):
        ops = api.operations()
        handle = ops.allreduce(np.ones(1), name="x", land=lambda _: ops.allreduce(np.ones(1), name="y").result())
        with pytest.raises(DeadlockError):
            handle.result(WAIT)
        return start("later").result(WAIT).tolist()

    assert ranks.each(body) == [[2.0, 2.0]] * 2


def test_a_callback_that_leaves_ends_nothing(ranks, caplog):
    def body(rank):
        handle = start("x")
        handle.add_done_callback(lambda _: sys.exit(3))
        handle.result(WAIT)
        return start("later").result(WAIT).tolist()

    assert ranks.each(body) == [[2.0, 2.0]] * 2
    assert "a callback of 'x' failed" in caplog.text


class Consulting(cd.Compressor):
    """Asks the other ranks while it takes a bucket apart."""

    @staticmethod
    def decompress(tensor, ctx):
        if threading.current_thread().name == "coordd":
            Handle("consulted").result()  # as each synchronous operation ends
        return tensor


def test_a_compressor_that_would_wait_is_told_where_its_gradients_are_used():
    with pytest.raises(DeadlockError, match="'consulted'"):
        together(2, compression=Consulting)


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ValueError


def test_an_error_that_cannot_be_written_is_raised_all_the_same(ranks):
    def convert(_):
        raise UnspeakableError

    def body(rank):
        with pytest.raises(UnspeakableError):
            api.operations().allreduce(np.ones(1), name="x", land=convert).result(WAIT)
        return start("later").result(WAIT).tolist()

    assert ranks.each(body) == [[2.0, 2.0]] * 2


CLOSING = {
    "the control channel": lambda daemon: (daemon._loop._link.control, "close"),
    "the transport": lambda daemon: (daemon._loop._link.transport, "close"),
    "the common memory": lambda daemon: (daemon._loop._link.commons, "close"),
    "the notes": lambda daemon: (daemon._loop._link.notes, "close"),
    "the timeline": lambda daemon: (daemon._loop.recorder, "close"),
    "the departures": lambda daemon: (daemon._loop._departures, "end"),
}


@pytest.mark.parametrize("what", CLOSING)
@pytest.mark.parametrize("kind", [OSError, SystemExit])
def test_the_thread_ends_for_all_whatever_cannot_be_closed(monkeypatch, what, kind):
    with local_ranks(2) as ranks:
        handles = ranks.each(lambda rank: api.operations().recv(None, 1 - rank, name="never"))

        def refuse(*_, **__):
            raise kind("no")

        for daemon in ranks.daemons:
            monkeypatch.setattr(*CLOSING[what](daemon), refuse)
    for daemon in ranks.daemons:
        assert daemon.status.ended.is_set()
        assert daemon.status.over.is_set()
        daemon._thread.join(WAIT)
        assert not daemon._thread.is_alive()
    for handle in handles:
        with pytest.raises(ShutdownError):
            handle.result(WAIT)


@pytest.mark.parametrize("part", ["World", "Member", "Plane", "Flights", "Mailbox", "Lookout", "Parts", "post", "hub"])
def test_a_start_that_breaks_off_anywhere_is_told_and_ends_the_thread(monkeypatch, part):
    def refuse(*_, **__):
        raise OSError(24, "Too many open files")

    closed = []
    (meet,) = local_world(1)

    def way(bell):
        link = meet(bell)
        monkeypatch.setattr(link.transport, "close", lambda *, failed: closed.append(failed))
        return link

    daemon = Daemon(Config(), way)
    monkeypatch.setattr(event_loop, part, refuse)
    since = time.monotonic()
    with pytest.raises(OSError, match="Too many open files"):
        daemon.start()
    assert time.monotonic() - since < 2.0
    assert daemon.status.ended.is_set()
    assert len(closed) == 1


def _empty(inbox, found):
    found.extend(inbox.drain())


def test_threads_that_empty_the_queue_at_once_lose_nothing():
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(20):
            inbox: Inbox[int] = Inbox(Bell(), window=0.0)
            for number in range(2000):
                inbox.put(number)
            found: list[int] = []
            threads = [threading.Thread(target=_empty, args=(inbox, found)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT)
            assert sorted(found) == list(range(2000))
    finally:
        sys.setswitchinterval(usual)


def test_a_full_pipe_is_no_trouble_for_who_rings():
    bell = Bell()
    while True:
        try:
            os.write(bell.descriptor, b"!" * 4096)
        except BlockingIOError:
            break
    bell.ring()
    bell.sleep(0.0)
