"""One rank's timeline: whether it is recorded, where, and in which time.

Its one rule: when the first rank has said so, all record; the others' saying the same changes nothing. Ranks count how
often they were told to start or stop, so that a slow one's *start* is not taken for another after a fast one's *stop*.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from coordd.control.protocol import Lost
from coordd.messages import Message, Ping, Pong, Recording
from coordd.timeline.clock import Clock
from coordd.timeline.tape import Deck, Tape
from coordd.timeline.writer import Writer
from coordd.world import World

__all__ = ["Recorder"]

log = logging.getLogger("coordd")

Arrived = list[tuple[int, Message | Lost]]

_PATIENCE = 5.0
"""Seconds that a rank waits for its file to be complete."""


class Recorder:
    """Starts and ends recordings; for the daemon's thread, and where it says so for others."""

    def __init__(self) -> None:
        """Records nothing yet."""
        self.deck = Deck()
        self._guard = threading.Lock()
        self._calls = 0
        self._heard = 0
        self._writer: Writer | None = None
        self._about: dict[str, object] = {}
        self._clock = Clock(shared=True)

    def connect(self, tell: Callable[[Message], None], send: Callable[[int, Message], None], *, parent: int) -> None:
        """Learns how to reach others; to be called before anything else.

        Args:
            tell: reaches the coordinator.
            send: reaches a neighbour in the tree.
            parent: whom this rank reports to.
        """
        self.tell, self._send, self._parent = tell, send, parent

    def enter(self, world: World, pids: Sequence[int]) -> None:
        """Notes who takes part; to be called before anything is recorded."""
        self._clock = Clock(shared=world.host == world.hosts[0])
        job = hashlib.sha256(repr((world.hosts, pids)).encode()).hexdigest()[:12]
        who = {"rank": world.rank, "size": world.size, "host": world.host, "pid": pids[world.rank]}
        self._about = {**who, "job": job}

    def call(self, folder: str, *, cycles: bool) -> Recording | None:
        """Starts, or without a folder ends, as told by this rank's program; for any thread.

        Returns:
            what to tell the other ranks; None if they were first.
        """
        with self._guard:
            self._calls += 1
            recording = Recording(self._calls, folder, cycles)
        return recording if self.hear(recording) else None

    def hear(self, recording: Recording) -> bool:
        """Starts or ends, as told by any rank, unless it was done before; says whether it was not."""
        with self._guard:
            if recording.number <= self._heard:
                return False
            self._heard = recording.number
            self._change(recording)
            return True

    def close(self) -> None:
        """Ends the recording, and waits a moment until its file is complete; for any thread."""
        with self._guard:
            self._change(Recording(self._heard))
        self.finish()

    def finish(self) -> None:
        """Waits a moment until the file of a recording that has ended is complete; for any thread."""
        writer = self._writer
        if writer is not None and self.deck.tape is None:
            writer.join(_PATIENCE)

    def sift(self, arrived: Arrived) -> Arrived:
        """Takes out, and answers, what concerns the clock; returns the rest."""
        return [(sender, message) for sender, message in arrived if not self._settle(sender, message)]

    def look(self) -> None:
        """Notes a cycle, and asks for the time now and then; to be called in each cycle while a tape runs."""
        tape = self.deck.tape
        if tape is not None:
            tape.cycle()
            if (ping := self._clock.turn(time.monotonic())) is not None:
                self._send(self._parent, ping)

    @property
    def deadline(self) -> float | None:
        """When `look` must be called even if nothing happens; None for never."""
        return self._clock.deadline if self.deck.tape is not None else None

    def _settle(self, sender: int, message: Message | Lost) -> bool:
        now = time.monotonic()
        if isinstance(message, Ping):
            if (pong := self._clock.answer(message, now)) is not None:
                self._send(sender, pong)
        elif isinstance(message, Pong):
            if (reading := self._clock.hear(message, now)) is not None and self._writer is not None:
                self._writer.note(reading)
        else:
            return False
        return True

    def _change(self, recording: Recording) -> None:
        before, self.deck.tape = self._writer, None
        if before is not None:
            before.end()
        if recording.folder:
            tape = Tape(cycles=recording.cycles)
            about = {**self._about, "began": time.time(), "clock": time.monotonic()}
            try:
                self._writer = Writer(Path(recording.folder), tape, self.deck, about, after=before)
            except RuntimeError as error:  # there may be no more threads; a recording must not end the job
                log.warning("there is no timeline of this rank, the training goes on: %s", error)
                return
            if self._clock.reading is not None:
                self._writer.note(self._clock.reading)
            self.deck.tape = tape
