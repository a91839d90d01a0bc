"""Finds out whether the script of this rank is blocked in one operation, so that it can submit nothing more.

It looks at the innermost frame of the script's thread, a moment after any thread has begun to wait, and now and then as
long as a message is to come; so a wait costs nothing, and neither does a daemon that has nothing to do. A rank is never
called blocked while something else of it could submit an operation: a done callback, an operation under way whose
result the script may use, or another thread that has submitted one before. Threads that never have, such as those of
progress bars, get some seconds to do it. So do the other branches of a graph of TensorFlow's in which the script waits:
each submission gives them as many again.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple, Protocol

from coordd.handles import Handle, awaited
from coordd.mailbox import Letter
from coordd.table import TensorTable

__all__ = ["Awaited", "BlockWatch", "Mail", "Submitter"]

_SECONDS = 1.0
_WITH_OTHERS = 8.0
_WITH_NETWORK = 3.0
_LONGEST_PAUSE, _LONGEST_PAUSE_WITH_MAIL = 8.0, 2.0
_submitters: Counter[int] = Counter()
"""Threads that submit operations, by their numbers, which are given again once a thread has ended."""

_ENGINE = "_engine_run_backward"
"""Where the script is while PyTorch runs a backward pass, whose end may come on a thread of PyTorch's."""
_GRAPH = "quick_execute"
"""Where it is while TensorFlow runs a graph: the graph's operations wait on TensorFlow's own threads."""


class Submitter:
    """Stands for the calling thread, which submits operations, in something that ends with it."""

    def __init__(self) -> None:
        self._ident = threading.get_ident()
        _submitters[self._ident] += 1

    def __del__(self) -> None:
        _submitters[self._ident] -= 1


class Awaited(NamedTuple):
    """The operation that a script waits for, by name.

    A send or receive has a ``peer``, a collective -1. A send has the ``number`` that it has among those to its peer.
    ``since`` is when it was submitted.
    """

    name: str = ""
    peer: int = -1
    number: int = 0
    since: float = 0.0


class Tell(Protocol):
    """Tells the coordinator."""

    def __call__(self, awaits: Awaited, *, again: bool) -> None:
        """Tells for what the script waits; ``again`` if only what has been sent and received may be new."""
        ...


class Mail(Protocol):
    """The sends and receives of a rank."""

    @property
    def letters(self) -> Sequence[Letter]:
        """All that are under way."""
        ...

    @property
    def wanted(self) -> Sequence[Letter]:
        """The receives among them for which nothing has come yet."""
        ...

    @property
    def offered(self) -> Sequence[Letter]:
        """The sends among them."""
        ...

    @property
    def sent(self) -> Sequence[tuple[int, int]]:
        """How many messages this rank has begun to send, by receiver."""
        ...

    @property
    def unclaimed(self) -> Sequence[tuple[int, int]]:
        """What has come, and for which no receive has begun, by sender and number."""
        ...

    def heard(self, sender: int) -> int:
        """How many messages of a rank have come, wanted or not."""
        ...


_NOTHING = Awaited()


