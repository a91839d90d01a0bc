"""Selects the job to query: the only one, or the one that a process id or name belongs to. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from coordd.errors import CoorddError
from coordd.monitoring.status.address import Address

__all__ = ["Jobs", "NoJobError", "choose", "jobs"]

Jobs = dict[str, list[Address]]
"""The addresses of each job's ranks on this host, by rank."""


class NoJobError(CoorddError):
    """No job fits the request, or several do."""


def jobs(addresses: Iterable[Address]) -> Jobs:
    """Groups addresses by job; of several addresses of one process, only the latest is kept."""
    latest = {(address.job, address.pid): address for address in sorted(addresses, key=lambda each: each.turn)}
    found: Jobs = {}
    for address in sorted(latest.values(), key=lambda each: (each.job, each.rank, each.pid)):
        found.setdefault(address.job, []).append(address)
    return found


def choose(found: Jobs, word: str, *, ancestors: Callable[[int], Iterable[int]]) -> Sequence[Address]:
    """Selects a job.

    Args:
        found: the jobs on this host.
        word: the process id of a rank or of an ancestor, such as `coordd run`; or the name of a job; empty for the
            only job.
        ancestors: lists the ids of a process and its ancestors.

    Raises:
        NoJobError: no job fits, or several do; the message lists the jobs.
    """
    if not found:
        raise NoJobError("no job of yours runs on this host: ask on a host of the job, in its container if it has one")
    if not word:
        if len(found) == 1:
            return next(iter(found.values()))
        raise NoJobError(f"{len(found)} jobs of yours run on this host, say which:\n{_list(found)}")
    fits = [job for job, ranks in found.items() if _is_meant(word, job, ranks, ancestors)]
    if len(fits) == 1:
        return found[fits[0]]
    raise NoJobError(f"{len(fits) or 'no'} jobs of yours fit {word!r}; there are:\n{_list(found)}")


def _is_meant(word: str, job: str, ranks: Sequence[Address], ancestors: Callable[[int], Iterable[int]]) -> bool:
    if job == word or job.startswith(f"{word}."):  # a Slurm job has steps
        return True
    return word.isdecimal() and any(int(word) in ancestors(address.pid) for address in ranks)


def _list(found: Jobs) -> str:
    lines = []
    for job, ranks in found.items():
        size = ranks[0].size
        count = f"{len(ranks)} of {size} ranks" if len(ranks) < size else f"{size} {'rank' if size == 1 else 'ranks'}"
        lines.append(f"  coordd status {ranks[0].pid}  # {count}, job {job}")
    return "\n".join(lines)
