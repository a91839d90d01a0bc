"""When a rank says that its script is blocked: only if nothing of it could submit another operation."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace

import numpy as np
import pytest

from coordd import api
from coordd.daemon import blocked_script
from coordd.daemon.blocked_script import BlockWatch
from coordd.daemon.peer_to_peer import Letter
from coordd.monitoring.stacks import frames_of_other_threads
from coordd.negotiation.message_table import Negotiator
from coordd.negotiation.tensor_table import Entry, TensorTable
from coordd.ops.handles import Handle
from coordd.ops.messages import Kind, Request
from tests.local_ranks import local_ranks

_LATER = 10.0
NO_MAIL = SimpleNamespace(letters=[], wanted=[], offered=[])


@contextmanager
def waiting(handle: Handle[None], timeout: float | None = None) -> Iterator[int]:
    """Has a thread wait for a handle; yields the thread's id."""
    begun = threading.Event()
    handle._hurry = lambda _: begun.set()
    thread = threading.Thread(target=handle.wait, args=(timeout,))
    thread.start()
    begun.wait()
    while thread.ident not in _waiting_threads():
        pass
    try:
        yield thread.ident or 0
    finally:
        handle.resolve(None)
        thread.join()


@contextmanager
def script_in(function: str) -> Iterator[int]:
    """Has a thread run in a function of this name; yields the thread's id."""
    over: list[bool] = []

    def spin() -> None:
        while not over:  # nothing that would have a frame of its own
            pass

    spin.__code__ = spin.__code__.replace(co_name=function)
    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield thread.ident or 0
    finally:
        over.append(True)
        thread.join()


def _waiting_threads() -> set[int]:
    return {ident for ident, frame in sys._current_frames().items() if frame.f_code is Handle._stand_at.__code__}


def watching(
    table: TensorTable, thread: Callable[[], int], messages: list[str], mail: SimpleNamespace = NO_MAIL, **about: bool
) -> BlockWatch:
    """A watch of a script in a thread; ``about`` is whether it is ``busy``, and has ``submitted`` anything."""
    return BlockWatch(
        table,
        thread=thread,
        busy=lambda: about.get("busy", False),
        submitted=lambda: about.get("submitted", False),
        tell=lambda awaits, again: messages.append(awaits.name),
        mail=mail,
    )


def told(handle: Handle[None], thread: int, *, busy: bool = False, submitted: bool = False) -> list[str]:
    table = TensorTable()
    table.admit([Entry(Request(Kind.BARRIER, handle.name), np.empty(0), handle)])
    messages: list[str] = []
    watch = watching(table, lambda: thread, messages, busy=busy, submitted=submitted)
    watch.note_wait(0.0)
    watch.look(_LATER)
    return messages


def test_a_script_that_waits_without_limit_is_blocked():
    handle: Handle[None] = Handle("x")
    with waiting(handle) as thread:
        assert told(handle, thread) == ["x"]


def test_a_rank_that_has_yet_to_announce_something_is_not_blocked():
    handle: Handle[None] = Handle("x")
    with waiting(handle) as thread:
        assert told(handle, thread, submitted=True) == []


def test_a_wait_with_a_time_limit_blocks_nothing():
    handle: Handle[None] = Handle("x")
    with waiting(handle, 60.0) as thread:
        assert told(handle, thread) == []


def test_a_script_that_does_not_wait_is_not_blocked():
    assert told(Handle("x"), threading.get_ident()) == []


def test_a_done_callback_may_submit_what_others_wait_for():
    handle: Handle[None] = Handle("x")
    handle.add_done_callback(lambda _: None)
    with waiting(handle) as thread:
        assert told(handle, thread) == []


def test_an_operation_under_way_may_end_and_the_script_go_on():
    handle: Handle[None] = Handle("x")
    with waiting(handle) as thread:
        assert told(handle, thread, busy=True) == []


@contextmanager
def idling(*, native: bool = False) -> Iterator[int]:
    """Has a thread do nothing; yields its id. A ``native`` one is not started by `threading`."""
    begun, over, ended = (threading.Semaphore(0) for _ in range(3))
    found = []

    def idle() -> None:
        found.append(threading.get_ident())
        begun.release()
        over.acquire()
        ended.release()

    if native:
        _thread.start_new_thread(idle, ())
    else:
        threading.Thread(target=idle).start()
    begun.acquire()
    try:
        yield found[0]
    finally:
        over.release()
        ended.acquire()


