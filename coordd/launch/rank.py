"""The small wrapper process of one rank: ``python -m coordd.launch.rank … -- command …``.

The MPI launcher starts it instead of the command. It starts the command in a session of its own, forwards its output to
`coordd run` line by line, forwards signals and reports the end. One rule: it starts quickly, hence imports little.

Stopping: the first request to stop is forwarded to the command, the second one kills its process group with SIGKILL. A
wrapper whose command failed, left without `shutdown`, or was asked to stop, stays until the second request: an MPI
launcher that sees one process exit with an error, or without `MPI_Finalize`, ends all others at once, before they can
report how the failure affected them.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from coordd.host.affinity import DAEMON_CORES, write_cpus
from coordd.host.cores import cores_here
from coordd.host.presence import Presence
from coordd.launch.child import Child
from coordd.launch.frames import Ended, Started, Waiting, encode, whole
from coordd.launch.outcome import Outcome
from coordd.launch.output_forwarder import Relay
from coordd.launch.place import place
from coordd.launch.process_guard import Guard, die_with_parent
from coordd.launch.shares import Share, Wish, describe, divide, thread_variables

__all__ = ["Order", "Rank", "main"]

_CHECK = 1.0  # seconds between two checks of whether the command waits in `init`
_NEVER = float("inf")
_QUIET = 0.05  # seconds without output after which an unfinished line is shown
_LEFTOVERS = 0.3  # seconds for the command's remaining processes to end

# The signal that each request to stop is converted to. Open MPI forwards SIGALRM and SIGURG without side effects, but
# kills the ranks a quarter of a second after SIGINT or SIGTERM.
_STOPS = {
    signal.SIGINT: signal.SIGINT,
    signal.SIGALRM: signal.SIGINT,
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGURG: signal.SIGTERM,
}
_PARENT_DIED = signal.SIGHUP
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_HANDLED = (*_STOPS, _PARENT_DIED, *_PASSED_ON, signal.SIGCHLD)


class Order(NamedTuple):
    """The arguments that `coordd run` passes to each rank's wrapper process on its command line.

    Attributes:
        command: the user's command.
        style: the MPI launcher's set of variables, see `coordd.launch.place`.
        threads: threads of the command; 0 for this rank's share of the cores.
        bind: whether to bind the command to its share of the cores.
        as_horovod: whether to set Horovod's variables (``HOROVOD_RANK`` …) for the command too.
    """

    command: Sequence[str]
    style: str = "alone"
    threads: int = 0
    bind: bool = True
    as_horovod: bool = False

    @property
    def arguments(self) -> list[str]:
        """The command-line arguments that `parse` reads."""
        return [self.style, str(self.threads), str(int(self.bind)), str(int(self.as_horovod)), "--", *self.command]

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Order:
        """Parses `arguments`; without argparse, whose import would take longer than all other work of this process."""
        style, threads, bind, as_horovod, _, *command = arguments
        return cls(command, style, int(threads), bind == "1", as_horovod == "1")


class Rank:
    """Runs one rank's command to its end."""

    def __init__(self, order: Order, *, launcher: int) -> None:
        """Starts the command.

        Args:
            order: what to run.
            launcher: the descriptor on which frames are sent to `coordd run`.
        """
        here = place(order.style, os.environ)
        self._asked = 0
        self._slurm = order.style == "slurm"
        self._stops = {**_STOPS, signal.SIGUSR2: signal.SIGTERM} if self._slurm else _STOPS
        self._wake = _listen()
        cores, wish = cores_here(), Wish.of(order.threads, os.environ)
        bind = order.bind and here.size > 1  # a single rank shares the cores with no other rank
        share = divide(cores, here.local_rank, here.local_size, wish)
        environment = _environment(share, insist=order.threads > 0, bind=bind)
        self._presence = Presence()
        environment |= self._presence.environment
        environment |= here.in_horovods_words(os.uname().nodename) if order.as_horovod else {}
        self._child = child = Child(order.command, environment, cpus=share.bound_to if bind else (), reset=_HANDLED)
        self._note = describe(cores, here.local_size, wish, bind=bind) if here.local_rank == 0 else ""
        self._rank = here.rank
        self._guard = Guard(child.pid, lambda: _write(launcher, self._killed()))
        self._relay = Relay(here.rank, out=child.out, err=child.err, write=lambda packet: _write(launcher, packet))
        self._launcher = launcher
        self._was_entering = self._waits = False
        self._next_check = time.monotonic() + _CHECK
        self._poller = select.poll()
        for descriptor in (self._wake, child.out, child.err):
            self._poller.register(descriptor, select.POLLIN)
        self._poller.register(launcher, 0)  # only to detect that it is closed

    def _killed(self) -> bytes:
        """Returns the frame by which the guard reports that this process was killed, and the command with it."""
        outcome = Outcome(signal=signal.SIGKILL, entering=self._presence.entering)
        return encode(Ended(self._rank, outcome))

    def run(self) -> int:
        """Serves the command until it has ended and this process may exit; returns the command's exit status."""
        self._relay.say([Started(self._rank, os.uname().nodename, self._note)])
        while (end := self._child.end()) is None:
            if not self._serve(_QUIET if self._relay.unfinished else self._patience()):
                self._relay.flush()
            self._check_init()
        self._serve_until(time.monotonic() + _LEFTOVERS, patience=0)
        outcome = self._outcome(*end)
        self._relay.say([Ended(self._rank, outcome)])
        self._sweep()
        self._guard.dismiss()
        while (outcome.failed or outcome.left or self._asked) and self._asked < 2:
            self._serve(None)
        return outcome.status

    def _patience(self) -> float | None:
        return None if self._next_check == _NEVER else max(0.0, self._next_check - time.monotonic())

    def _check_init(self) -> None:
        """Reports that the command waits in `init`, if two checks in a row find it there, and when that ends."""
        if time.monotonic() < self._next_check:
            return
        entering = self._presence.entering
        waits = entering and self._was_entering
        if waits != self._waits:
            self._relay.say([Waiting(self._rank, over=not waits)])
        self._was_entering, self._waits = entering, waits
        self._next_check = _NEVER if self._presence.present else time.monotonic() + _CHECK

    def _outcome(self, code: int, number: int) -> Outcome:
        self._relay.flush()
        words = self._relay.words
        told = self._asked > 0
        exception = words.exception if code or words.exception.startswith("Fatal") else ""
        well = not code and not number and not told
        left, absent = well and self._presence.present, well and self._presence.never
        entering = self._presence.entering
        return Outcome(code, number, told, words.consequence, exception, words.last, left, absent, entering)

    def _sweep(self) -> None:
        """Ends the command's remaining processes, and forwards the output that they still write."""
        if self._relay.open:
            self._child.tell_all(signal.SIGTERM)
            self._serve_until(time.monotonic() + _LEFTOVERS, patience=_LEFTOVERS)
        self._child.bury()
        self._serve_until(time.monotonic() + _LEFTOVERS, patience=0)

    def _serve_until(self, deadline: float, *, patience: float) -> None:
        """Serves until the pipes are closed, no event arrives for ``patience`` seconds, or the deadline has passed."""
        while self._relay.open and time.monotonic() < deadline and self._serve(patience):
            continue

    def _serve(self, seconds: float | None) -> bool:
        """Waits for output and signals and handles them; returns ``False`` if there was no event in time."""
        events = self._poller.poll(None if seconds is None else seconds * 1000)
        for descriptor, _ in events:
            if descriptor == self._wake:
                for number in os.read(self._wake, 64):
                    self._hear(number)
            elif descriptor == self._launcher:
                self._poller.unregister(descriptor)
                self._stop(_PARENT_DIED)
            elif not self._relay.read(descriptor):
                self._poller.unregister(descriptor)
        return bool(events)

    def _hear(self, number: int) -> None:
        if number == _PARENT_DIED or number in self._stops:
            self._stop(number)
        elif number in _PASSED_ON and not self._slurm:  # Slurm has sent it to the command too
            self._child.tell(number)

    def _stop(self, number: int) -> None:
        self._asked += 2 if number == _PARENT_DIED else 1
        if self._asked > 1:
            self._child.tell_all(signal.SIGKILL)
        elif (asked := self._stops[signal.Signals(number)]) is signal.SIGTERM:
            self._child.ask(asked)
        else:
            self._child.tell_all(asked)


def _environment(share: Share, *, insist: bool, bind: bool) -> dict[str, str]:
    """Returns the command's environment; variables that the user has set are kept."""
    defaults = {
        "PYTHONUNBUFFERED": "1",  # output arrives when it is written, and none is lost when the process is killed
        "PYTHONFAULTHANDLER": "1",  # a crash in native code prints a traceback
    }
    own = thread_variables(share.threads, os.environ, insist=insist)
    if bind and share.daemon_on:
        own[DAEMON_CORES] = write_cpus(share.daemon_on)
    return {**defaults, **os.environ, **own, "COORDD_LAUNCHED": "1"}


def _listen() -> int:
    """Delivers signals as bytes on the returned descriptor."""
    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)
    signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
    for number in _HANDLED:
        signal.signal(number, lambda _number, _frame: None)
    return ear


def _write(descriptor: int, packet: bytes) -> None:
    while packet:
        packet = packet[os.write(descriptor, packet) :]


def main(arguments: Sequence[str]) -> int:
    """Runs the command in the arguments; returns its exit status."""
    die_with_parent(_PARENT_DIED, os.getppid())
    whole(2)
    return Rank(Order.parse(arguments), launcher=2).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
