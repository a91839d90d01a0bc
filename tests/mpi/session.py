"""One ``mpirun`` whose ranks run one case after the other.

Every rank holds a connection to the session. The session names a case, waits until all ranks have answered, and names
the next. After a case that did not pass on every rank, the ranks are no longer in a state to be trusted (some may still
wait for the others), so they are ended, and the next case gets new ones.
"""

from __future__ import annotations

import contextlib
import enum
import json
import select
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mpi.cases import Case
from tests.mpi.job import HangError, Job
from tests.mpi.launch import command, environment, session_folder
from tests.scaled_timeout import ScaledTimeout

__all__ = ["Session", "Sessions"]

_CONNECT_SECONDS = 30.0
_START_SECONDS = 90.0
_LAST_SECONDS = 3600.0
_END_SECONDS = 20.0
_GRACE_SECONDS = 3.0


class Fate(enum.Enum):
    """How a case went on one rank; the likeliest culprit first."""

    DIED = "ended"
    FAILED = "failed"
    SILENT = "did not come back"
    PASSED = "passed"


@dataclass(frozen=True)
class Verdict:
    """What one rank made of a case."""

    rank: int
    fate: Fate
    seconds: float
    problem: str = ""


class Session:
    """A world of ranks that starts when the first case comes, and anew after a case that failed.

    Args:
        size: number of ranks.
        framework: the module whose ``init`` and ``shutdown`` surround the cases; empty for none.
        settings: environment variables of the ranks.
    """

    def __init__(self, size: int, *, framework: str = "", settings: Mapping[str, str] | None = None) -> None:
        self.size = size
        self._settings = settings or {}
        self._framework = framework
        self._crew: _Crew | None = None

    def run(self, case: Case) -> str:
        """Runs one case on all ranks.

        Returns:
            Empty if the case passed on every rank; else what each rank said, the likeliest culprit first: traceback,
            output and, if it did not come back, the stacks of its threads.
        """
        if self._crew is None:
            self._crew = _Crew(self.size, self._settings)
            if self._framework and (problem := self._run(Case(self._framework, "init", deadline=_START_SECONDS))):
                return problem
        return self._run(case)

    def close(self) -> str:
        """Lets the ranks shut down and leave.

        Returns:
            Empty if they did so in time and with exit code 0; else what went wrong.
        """
        if self._crew and self._framework and (problem := self._run(Case(self._framework, "shutdown"))):
            return problem
        crew, self._crew = self._crew, None
        return crew.leave() if crew else ""

    def _run(self, case: Case) -> str:
        assert self._crew
        crew, self._crew = self._crew, None
        try:
            problem = crew.run(case)
        except BaseException:
            crew.end()
            raise
        self._crew = None if problem else crew
        return problem


class Sessions(dict[tuple[str, int], Session]):
    """Sessions by the name of their settings and number of ranks; each starts when its first case comes."""

    def __init__(self, ways: Mapping[str, Mapping[str, str]], *, framework: str) -> None:
        super().__init__()
        self._ways = ways
        self._framework = framework

    def __missing__(self, key: tuple[str, int]) -> Session:
        way, size = key
        self[key] = Session(size, framework=self._framework, settings=self._ways[way])
        return self[key]

    def close(self) -> str:
        """Lets all ranks leave; says what went wrong."""
        return "\n\n".join(filter(None, [session.close() for session in self.values()]))