@pytest.fixture
def script(monkeypatch) -> Callable[..., None]:
    """Makes threads the only ones of the process, the first of them its main thread."""

    def become(main: int, *others: int) -> None:
        @contextmanager
        def frames() -> Iterator[dict[int, FrameType]]:
            with frames_of_other_threads() as found:
                yield {ident: found[ident] for ident in (main, *others) if ident in found}

        monkeypatch.setattr(blocked_script, "frames_of_other_threads", frames)
        monkeypatch.setattr(threading, "main_thread", lambda: SimpleNamespace(ident=main))

    return become


def watch_of(table: TensorTable, thread: int, messages: list[str]) -> BlockWatch:
    watch = watching(table, lambda: thread, messages)
    watch.note_wait(0.0)
    return watch


def table_with(*handles: Handle[None]) -> TensorTable:
    table = TensorTable()
    table.admit([Entry(Request(Kind.BARRIER, each.name), np.empty(0), each) for each in handles])
    return table


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("has_submitted", [True, False])
def test_other_threads_of_the_script_may_submit_what_others_wait_for(monkeypatch, script, has_submitted, native):
    """One that has submitted before may do so again; others, such as those of progress bars, get some seconds."""
    handle: Handle[None] = Handle("x")
    messages: list[str] = []
    with waiting(handle) as thread, idling(native=native) as other:
        script(thread, other)
        monkeypatch.setattr(blocked_script, "_submitters", Counter([other] * has_submitted))
        watch = watch_of(table_with(handle), thread, messages)
        watch.look(2.0)
        assert not messages
        assert watch.remaining(2.0)
        watch.look(2.0 + blocked_script._WITH_OTHERS)
        assert messages == ([] if has_submitted else ["x"])


@pytest.mark.parametrize("function", ["quick_execute", "execute_with_cancellation", "_engine_run_backward"])
def test_native_threads_that_wait_in_a_graph_of_the_script_get_no_longer(monkeypatch, script, function):
    """The script waits there itself: they wait in its stead, and submit nothing else before that ends."""
    handle: Handle[None] = Handle("x")
    messages: list[str] = []
    with script_in(function) as thread, waiting(handle) as native:
        script(thread, native)
        monkeypatch.setattr(threading, "enumerate", list)
        monkeypatch.setattr(blocked_script, "_submitters", Counter([native]))
        watch = watch_of(table_with(handle), thread, messages)
        watch.look(2.0)
        watch.look(2.0 + blocked_script._WITH_OTHERS)
        assert messages == ["x"]


def test_threads_that_wait_for_operations_themselves_get_longer(monkeypatch, script):
    handle, others = Handle("x"), Handle("y")
    messages: list[str] = []
    with waiting(handle) as thread, waiting(others) as other:
        script(thread, other)
        monkeypatch.setattr(blocked_script, "_submitters", Counter([other]))
        watch = watch_of(table_with(handle, others), thread, messages)
        watch.look(2.0)
        watch.look(2.0 + blocked_script._WITH_OTHERS)
        assert messages == []
        watch.look(2.0 + blocked_script._WITH_WAITING_THREADS)
        assert messages == ["x"]


def test_a_thread_that_has_ended_submits_nothing_whatever_else_gets_its_number(monkeypatch):
    monkeypatch.setattr(blocked_script, "_submitters", Counter())
    local = threading.local()
    thread = threading.Thread(target=lambda: setattr(local, "submitter", blocked_script.Submitter()))
    thread.start()
    thread.join()
    assert blocked_script._submitters[thread.ident] == 0


