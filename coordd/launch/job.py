"""Runs one job: starts the MPI launcher, shows the output of the ranks, and ends all processes in order.

One rule: a single thread that waits in one place (`Job._serve`) for output, signals and deadlines.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from coordd.errors import spans
from coordd.launch.exit_status import Record, Verdict, judge
from coordd.launch.frames import Ended, Frame, Output, Started, Waiting, decode
from coordd.launch.lines import Lines
from coordd.launch.mpi_flavours import ALONE, Flavour
from coordd.launch.outcome import signal_name
from coordd.launch.process_guard import die_with_parent
from coordd.launch.screen import Screen
from coordd.launch.termination import Ladder, Rung

__all__ = ["Job", "Program"]

_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HANDLED = (*_ENDINGS, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
_ON_ITS_WAY = 0.2  # seconds to wait for remaining output after the launcher has exited
_CHUNK = _LONGEST = 1 << 16


@dataclass(frozen=True)
class Program:
    """The launcher's command line and environment."""

    argv: Sequence[str]
    environment: Mapping[str, str]
    flavour: Flavour
    title: str


class Job:
    """A running job."""

    def __init__(self, program: Program, *, size: int, screen: Screen, grace: float) -> None:
        """Prepares the job; `run` starts it.

        Args:
            program: the launcher that starts the ranks.
            size: number of ranks.
            screen: shows the output of the ranks.
            grace: seconds for ranks to end after Ctrl-C or SIGTERM.
        """
        self._program = program
        self._screen = screen
        self._record = Record(size, program.title)
        self._grace = grace
        self._ladder = Ladder(size, grace=grace)
        self._lines = {1: Lines(_LONGEST), 2: Lines(_LONGEST)}
        self._streams: dict[int, int] = {}  # descriptor: 1 or 2
        self._poller = select.poll()
        self._held: list[bytes] = []
        self._noted: set[str] = set()

    def note(self, text: str, host: str = "") -> None:
        """Prints a note of coordd itself; a repeated text is printed once, because many hosts send the same note."""
        if text and text not in self._noted:
            self._noted.add(text)
            self._screen.say(f"coordd: {f'{host}: ' * bool(host)}{text}")

    def run(self) -> Verdict:
        """Runs the job to its end.

        Raises:
            OSError: the launcher cannot be started.
        """
        with _signals() as ear, self._started() as process:
            self._poller.register(ear, select.POLLIN)
            while process.poll() is None:
                self._serve(process, ear, self._patience())
                self._climb(process)
                self._screen.settle()
            deadline = time.monotonic() + _ON_ITS_WAY
            while self._streams and (left := deadline - time.monotonic()) > 0:
                self._serve(process, ear, left)
        self._record.status = process.returncode
        self._screen.finish()
        if not self._record.ended:
            for line in self._held:
                self._screen.pass_on(2, line)
        return judge(self._record)

    @contextmanager
    def _started(self) -> Iterator[subprocess.Popen[bytes]]:
        """Starts the launcher in a session of its own, so that this process alone handles signals from the terminal."""
        parent = os.getpid()
        flavour = self._program.flavour
        with subprocess.Popen(
            self._program.argv,
            env=dict(self._program.environment),
            stdin=None if flavour is ALONE or not sys.stdin.isatty() else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: die_with_parent(flavour.finish, parent),  # noqa: PLW1509 - we have one thread
        ) as process:
            for number, file in ((1, process.stdout), (2, process.stderr)):
                if file:
                    self._streams[file.fileno()] = number
                    self._poller.register(file, select.POLLIN)
            try:
                yield process
            finally:
                process.kill()  # it is still alive only after an unexpected exception

    def _patience(self) -> float | None:
        due = min(self._ladder.due(), self._screen.due)
        return None if math.isinf(due) and due > 0 else max(0.0, due - time.monotonic())

    def _serve(self, process: subprocess.Popen[bytes], ear: int, seconds: float | None) -> None:
        """Waits for output and signals for at most ``seconds``, and handles them."""
        for descriptor, _ in self._poller.poll(None if seconds is None else seconds * 1000):
            if descriptor == ear:
                for number in os.read(ear, 64):
                    self._hear(number, process)
            else:
                self._read(descriptor)
        if self._screen.closed and not self._record.stopped_by:
            self._stop(signal.SIGPIPE)

    def _hear(self, number: int, process: subprocess.Popen[bytes]) -> None:
        if number in _ENDINGS:
            if not self._record.stopped_by and self._record.running:
                again = "; Ctrl-C again: now" * (number == signal.SIGINT)
                self.note(f"{signal_name(number)}: ranks have {self._grace:g} s (--grace-seconds) to end{again}")
            self._stop(number)
        elif number in self._program.flavour.passes:
            process.send_signal(number)

    def _stop(self, number: int) -> None:
        self._record.stopped_by = self._record.stopped_by or number
        self._ladder.ask()

    def _read(self, descriptor: int) -> None:
        stream = self._streams[descriptor]
        chunk = os.read(descriptor, _CHUNK)
        pieces = self._lines[stream].feed(chunk) if chunk else self._lines[stream].flush()
        for piece in pieces:
            self._take(stream, piece.text)
        if not chunk:
            self._poller.unregister(descriptor)
            del self._streams[descriptor]

    def _take(self, stream: int, line: bytes) -> None:
        """Handles one line of the launcher's output, usually a frame of a rank."""
        self._handle(decode(line), stream, line)
        if self._record.cannot_start:
            self._ladder.end_job(time.monotonic())

    def _handle(self, frame: Frame | None, stream: int, line: bytes) -> None:
        if isinstance(frame, Output):
            self._screen.show(frame)
        elif isinstance(frame, Started):
            self._record.hosts[frame.rank] = frame.host
            self.note(frame.note, frame.host)
        elif isinstance(frame, Waiting):
            (self._record.waiting.discard if frame.over else self._record.waiting.add)(frame.rank)
        elif isinstance(frame, Ended):
            self._end(frame)
        else:
            self._record.said.append(line.decode(errors="replace"))
            if self._ladder.rung == Rung.RUN:
                self._screen.pass_on(stream, line)
            else:
                self._held.append(line)

    def _end(self, frame: Ended) -> None:
        outcome = frame.outcome
        if self._ladder.rung >= Rung.ASK:
            outcome = outcome._replace(told=True)
        self._record.ended.append(Ended(frame.rank, outcome))
        consequence = outcome.consequence or outcome.told
        self._ladder.end(time.monotonic(), failed=outcome.failed, consequence=consequence, left=outcome.left)

    def _climb(self, process: subprocess.Popen[bytes]) -> None:
        """Takes the next step of the termination policy if its deadline has passed."""
        if self._ladder.due() > time.monotonic():
            return
        rung = self._ladder.climb(time.monotonic())
        flavour = self._program.flavour
        if rung == Rung.DISMISS and self._record.stopped_by and (left := self._record.running):
            self.note(f"rank{'s' * (len(left) > 1)} {spans(left)} did not end in time: killed")
        gently = flavour.interrupt if self._record.stopped_by == signal.SIGINT else flavour.terminate
        number = {Rung.ASK: gently, Rung.DISMISS: flavour.terminate, Rung.END: flavour.finish}
        process.send_signal(number.get(rung, signal.SIGKILL))


@contextmanager
def _signals() -> Iterator[int]:
    """Delivers signals as bytes on a descriptor while active; a SIGHUP that `nohup` ignores stays ignored."""
    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)
    handled = [number for number in _HANDLED if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda _number, _frame: None) for number in handled}
    wakeup = signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
    try:
        yield ear
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(ear)
        os.close(mouth)
