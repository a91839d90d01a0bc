"""Detects that this rank's script is blocked in one operation, so that it cannot submit anything else.

It looks at the innermost frame of the script's thread shortly after any thread has begun to wait, and then
occasionally as long as a message is pending; so a wait costs nothing, nor does an idle daemon. A rank is never
reported as blocked while something else in it could submit an operation: a done callback, an operation in flight whose
result the script may use, or another thread that has submitted one before. Threads that never have, such as those of
progress bars, get some seconds to do so; those that have, and wait for an operation themselves, get longer. So do the
other branches of a TensorFlow graph in which the script waits. Each submission restarts that time.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol

from coordd.daemon.peer_to_peer import Letter
from coordd.monitoring.stacks import THREAD, frames_of_other_threads
from coordd.negotiation.tensor_table import TensorTable
from coordd.ops.handles import Handle, awaited

__all__ = ["Awaited", "BlockWatch", "Mail", "Submitter"]

_SECONDS = 1.0
_WITH_OTHERS = 8.0
_WITH_WAITING_THREADS = 300.0
_WITH_NETWORK = 3.0
_LONGEST_PAUSE, _LONGEST_PAUSE_WITH_MAIL = 8.0, 2.0
_submitters: Counter[int] = Counter()
"""Number of `Submitter` objects by thread number, which the system reuses once a thread has ended."""

_ENGINE = "_engine_run_backward"
"""Function in which the script is while PyTorch runs a backward pass, which may finish on a thread of PyTorch's."""
_GRAPH = frozenset({"quick_execute", "execute_with_cancellation"})
"""Functions in which the script is while TensorFlow runs a graph, whose operations wait on TensorFlow's own threads."""
_FRAMEWORKS = _GRAPH | {_ENGINE}


class Submitter:
    """Marks the calling thread as one that submits operations, for as long as the object lives.

    Its owner is a thread-local object, so it ends with the thread.
    """

    def __init__(self) -> None:
        self._ident = threading.get_ident()
        _submitters[self._ident] += 1

    def __del__(self) -> None:
        _submitters[self._ident] -= 1


class Awaited(NamedTuple):
    """The operation that a script waits for, by name.

    A send or receive has a ``peer``; for a collective it is -1. A send has its ``number`` among the sends to its peer.
    ``since`` is the time of submission.
    """

    name: str = ""
    peer: int = -1
    number: int = 0
    since: float = 0.0


class Tell(Protocol):
    """Reports to the coordinator."""

    def __call__(self, awaits: Awaited, *, again: bool) -> None:
        """Reports what the script waits for; ``again`` if only the sent and received messages may be new."""
        ...


class Mail(Protocol):
    """The sends and receives of a rank."""

    @property
    def letters(self) -> Sequence[Letter]:
        """All sends and receives in flight."""
        ...

    @property
    def wanted(self) -> Sequence[Letter]:
        """The receives in flight that no message has arrived for."""
        ...

    @property
    def offered(self) -> Sequence[Letter]:
        """The sends in flight."""
        ...

    @property
    def sent(self) -> Sequence[tuple[int, int]]:
        """Number of messages that this rank has begun to send, by receiver."""
        ...

    @property
    def unclaimed(self) -> Sequence[tuple[int, int]]:
        """Received messages without a matching receive, by sender and number."""
        ...

    def heard(self, sender: int) -> int:
        """Returns the number of messages received from a rank, matched or not."""
        ...


_NOTHING = Awaited()


