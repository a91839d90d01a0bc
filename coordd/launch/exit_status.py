"""Determines the exit status of a job, and one or two lines on the cause.

One rule: the first failure that is not a consequence of another rank's failure is the cause, and it is printed last,
below all output that followed from it. If all failures are consequences, the rank that they name is the cause.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from coordd.errors import spans
from coordd.launch.frames import Ended
from coordd.launch.outcome import Outcome, signal_name

__all__ = ["Record", "Verdict", "judge"]

_NAMED = re.compile(r".*\b(?:PeerError|RefusedError): rank (\d+) (.+)")
"""The message of a rank that fails because of another rank; the innermost match names the cause."""
_ABORT = re.compile(r"MPI_ABORT was invoked on rank (\d+).*?[Ee]rrorcode:? (-?\d+)", re.DOTALL)
_APART = "the ranks did not find each other"
"""Part of the message of a rank that timed out in `init` waiting for other ranks."""


@dataclass
class Record:
    """The observed events of a job.

    Attributes:
        size: number of ranks requested.
        launcher: name of the launcher.
        hosts: host of each rank that has started.
        ended: the ranks' `Ended` frames, in order of arrival.
        waiting: ranks that have been in `init` for a while.
        stopped_by: the signal with which the user ended the job, or 0.
        status: exit status of the launcher; negative for signals, as in `subprocess`.
        said: lines of output of the launcher itself.
    """

    size: int
    launcher: str
    hosts: dict[int, str] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)
    stopped_by: int = 0
    status: int = 0
    said: list[str] = field(default_factory=list)

    @property
    def running(self) -> list[int]:
        """Ranks that have started and not ended, ascending."""
        return sorted(self.hosts.keys() - {end.rank for end in self.ended})

    @property
    def cannot_start(self) -> bool:
        """Whether ranks wait in `init` for a rank that has exited without calling it."""
        return bool(self.waiting) and any(end.outcome.absent for end in self.ended)

    @property
    def well(self) -> bool:
        """Whether all ranks have ended with exit code 0."""
        return len(self.ended) == self.size and not any(end.outcome.failed for end in self.ended)


@dataclass(frozen=True)
class Verdict:
    """The exit code of a job, a text about its end, and whether `coordd run` has to exit at once (``hurried``)."""

    status: int
    text: str = ""
    hurried: bool = False


def judge(record: Record) -> Verdict:
    """Determines the exit code and the cause."""
    if record.stopped_by == signal.SIGTERM and record.well:
        return Verdict(0, "all ranks have ended in time, with exit code 0")
    if record.stopped_by:
        name = signal_name(record.stopped_by)
        text = "interrupted" if record.stopped_by == signal.SIGINT else f"ended by {name}"
        return Verdict(128 + record.stopped_by, text, hurried=record.stopped_by != signal.SIGINT)
    if cause := _cause(record):
        return _blamed(cause, record)
    if record.well:
        return Verdict(0)
    return _unheard(record)


class _Cause(NamedTuple):
    """The rank that caused the failure, how it ended, and the text that replaces the outcome's."""

    rank: int
    outcome: Outcome
    text: str = ""


def _cause(record: Record) -> _Cause | None:
    """Returns the first failure of the most informative kind.

    The kinds, in order: an independent failure, an `MPI_Abort`, an exit without `shutdown` that made other ranks fail,
    a rank that a consequence names, a consequence, an exit without `init` after which the MPI launcher ended the other
    ranks, an end on request.
    """
    failures = [_Cause(*end) for end in record.ended if end.outcome.failed]
    told = [end for end in failures if end.outcome.told or _killed_in_init(end.rank, record)]
    others = [end for end in failures if end not in told]
    own = [end for end in others if not end.outcome.consequence]
    named = _named(others)
    left = _left(record, {cause.rank for cause in named})
    absent = _absent(record) if told or record.cannot_start else []
    return next(chain(own, _aborted(record.said), left, named, others, absent, told), None)