def test_a_native_thread_that_has_ended_submits_nothing_though_it_is_listed_for_ever(monkeypatch, script):
    """One of TensorFlow's, say, that has logged something: Python never removes it from its list."""
    handle: Handle[None] = Handle("x")
    messages: list[str] = []
    found, ended = [], threading.Semaphore(0)

    def log() -> None:
        found.append(threading.current_thread())
        ended.release()

    _thread.start_new_thread(log, ())
    ended.acquire()
    (native,) = found
    while native.ident in sys._current_frames():
        pass
    assert native in threading.enumerate()
    with waiting(handle) as thread:
        script(thread, native.ident)
        monkeypatch.setattr(blocked_script, "_submitters", Counter([native.ident]))
        watch_of(table_with(handle), thread, messages).look(2.0)
        assert messages == ["x"]


class _Part(SimpleNamespace):
    """The handle of one operation of several."""

    submitted = 0.0


class _Several(Handle[None]):
    """Stands for them."""

    __slots__ = ()

    def waits_for(self, promise: object) -> bool:
        return isinstance(promise, _Part)


def test_of_several_operations_that_a_script_waits_for_one_that_has_not_ended_is_told():
    table = TensorTable()
    messages: list[str] = []
    other: Handle[None] = Handle("other")
    handles = {"other": other, "x": _Part(), "y": _Part()}
    table.admit([Entry(Request(Kind.BARRIER, name), np.empty(0), handle) for name, handle in handles.items()])
    with waiting(_Several("both")) as thread:
        watch = watching(table, lambda: thread, messages)
        watch.note_wait(0.0)
        for when, ended, expected in ((10.0, None, ["x"]), (20.0, "x", ["x", "y"]), (30.0, "y", ["x", "y"])):
            assert watch.remaining(when) == 0.0
            if ended:
                table.take(ended)
            watch.look(when)
            assert messages == expected
        assert watch.remaining(40.0) == 0.0  # the other one is under way, and the script may come to wait for it
        table.take("other")
        watch.look(40.0)
        assert watch.remaining(50.0) is None


def receiving(handle: Handle[None], thread: int, messages: list[tuple[str, int]]) -> BlockWatch:
    """A watch of a rank that receives."""
    letter = Letter("m", 3, None, handle, outgoing=False)
    return BlockWatch(
        TensorTable(),
        thread=lambda: thread,
        busy=lambda: False,
        submitted=lambda: False,
        tell=lambda awaits, again: messages.append(awaits[:2]),
        mail=SimpleNamespace(letters=[letter], wanted=[letter], offered=[]),
    )


def test_a_script_that_waits_for_a_message_is_blocked_once_it_is_found_so_twice():
    """A receive is looked at because it has begun, and the script may wait for it without a word."""
    handle, messages = Handle[None]("m"), list[tuple[str, int]]()
    with waiting(handle) as thread:
        watch = receiving(handle, thread, messages)
        watch.note_wait(0.0)
        watch.look(2.0)
        assert not messages
        watch.look(2.0 + watch.remaining(2.0))
        assert messages == [("m", 3)]
        watch.note_news(4.0)
        assert messages == [("m", 3), ("", -1)]


def test_a_done_callback_of_a_receive_may_submit_what_others_wait_for():
    handle, messages = Handle[None]("m"), list[tuple[str, int]]()
    handle.add_done_callback(lambda _: None)
    with waiting(handle) as thread:
        watch = receiving(handle, thread, messages)
        watch.note_wait(0.0)
        for now in (2.0, 4.0, 20.0):
            watch.look(now)
    assert not messages


def test_a_done_callback_of_a_send_may_submit_what_others_wait_for():
    handle, sent = Handle[None]("x"), Handle[None]("sent")
    sent.add_done_callback(lambda _: None)
    table, messages = TensorTable(), list[str]()
    table.admit([Entry(Request(Kind.BARRIER, "x"), np.empty(0), handle)])
    mail = SimpleNamespace(letters=[Letter("sent", 1, np.empty(0), sent, outgoing=True)], wanted=[], offered=[])
    with waiting(handle) as thread:
        watch = watching(table, lambda: thread, messages, mail)
        watch.note_wait(0.0)
        watch.look(_LATER)
    assert messages == []


def test_messages_that_come_change_what_was_told_or_end_it():
    handle, messages = Handle[None]("m"), list[tuple[str, int]]()
    with waiting(handle) as thread:
        watch = receiving(handle, thread, messages)
        watch.note_mail(0.0)
        watch.note_wait(0.0)
        watch.look(2.0)
        watch.look(4.0)
        watch.note_mail(5.0)  # another one
        assert messages == [("m", 3)] * 2
        watch._mail.wanted.clear()
        watch.note_mail(6.0)
        assert messages[2:] == [("", -1)]