class BlockWatch:
    """Reports to the coordinator when the script is blocked, and when it continues."""

    def __init__(  # noqa: PLR0913 - one argument per source of information
        self,
        table: TensorTable,
        *,
        thread: Callable[[], int],
        busy: Callable[[], bool],
        submitted: Callable[[], bool],
        tell: Tell,
        mail: Mail,
    ) -> None:
        """Starts with nothing waited for.

        Args:
            table: the operations of this rank.
            thread: returns the identifier of the thread that the script runs in.
            busy: whether data or messages of this rank are in flight, or have moved since the last call.
            submitted: whether the script has submitted something that is not announced yet.
            tell: reports to the coordinator the operation that the script waits for, possibly again; an operation
                without a name means that it does not wait.
            mail: the sends and receives of this rank.
        """
        self._table = table
        self._thread = thread
        self._busy = busy
        self._submitted = submitted
        self._tell = tell
        self._mail = mail
        self.due: float | None = None
        """When to `look` next, in seconds of `time.monotonic`; None if no look is scheduled."""
        self._pause = _SECONDS
        self._told = _NOTHING
        self._one_of_several = False
        self._in_graph = self._in_framework = False
        self._threads_wait = False  # whether other threads that have submitted operations exist, and all wait for one
        self._first = (_NOTHING, 0.0)
        """What the script was found waiting for, and when it was first found so."""

    def note_wait(self, now: float) -> None:
        """Notes that a thread has begun to wait, or to receive, which may be the start of an unannounced wait."""
        self._pause = _SECONDS
        if self.due is None or self.due > now + _SECONDS:
            self.due = now + _SECONDS
            self._busy()  # resets it: data that moved before now does not count at the next call

    @property
    def told(self) -> bool:
        """Whether the coordinator considers the script blocked."""
        return bool(self._told.name)

    def note_news(self, now: float) -> None:
        """Notes that this rank is about to announce, send or receive something.

        Or that an exception has ended the script's wait. So the script is not blocked, or not as reported; the next
        `look` finds out whether it is blocked again.
        """
        self._first = _NOTHING, now
        if self.told:
            self._told = _NOTHING
            self._tell(_NOTHING, again=False)
            self.due = now + _SECONDS

    def note_mail(self, now: float) -> None:
        """Notes that messages were sent or received: the wait may be over, or the reported counts have changed."""
        if not self.told:
            return
        if any(operation == self._told for _, operation in self._under_way()):
            self._tell(self._told, again=True)
        else:
            self.note_news(now)

    def note_lock(self, now: float) -> None:
        """Notes that a plan is locked, which makes the coordinator forget the blocked ranks."""
        if self.told:
            self._told = _NOTHING
            self.due = now + _SECONDS

    def look(self, now: float) -> None:
        """Checks whether the script is blocked, once it has had time to continue."""
        if self.due is None or now < self.due:
            return
        if self._busy():
            self.due = now + _SECONDS
            return
        awaits = self._awaited()
        if self._submitted():  # submitted before it began to wait; read after the frames, which may be newer
            self.due = now
            return
        if awaits != self._first[0]:
            self._first = awaits, now
        others = bool(awaits.name) and self._others_may_submit()
        patience = max(self._patience(), _patience_with(awaits))
        others = others or (bool(awaits.name) and now - self._first[1] < patience)
        # A thread may end, or one of several operations that the script waits for, and the script may still wait.
        self.due = now + _SECONDS if others or self._one_of_several else None
        if not awaits.name and (len(self._table) > 0 or self._mail.letters):
            # The script may be in a signal handler, say, or begin to wait for a neighbour's message without a notice.
            self.due = now + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_WITH_MAIL if self._mail.letters else _LONGEST_PAUSE)
        if awaits.name and awaits != self._told and not others:
            self._told = awaits
            self._tell(awaits, again=False)

    def remaining(self, now: float) -> float | None:
        """Returns the seconds until `look` has something to do; None if no look is scheduled."""
        return None if self.due is None else max(0.0, self.due - now)

    def _others_may_submit(self) -> bool:
        """Returns whether anything except the script's thread could submit an operation of this rank."""
        handles = [*(entry.handle for entry in self._table), *(letter.handle for letter in self._mail.letters)]
        if any(isinstance(handle, Handle) and handle.has_callbacks for handle in handles):
            return True
        with frames_of_other_threads() as frames:
            submitters = [ident for ident in self._others_of_script(frames) if _submitters[ident]]
            self._threads_wait = bool(submitters)
            return any(awaited(frames[ident]) is None for ident in submitters)

    def _patience(self) -> float:
        """Returns how many seconds threads and graph branches that may submit get to do so.

        A thread that waits for an operation may submit another one when that ends, for which a slow rank may be needed.
        """
        if self._threads_wait:
            return _WITH_WAITING_THREADS
        with frames_of_other_threads() as frames:
            return _WITH_OTHERS if self._in_graph or self._others_of_script(frames) else 0.0

    def _others_of_script(self, frames: Mapping[int, FrameType]) -> list[int]:
        """Returns the threads except the script's and coordd's, also native ones, which `threading` has not started.

        Native threads that run a graph or a backward pass for the script wait in its stead, and are left out.
        """
        main = threading.main_thread().ident
        if self._thread() != main:  # ranks are threads of one process
            return []
        # Python never removes a native thread, such as one of TensorFlow's that has logged, from its list; no public
        # function distinguishes such threads from the others.
        listed = [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]  # noqa: SLF001
        started = {thread.ident for thread in listed}
        own = {thread.ident for thread in listed if thread.name.startswith(THREAD)}
        others = [ident for ident in frames if ident != main and ident not in own]
        return [ident for ident in others if ident in started] if self._in_framework else others

    def _under_way(self) -> Iterator[tuple[Any, Awaited]]:
        """Yields the operations in flight that other ranks take part in, each with its handle."""
        for entry in self._table:
            yield entry.handle, Awaited(entry.request.name, since=entry.handle.submitted)
        for letter in (*self._mail.wanted, *self._mail.offered):
            yield letter.handle, Awaited(letter.name, letter.peer, letter.number, letter.handle.submitted)

    def _awaited(self) -> Awaited:
        """Returns the operation that the script waits for without a time limit; its name is empty if there is none.

        Of several operations, such as the gradients of a step, it is the oldest that has not ended.
        """
        self._one_of_several = False
        with frames_of_other_threads() as frames:
            script = frames.get(self._thread())
            handles = [awaited(script)]
            place = script.f_code.co_name if script is not None else ""
            if place in _FRAMEWORKS:
                handles = [awaited(frame) for frame in frames.values() if not _within(frame, place)]
            del script
        self._in_graph, self._in_framework = place in _GRAPH, place in _FRAMEWORKS
        for handle in filter(None, handles):
            for promise, operation in self._under_way():
                if handle.waits_for(promise):
                    self._one_of_several = promise is not handle
                    return operation
        return _NOTHING


def _patience_with(awaits: Awaited) -> float:
    """Returns how many seconds a script may wait for a message without being blocked: the wait may just have begun.

    A send completes by itself where the network takes the message, which may take some time.
    """
    if awaits.number:
        return _WITH_NETWORK
    return _SECONDS if awaits.peer >= 0 else 0.0


def _within(frame: FrameType | None, function: str) -> bool:
    """Returns whether a thread is in a function of this name."""
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None
