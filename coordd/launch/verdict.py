"""What a job's end was, in one exit code and one or two lines.

One rule: the first failure that is nobody else's consequence is the cause, and it is named last, below everything that
followed from it. Where all failures are consequences, the rank that they name is the cause.
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
"""How a rank that fails because of another one names that one and its failure; the innermost is the cause."""
_ABORT = re.compile(r"MPI_ABORT was invoked on rank (\d+).*?[Ee]rrorcode:? (-?\d+)", re.DOTALL)
_APART = "the ranks did not find each other"
"""How a rank fails in `init` that waits for others in vain."""


@dataclass
class Record:
    """What was seen of a job.

    Attributes:
        size: number of ranks asked for.
        launcher: what started them.
        hosts: host of each rank that has started.
        ended: ranks' ends, in the order in which they were heard of.
        stopped_by: the signal with which the user ended the job, or 0.
        status: how the launcher ended; negative for signals, as `subprocess` has it.
        said: what the launcher wrote itself.
    """

    size: int
    launcher: str
    hosts: dict[int, str] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)
    stopped_by: int = 0
    status: int = 0
    said: list[str] = field(default_factory=list)

    @property
    def running(self) -> list[int]:
        """Ranks that have started and not ended."""
        return sorted(self.hosts.keys() - {end.rank for end in self.ended})

    @property
    def well(self) -> bool:
        """Whether every rank has ended with exit code 0."""
        return len(self.ended) == self.size and not any(end.outcome.failed for end in self.ended)


@dataclass(frozen=True)
class Verdict:
    """The end of a job: its exit code, what to say about it, and whether somebody waits for us to be gone."""

    status: int
    text: str = ""
    hurried: bool = False


def judge(record: Record) -> Verdict:
    """Finds the cause."""
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
    """The rank to blame, how it ended, and what to say of it instead of that."""

    rank: int
    outcome: Outcome
    text: str = ""


def _cause(record: Record) -> _Cause | None:
    """Picks the first failure of the best kind.

    These are: one of its own, an `MPI_Abort`, an end without `shutdown` that made others fail, what a consequence
    names, a consequence, an end on request.
    """
    failures = [_Cause(*end) for end in record.ended if end.outcome.failed]
    own = [end for end in failures if not end.outcome.told and not end.outcome.consequence]
    told = [end for end in failures if end.outcome.told]
    others = [end for end in failures if not end.outcome.told]
    named = _named(others)
    left = _left(record, {cause.rank for cause in named})
    return next(chain(own, _aborted(record.said), left, named, others, told), None)


def _aborted(said: list[str]) -> list[_Cause]:
    """Reads Open MPI's notice: the rank that calls `MPI_Abort` is often killed before it can exit with its code."""
    found = _ABORT.search("\n".join(said))
    if not found:
        return []
    code = int(found[2]) & 0xFF or 1
    return [_Cause(int(found[1]), Outcome(code, exception=f"it called MPI_Abort with code {found[2]}"))]


def _left(record: Record, named: set[int]) -> list[_Cause]:
    """Lists the ranks that ended well, but without `shutdown`; those that others name come first.

    None of them is to blame if all ranks have ended so: the others did not wait for them, not even in `shutdown`.
    """
    text = "exited with code 0 but without shutdown(), as os._exit(0) does, while other ranks still needed it"
    left = [_Cause(end.rank, Outcome(1), text) for end in record.ended if end.outcome.left]
    if len(left) == record.size:
        return []
    return sorted(left, key=lambda cause: cause.rank not in named)


def _named(failures: list[_Cause]) -> list[_Cause]:
    """Reads which ranks other ranks have failed of, in the words of those."""
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
    """Says whether two ranks have ended in the same way, of themselves: some launchers kill all when one is killed.

    What a rank said before a signal ended it does not matter.
    """
    said = one.last if one.signal else other.last
    return one.signal != signal.SIGKILL and one == other._replace(last=said)


def _unheard(record: Record) -> Verdict:
    """Speaks about a launcher that ended although ranks did not, or that never started them."""
    status = record.status
    how = f"exited with code {status}" if status >= 0 else f"was ended by {signal_name(-status)}"
    running = record.running
    when = f"while rank{'s' * (len(running) > 1)} {spans(running)} ran" if running else "before any rank had started"
    hint = "" if running else "; what it said is above"
    return Verdict(128 - status if status < 0 else status or 1, f"{record.launcher} {how} {when}{hint}")