def test_a_script_that_only_has_a_receive_under_way_is_looked_at_seldom():
    watch = receiving(Handle[None]("m"), threading.get_ident(), [])
    watch.note_wait(0.0)
    now = 0.0
    for _ in range(10):
        now += watch.remaining(now) or 0.0
        watch.look(now)
    assert watch.remaining(now) == pytest.approx(blocked_script._LONGEST_PAUSE_WITH_MAIL)


def test_a_script_that_is_elsewhere_at_the_first_look_is_looked_for_again():
    """As in a signal's handler that runs while it waits."""
    table, handle, messages = TensorTable(), Handle[None]("x"), list[str]()
    table.admit([Entry(Request(Kind.BARRIER, "x"), np.empty(0), handle)])
    script = [0]
    watch = watching(table, lambda: script[0], messages)
    watch.note_wait(0.0)
    watch.look(_LATER)
    assert messages == []
    with waiting(handle) as script[0]:
        assert watch.remaining(_LATER) is not None
        watch.look(2 * _LATER)
    assert messages == ["x"]


def test_pytorch_may_end_a_backward_pass_on_a_thread_of_its_own():
    handle: Handle[None] = Handle("x")
    with script_in("_engine_run_backward") as script, waiting(handle):
        assert told(handle, script) == ["x"]


def test_other_branches_of_a_graph_in_which_a_script_waits_may_submit_what_others_wait_for():
    handle: Handle[None] = Handle("x")
    table = TensorTable()
    table.admit([Entry(Request(Kind.BARRIER, handle.name), np.empty(0), handle)])
    messages: list[str] = []
    with script_in("quick_execute") as script, waiting(handle):
        watch = watching(table, lambda: script, messages)
        watch.note_wait(0.0)
        watch.look(2.0)
        watch.note_news(4.0)  # another branch has submitted something
        watch.look(5.0)
        watch.look(4.5 + blocked_script._WITH_OTHERS)
        assert messages == []
        watch.look(6.0 + blocked_script._WITH_OTHERS)
        assert messages == ["x"]


class InterruptionError(Exception):
    """What a signal's handler raises, as a script's own time limit does."""


def test_a_script_that_breaks_a_wait_off_is_not_blocked(monkeypatch):
    """Rank 0, the main thread, breaks a wait off once it counts as blocked, and submits what rank 1 waits for."""
    judged = threading.Event()
    look, note, decide = BlockWatch.look, Negotiator.note_blocked, Negotiator.decide
    noted: list[str] = []

    def looks(watch, now):
        look(watch, now)
        if watch._told.name == "x":
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

    def notes(negotiator, ranks, message):
        note(negotiator, ranks, message)
        noted.append(message.name)

    def decides(negotiator):
        plan = decide(negotiator)
        if "y" in noted:
            judged.set()
        return plan

    def raises(*_):
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        raise InterruptionError

    def second():
        with api.using(ranks.daemons[1]):
            results.append(api.allreduce(np.ones(2), name="y").tolist())
            results.append(api.allreduce(np.ones(2), name="x").tolist())

    monkeypatch.setattr(blocked_script, "_SECONDS", 0.01)
    monkeypatch.setattr(BlockWatch, "look", looks)
    monkeypatch.setattr(Negotiator, "note_blocked", notes)
    monkeypatch.setattr(Negotiator, "decide", decides)
    before = signal.signal(signal.SIGUSR1, raises)
    results: list[object] = []
    try:
        with local_ranks(2) as ranks, api.using(ranks.daemons[0]):
            first = api.operations().allreduce(np.ones(2), name="x")
            with pytest.raises(InterruptionError):
                first.wait()
            thread = threading.Thread(target=second, name="coordd second rank")
            thread.start()
            assert judged.wait(20)
            assert api.operations().allreduce(np.ones(2), name="y").result(20).tolist() == [1.0, 1.0]
            assert first.result(20).tolist() == [1.0, 1.0]
            thread.join(20)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert results == [[1.0, 1.0]] * 2