def _aborted(said: list[str]) -> list[_Cause]:
    """Parses Open MPI's notice: the rank that calls `MPI_Abort` is often killed before it can exit with its code."""
    found = _ABORT.search("\n".join(said))
    if not found:
        return []
    code = int(found[2]) & 0xFF or 1
    return [_Cause(int(found[1]), Outcome(code, exception=f"it called MPI_Abort with code {found[2]}"))]


def _left(record: Record, named: set[int]) -> list[_Cause]:
    """Returns the ranks that exited with code 0 but without `shutdown`; ranks that others name come first.

    If all ranks ended in this way, none of them is the cause: no other rank waited for them, not even in `shutdown`.
    """
    text = "exited with code 0 but without shutdown(), as os._exit(0) does, while other ranks still needed it"
    left = [_Cause(end.rank, Outcome(1), text) for end in record.ended if end.outcome.left]
    if len(left) == record.size:
        return []
    return sorted(left, key=lambda cause: cause.rank not in named)


def _absent(record: Record) -> list[_Cause]:
    """Returns the ranks that exited with code 0 and had not called `init`, if another rank ended inside `init`.

    The job ends then: `coordd run` asks the ranks that wait in `init` to end, or the MPI launcher has ended them.
    """
    text = "exited with code 0 without calling init(), in which other ranks waited for it"
    waited = bool(record.waiting) or any(end.outcome.entering for end in record.ended)
    return [_Cause(end.rank, Outcome(1), text) for end in record.ended if end.outcome.absent and waited]


def _killed_in_init(rank: int, record: Record) -> bool:
    """Returns whether a rank was killed in `init` after another one had exited without calling it, as by Open MPI."""
    for end in record.ended:
        if end.rank == rank:
            return False
        if end.outcome.absent:
            break
    return any(
        end.rank == rank and end.outcome.entering and end.outcome.signal == signal.SIGKILL for end in record.ended
    )


def _named(failures: list[_Cause]) -> list[_Cause]:
    """Returns the ranks that other ranks' messages name as the cause of their failures."""
    found = []
    for rank, outcome, _ in failures:
        if match := _NAMED.search(outcome.exception):
            found.append(_Cause(int(match[1]), Outcome(1), f"{match[2]}; rank {rank} {outcome.how} because of that"))
    return found


def _blamed(cause: _Cause, record: Record) -> Verdict:
    text = f"rank {cause.rank}"
    if len(set(record.hosts.values())) > 1:
        text += f" (host {record.hosts.get(cause.rank, 'unknown')})"
    text += f" {cause.text or cause.outcome.text}"
    if cause.outcome.signal == signal.SIGKILL:
        text += " (if nobody sent it, the kernel did for want of memory: see 'dmesg')"
    if "No module named 'horovod'" in cause.outcome.exception:
        text += " (to run scripts of Horovod on coordd: coordd run --as-horovod)"
    if _APART in cause.outcome.exception and (gone := [end.rank for end in record.ended if not end.outcome.failed]):
        text += f" (rank{'s' * (len(gone) > 1)} {spans(gone)} ended with exit code 0 without meeting the others)"
    alike = [end.rank for end in record.ended if end.rank != cause.rank and _alike(end.outcome, cause.outcome)]
    if alike and not cause.text:
        text += f" (rank{'s' * (len(alike) > 1)} {spans(alike)} too)"
    return Verdict(cause.outcome.status, text)


def _alike(one: Outcome, other: Outcome) -> bool:
    """Returns whether two ranks ended in the same way.

    SIGKILL does not count, because some launchers kill all ranks when one is killed. If a signal ended a rank, its last
    line of output does not matter.
    """
    said = one.last if one.signal else other.last
    return one.signal != signal.SIGKILL and one == other._replace(last=said)


def _unheard(record: Record) -> Verdict:
    """Describes a launcher that ended before its ranks, or without starting them."""
    status = record.status
    how = f"exited with code {status}" if status >= 0 else f"was ended by {signal_name(-status)}"
    running = record.running
    when = f"while rank{'s' * (len(running) > 1)} {spans(running)} ran" if running else "before any rank had started"
    hint = "" if running else "; what it said is above"
    return Verdict(128 - status if status < 0 else status or 1, f"{record.launcher} {how} {when}{hint}")