class BlockWatch:
    """Tells the coordinator when the script waits for long, and when it goes on."""

    def __init__(  # noqa: PLR0913 - one argument for each source of what it knows
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
            thread: says which thread the script runs in.
            busy: whether data or messages of this rank are under way, or have moved since it was asked last.
            submitted: whether the script has submitted something that is not announced yet.
            tell: tells the coordinator for which operation the script waits, maybe again; without a name that it does
                not.
            mail: the sends and receives of this rank.
        """
        self._table = table
        self._thread = thread
        self._busy = busy
        self._submitted = submitted
        self._tell = tell
        self._mail = mail
        self.due: float | None = None
        """When to `look` next, in seconds of `time.monotonic`; None if that is not in sight."""
        self._pause = _SECONDS
        self._told = _NOTHING
        self._one_of_several = False
        self._in_graph = False
        self._first = (_NOTHING, 0.0)
        """What the script was found to wait for, and when first."""

    def note_wait(self, now: float) -> None:
        """Notes that a thread has begun to wait, or to receive, for which it may wait without a word."""
        self._pause = _SECONDS
        if self.due is None or self.due > now + _SECONDS:
            self.due = now + _SECONDS
            self._busy()  # what has moved until now does not count when it is asked next

    @property
    def told(self) -> bool:
        """Whether the coordinator takes the script for blocked."""
        return bool(self._told.name)

    def note_news(self, now: float) -> None:
        """Notes that this rank is about to announce, send or receive something.

        Or that an exception has broken the script's wait off. So it is not blocked, or not in the way that was told;
        whether it is again, the next look finds out.
        """
        self._first = _NOTHING, now
        if self.told:
            self._told = _NOTHING
            self._tell(_NOTHING, again=False)
            self.due = now + _SECONDS

    def note_mail(self, now: float) -> None:
        """Notes that messages have come or gone: the wait may be over, or what was told of them has changed."""
        if not self.told:
            return
        if any(operation == self._told for _, operation in self._under_way()):
            self._tell(self._told, again=True)
        else:
            self.note_news(now)

    def note_lock(self, now: float) -> None:
        """Notes that a plan is locked: with that the coordinator forgets which ranks are blocked."""
        if self.told:
            self._told = _NOTHING
            self.due = now + _SECONDS

    def look(self, now: float) -> None:
        """Looks whether the script is blocked, once it has had time to go on."""
        if self.due is None or now < self.due:
            return
        if self._busy():
            self.due = now + _SECONDS
            return
        awaits = self._awaited()
        if self._submitted():  # before it began to wait; asked for after the look, which may have come later
            self.due = now
            return
        if awaits != self._first[0]:
            self._first = awaits, now
        patience = max(self._patience(), _patience_with(awaits))
        others = bool(awaits.name) and (self._others_may_submit() or now - self._first[1] < patience)
        # A thread may end, or one of several operations that the script waits for, and the script still wait.
        self.due = now + _SECONDS if others or self._one_of_several else None
        if not awaits.name and (len(self._table) > 0 or self._mail.letters):
            # It may have been in a signal's handler, say, or begin to wait for a neighbour's message without a word.
            self.due = now + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE_WITH_MAIL if self._mail.letters else _LONGEST_PAUSE)
        if awaits.name and awaits != self._told and not others:
            self._told = awaits
            self._tell(awaits, again=False)

    def remaining(self, now: float) -> float | None:
        """Seconds until `look` has something to do; None if that is not in sight."""
        return None if self.due is None else max(0.0, self.due - now)

    def _others_may_submit(self) -> bool:
        """Whether anything but the script's thread could submit an operation of this rank."""
        handles = [*(entry.handle for entry in self._table), *(letter.handle for letter in self._mail.letters)]
        if any(isinstance(handle, Handle) and handle.has_callbacks for handle in handles):
            return True
        # Python never removes a foreign thread from its list, such as one of TensorFlow's that has logged; no public
        # function tells such a thread from the others.
        own = (thread for thread in self._other_threads() if not isinstance(thread, threading._DummyThread))  # noqa: SLF001
        return any(_submitters[thread.ident or 0] for thread in own)

    def _patience(self) -> float:
        """Seconds for which what may submit, but has not done so before, gets the benefit of the doubt."""
        return _WITH_OTHERS if self._in_graph or self._other_threads() else 0.0

    def _other_threads(self) -> list[threading.Thread]:
        if self._thread() != threading.main_thread().ident:  # ranks are threads of one process
            return []
        return [
            thread
            for thread in threading.enumerate()
            if thread is not threading.main_thread() and not thread.name.startswith("coordd")
        ]

    def _under_way(self) -> Iterator[tuple[Any, Awaited]]:
        """Lists what other ranks have to take part in, with the handles."""
        for entry in self._table:
            yield entry.handle, Awaited(entry.request.name, since=entry.handle.submitted)
        for letter in (*self._mail.wanted, *self._mail.offered):
            yield letter.handle, Awaited(letter.name, letter.peer, letter.number, letter.handle.submitted)

    def _awaited(self) -> Awaited:
        """Finds the operation that the script waits for without a time limit; it has no name if there is none.

        Of several operations it is the oldest that has not ended, as of the gradients of a step.
        """
        self._one_of_several = False
        frames = sys._current_frames()  # noqa: SLF001 - the documented way
        script = frames.get(self._thread())
        handles = [awaited(script)]
        place = script.f_code.co_name if script is not None else ""
        self._in_graph = place == _GRAPH
        if place in {_ENGINE, _GRAPH}:
            handles = [awaited(frame) for frame in frames.values() if not _within(frame, place)]
        for handle in filter(None, handles):
            for promise, operation in self._under_way():
                if handle.waits_for(promise):
                    self._one_of_several = promise is not handle
                    return operation
        return _NOTHING


def _patience_with(awaits: Awaited) -> float:
    """Seconds for which a script may wait for a message without being blocked: the wait may have begun just now.

    A send ends by itself where the network takes the message, and that may take its time.
    """
    if awaits.number:
        return _WITH_NETWORK
    return _SECONDS if awaits.peer >= 0 else 0.0


def _within(frame: FrameType | None, function: str) -> bool:
    """Says whether a thread is in a function of this name."""
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None
