"""One launched job: its process tree and its output.

Rule: a job leaves no process behind, however it is left. Its processes are known by a mark in their environment,
which also finds those whose parent has died or that have moved to another process group.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self

import psutil

from tests.scaled_timeout import MAX_SLOWDOWN, ScaledTimeout

__all__ = ["HangError", "Job", "Outcome"]

_MARK = "PYTEST_JOB"
_RANK_VARIABLES = {"OMPI_COMM_WORLD_RANK", "PMI_RANK"}
_TAG = re.compile(r"^\[(?:\d+,)?(\d+)\](?:<std(?:out|err)>)?:? ?")
_END_SECONDS = 10.0
_ORPHAN_SECONDS = 60


class HangError(AssertionError):
    """A job did not end in time; the text holds its output, with the stacks of every rank."""


@dataclass(frozen=True)
class Line:
    """One line of output, as the launcher passed it on."""

    stream: str
    raw: str

    @property
    def rank(self) -> int | None:
        """The rank in the launcher's tag, if there is one."""
        found = _TAG.match(self.raw)
        return int(found[1]) if found else None

    @property
    def text(self) -> str:
        """The line without the tag."""
        return _TAG.sub("", self.raw)


@dataclass(frozen=True, repr=False)
class Outcome:
    """How a job ended: the launcher's exit code (negative: its signal), duration, output in the order of arrival."""

    returncode: int
    seconds: float
    lines: tuple[Line, ...]

    @property
    def stdout(self) -> str:
        """What all ranks wrote to standard output, without tags."""
        return "".join(line.text + "\n" for line in self.lines if line.stream == "stdout")

    @property
    def stderr(self) -> str:
        """What all ranks and the launcher wrote to standard error, without tags."""
        return "".join(line.text + "\n" for line in self.lines if line.stream == "stderr")

    def of_rank(self, rank: int) -> str:
        """What one rank wrote to both streams."""
        return "".join(line.text + "\n" for line in self.lines if line.rank == rank)

    def __repr__(self) -> str:
        """Everything, for the message of a failing test."""
        return "\n".join([f"exit code {self.returncode} after {self.seconds:.1f} s", *(x.raw for x in self.lines)])


class Job:
    """A launched process tree; a context manager that ends whatever is left of it.

    Args:
        command: launcher and program.
        environment: all variables.
        timeout: how long the job should last at most; should the tests be killed meanwhile, then the MPI launcher
            itself ends the job a minute later.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, timeout: float) -> None:
        self._mark = uuid.uuid4().hex
        self._since = time.monotonic()
        self._arrival = threading.Condition()
        self._lines: list[Line] = []
        self._open_streams = 2
        limit = str(int(timeout * MAX_SLOWDOWN) + _ORPHAN_SECONDS)
        self._launcher = subprocess.Popen(
            command,
            env={**environment, _MARK: self._mark, "MPIEXEC_TIMEOUT": limit},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        streams = {"stdout": self._launcher.stdout, "stderr": self._launcher.stderr}
        self._readers = [threading.Thread(target=self._read, args=each, daemon=True) for each in streams.items()]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.kill()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to the launcher's process group, as a terminal does for Ctrl-C."""
        os.killpg(self._launcher.pid, number)

    def processes(self) -> list[psutil.Process]:
        """Everything of this job that still runs, the launcher included."""
        return [process for process in psutil.process_iter() if _variables(process).get(_MARK) == self._mark]

    def wait_for(self, text: str, timeout: float = 30.0) -> str:
        """Waits until a line of output holds ``text``, and returns that line.

        Raises:
            HangError: it did not come.
        """

        def found() -> str | None:
            return next((line.text for line in self._lines if text in line.text), None)

        limit = ScaledTimeout(timeout)
        with self._arrival:
            while (line := found()) is None and self._open_streams and (wait := limit.next_wait()):
                self._arrival.wait(wait)
        if line is None:
            self.abort()
            raise HangError(f"no line with {text!r} within {timeout:g} s; {self.outcome()}")
        return line

    def wait(self, timeout: float) -> Outcome:
        """Waits for the end of the job.

        Raises:
            HangError: the launcher did not end in time, or left processes behind.
        """
        limit = ScaledTimeout(timeout)
        while self._launcher.poll() is None:
            if not (wait := limit.next_wait()):
                self.abort()
                raise HangError(f"the job did not end within {timeout:g} s; {self.outcome()}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.wait(wait)
        if left := _await_end(self.processes()):
            self.abort()
            raise HangError(f"processes {[process.pid for process in left]} outlived the launcher; {self.outcome()}")
        return self.outcome()

    def abort(self) -> None:
        """Ends the job, but lets every rank write the stacks of all its threads first."""
        ranks: list[psutil.Process] = []
        launchers: list[psutil.Process] = []
        for process in self.processes():
            (ranks if _RANK_VARIABLES & _variables(process).keys() else launchers).append(process)
        # A launcher ends the other ranks as soon as one has died: it has to hold still until all have written.
        _each(launchers, psutil.Process.suspend)
        _each(ranks, lambda process: process.send_signal(signal.SIGABRT))
        _each(ranks, psutil.Process.resume)
        _await_end(ranks)
        _each(launchers, psutil.Process.resume)
        _await_end(launchers)
        self.kill()

    def kill(self) -> None:
        """Ends every process of this job at once."""
        while processes := self.processes():
            _each(processes, psutil.Process.kill)
            _await_end(processes)
        self._launcher.wait(_END_SECONDS)

    def outcome(self) -> Outcome:
        """How the job ended; to be asked only after its end."""
        for reader in self._readers:
            reader.join(_END_SECONDS)
        seconds = time.monotonic() - self._since
        return Outcome(self._launcher.wait(_END_SECONDS), seconds, tuple(self._lines))

    def _read(self, name: str, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                with self._arrival:
                    self._lines.append(Line(name, line.rstrip("\n")))
                    self._arrival.notify_all()
        with self._arrival:
            self._open_streams -= 1
            self._arrival.notify_all()


def _variables(process: psutil.Process) -> dict[str, str]:
    """The environment of a process; empty when it has ended or belongs to somebody else."""
    try:
        return process.environ()
    except psutil.Error:
        return {}


def _each(processes: Sequence[psutil.Process], act: Callable[[psutil.Process], None]) -> None:
    for process in processes:
        try:
            act(process)
        except psutil.NoSuchProcess:
            continue


def _await_end(processes: Sequence[psutil.Process], seconds: float = _END_SECONDS) -> list[psutil.Process]:
    """Waits until all have ended, reaped or not, and returns those that have not.

    psutil's own waiting would take the launcher's exit code away from ``subprocess``.
    """
    watches = {watch: process for process in processes if (watch := _watch(process)) is not None}
    deadline = time.monotonic() + seconds
    while watches and (ended := select.select(watches, [], [], max(0.0, deadline - time.monotonic()))[0]):
        for watch in ended:
            os.close(watch)
            del watches[watch]
    for watch in watches:
        os.close(watch)
    return list(watches.values())


def _watch(process: psutil.Process) -> int | None:
    """A descriptor that becomes readable when the process ends."""
    try:
        return os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
