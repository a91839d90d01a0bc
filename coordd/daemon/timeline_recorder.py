"""Starts and stops the timeline recording of one rank.

One rule: the first rank that calls start makes all ranks record; the same call on the other ranks has no effect. Ranks
number their start and stop calls, so that a slow rank's *start* is not taken for a new one after a fast rank's *stop*.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from coordd.host.world import World
from coordd.monitoring.timeline.clock import Clock
from coordd.monitoring.timeline.writer import Writer
from coordd.negotiation.channel import Lost
from coordd.ops.event_buffer import Deck, Tape
from coordd.ops.messages import Message, Ping, Pong, Recording

__all__ = ["Recorder"]

log = logging.getLogger("coordd")

Arrived = list[tuple[int, Message | Lost]]

_PATIENCE = 5.0
"""Seconds that a rank waits at most for its file to be complete."""


class Recorder:
    """Starts and ends recordings; for the daemon's thread, except `finish`."""

    def __init__(self) -> None:
        """Starts without a recording."""
        self.deck = Deck()
        self._calls = 0
        self._heard = 0
        self._writer: Writer | None = None
        self._about: dict[str, object] = {}
        self._clock = Clock(shared=True)

    def connect(self, tell: Callable[[Message], None], send: Callable[[int, Message], None], *, parent: int) -> None:
        """Sets the functions that send messages; must be called first.

        Args:
            tell: sends a message to the coordinator.
            send: sends a message to a neighbour in the tree.
            parent: the rank's parent in the tree.
        """
        self.tell, self._send, self._parent = tell, send, parent

    def enter(self, world: World, pids: Sequence[int]) -> None:
        """Sets the ranks of the job and their process ids; must be called before recording."""
        self._clock = Clock(shared=world.host == world.hosts[0])
        job = hashlib.sha256(repr((world.hosts, pids)).encode()).hexdigest()[:12]
        who = {"rank": world.rank, "size": world.size, "host": world.host, "pid": pids[world.rank]}
        self._about = {**who, "job": job}

    def call(self, folder: str, *, cycles: bool) -> Recording | None:
        """Starts a recording or, if ``folder`` is empty, ends it, for a call of this rank's program.

        Returns:
            the message for the other ranks; None if another rank called first.
        """
        self._calls += 1
        recording = Recording(self._calls, folder, cycles)
        return recording if self.hear(recording) else None

    def hear(self, recording: Recording) -> bool:
        """Starts or ends a recording on a message of any rank; returns False if the call was already processed."""
        if recording.number <= self._heard:
            return False
        self._heard = recording.number
        self._change(recording)
        return True

    def close(self) -> None:
        """Ends the recording and waits up to ``_PATIENCE`` seconds for its file to be complete."""
        self._change(Recording(self._heard))
        self.finish()

    def finish(self) -> None:
        """Waits up to ``_PATIENCE`` seconds for the file of an ended recording to be complete. For any thread."""
        writer = self._writer
        if writer is not None and self.deck.tape is None:
            writer.join(_PATIENCE)

    def sift(self, arrived: Arrived) -> Arrived:
        """Handles the clock's messages; returns the other messages."""
        return [(sender, message) for sender, message in arrived if not self._settle(sender, message)]

    def look(self) -> None:
        """Records a cycle, and sends clock requests when they are due; called in each cycle while recording."""
        tape = self.deck.tape
        if tape is not None:
            tape.cycle()
            if (ping := self._clock.turn(time.monotonic())) is not None:
                self._send(self._parent, ping)

    @property
    def deadline(self) -> float | None:
        """Time at which `look` must be called even without events; None for never."""
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
            except RuntimeError as error:  # no thread can be started; a recording must not end the job
                log.warning("there is no timeline of this rank, the training goes on: %s", error)
                return
            if self._clock.reading is not None:
                self._writer.note(self._clock.reading)
            self.deck.tape = tape