class _Crew:
    """The ranks of one ``mpirun``."""

    def __init__(self, size: int, settings: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="coordd-", ignore_cleanup_errors=True)
        address = str(Path(self._folder.name, "session"))
        worker = [sys.executable, "-m", "tests.mpi.worker", address, self._folder.name]
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(size)
            variables = environment() | session_folder(self._folder.name) | dict(settings)
            self._job = Job(command("mpirun", size) + worker, variables, timeout=_LAST_SECONDS)
            listener.settimeout(_CONNECT_SECONDS)
            try:
                links = [_Link(listener.accept()[0]) for _ in range(size)]
                self._links = {link.receive()["rank"]: link for link in links}
            except (TimeoutError, EOFError):
                self._job.abort()
                self._folder.cleanup()
                raise HangError(f"not all of {size} ranks came up; {self._job.outcome()}") from None

    def run(self, case: Case) -> str:
        """Runs one case; ends the ranks unless it passes on all."""
        logs = {rank: len(self._log(rank)) for rank in self._links}
        for link in self._links.values():
            link.send({"module": case.module, "name": case.name, "deadline": case.deadline})
        verdicts = self._collect(case.deadline)
        fates = {verdict.fate for verdict in verdicts}
        if fates == {Fate.PASSED}:
            return ""
        if Fate.SILENT in fates:
            self._job.abort()
        elif Fate.DIED in fates:  # the launcher has something to say, and ends the other ranks
            with contextlib.suppress(HangError):
                self._job.wait(_GRACE_SECONDS)
        self._job.kill()
        verdicts.sort(key=lambda verdict: list(Fate).index(verdict.fate))
        told = [f"{case} on {len(self._links)} ranks"]
        told += [_told(verdict, self._log(verdict.rank)[logs[verdict.rank] :]) for verdict in verdicts]
        if Fate.DIED in fates:
            told.append(f"the launcher: {self._job.outcome()}")
        self.end()
        return "\n\n".join(told)

    def leave(self) -> str:
        """Hangs up, and waits until all have left."""
        for link in self._links.values():
            link.close()
        try:
            outcome = self._job.wait(_END_SECONDS)
        except HangError as hang:
            problem = str(hang)
        else:
            problem = str(outcome) if outcome.returncode else ""
        if problem:
            problem = "\n\n".join([problem, *(f"rank {rank}:\n{self._log(rank)}" for rank in self._links)])
        self.end()
        return problem

    def end(self) -> None:
        """Ends the ranks at once."""
        for link in self._links.values():
            link.close()
        self._job.kill()
        self._folder.cleanup()

    def _collect(self, seconds: float) -> list[Verdict]:
        """Waits for the answers, in the order of arrival; after a bad one, the others get a short grace only."""
        verdicts = []
        waiting = {link: rank for rank, link in self._links.items()}
        since = time.monotonic()
        limit = ScaledTimeout(seconds)
        while waiting and (wait := limit.next_wait()):
            for link in select.select(waiting, [], [], wait)[0]:
                verdict = link.verdict(waiting.pop(link), time.monotonic() - since)
                verdicts.append(verdict)
                if verdict.fate is not Fate.PASSED:
                    limit.shorten(_GRACE_SECONDS)
        elapsed = time.monotonic() - since
        return verdicts + [Verdict(rank, Fate.SILENT, elapsed) for rank in sorted(waiting.values())]

    def _log(self, rank: int) -> str:
        return Path(self._folder.name, f"{rank}.log").read_text(errors="replace")


class _Link:
    """The connection to one rank: one line of JSON there, one back."""

    def __init__(self, wire: socket.socket) -> None:
        self._wire = wire
        self._lines = wire.makefile("r", encoding="utf-8")

    def fileno(self) -> int:
        """For ``select``."""
        return self._wire.fileno()

    def send(self, fields: dict[str, Any]) -> None:
        """Sends; that a rank has ended shows in its missing answer."""
        with contextlib.suppress(ConnectionError):
            self._wire.sendall((json.dumps(fields) + "\n").encode())

    def receive(self) -> dict[str, Any]:
        """Waits for an answer.

        Raises:
            EOFError: the rank has ended.
        """
        with contextlib.suppress(ConnectionError):
            if line := self._lines.readline():
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise EOFError

    def verdict(self, rank: int, elapsed: float) -> Verdict:
        """Waits for the answer to a case."""
        try:
            answer = self.receive()
        except EOFError:
            return Verdict(rank, Fate.DIED, elapsed)
        fate = Fate.FAILED if answer["problem"] else Fate.PASSED
        return Verdict(rank, fate, answer["seconds"], answer["problem"])

    def close(self) -> None:
        """Hangs up."""
        self._lines.close()
        self._wire.close()


def _told(verdict: Verdict, output: str) -> str:
    headline = f"── rank {verdict.rank} {verdict.fate.value} after {verdict.seconds:.2f} s "
    parts = [headline.ljust(80, "─"), verdict.problem]
    if output.strip():
        parts += ["its output:", output.rstrip()]
    return "\n".join(filter(None, parts))
