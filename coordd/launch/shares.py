"""Divides a host's cores among its ranks.

```
 8 cores, 2 ranks of 3 threads      0 1 2 | 3      4 5 6 | 7          7 cores, 2 ranks      0 1 2   3 4 5 | 6
                                    rank 0  daemon rank 1  daemon                           rank 0  rank 1  both daemons
```

Rules: unless the user asks for more, the ranks of one host get at most one thread per usable core in total,
hyper-threads not counted, but at least one thread each. Spare cores go to the daemons. Without spare cores, a rank and
its daemon are bound to the same share, so that one can wake the other without waking an idle core; ranks with more
than one thread are bound only if the host has two cores per rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from coordd.host.affinity import daemon_cores, write_cpus
from coordd.host.cores import Cores
from coordd.host.oversubscription import oversubscribed, threads_asked

__all__ = ["Share", "Wish", "describe", "divide", "thread_variables"]

# Daemons do most of their work at the same time, when backward ends and the compute cores become idle: with more
# daemons on one core, waiting for each other would cost more than sharing a core with the computation.
_DAEMONS_A_CORE = 2
_LISTED = 4


class Wish(NamedTuple):
    """The user's choices for each rank; 0 or empty leaves the choice to coordd.

    Attributes:
        threads: number of compute threads.
        daemon_on: hardware threads on which the daemon runs.
    """

    threads: int = 0
    daemon_on: frozenset[int] = frozenset()

    @classmethod
    def of(cls, threads: int, environment: Mapping[str, str]) -> Wish:
        """Combines the requested number of threads, which takes precedence, with the environment.

        Raises:
            ConfigError: the environment variable for the daemon's cores does not list processors.
        """
        return cls(threads or threads_asked(environment), daemon_cores(environment))


class Share(NamedTuple):
    """The threads and cores of one rank.

    Attributes:
        threads: number of compute threads.
        bound_to: hardware threads that the rank is bound to; empty for any.
        daemon_on: hardware threads on which its daemon runs, alone or with few other daemons; empty if the daemon
            shares the rank's cores.
    """

    threads: int
    bound_to: tuple[int, ...] = ()
    daemon_on: tuple[int, ...] = ()


def divide(cores: Cores, local_rank: int, local_size: int, wish: Wish) -> Share:
    """Computes the share of one of ``local_size`` ranks on a host.

    Args:
        cores: the cores that all ranks of the host may use.
        local_rank: number of the rank on its host.
        local_size: number of ranks on the host.
        wish: the user's choices.
    """
    cores = cores.without(wish.daemon_on)
    count = len(cores.threads)
    threads = wish.threads or max(1, cores.usable // local_size)
    spare = 0 if wish.daemon_on else count - local_size * threads
    if cores.divisible and spare * _DAEMONS_A_CORE >= local_size:
        return _beside_daemon(cores, local_rank, local_size, threads)
    share = Share(threads, daemon_on=tuple(sorted(wish.daemon_on)))
    if not cores.divisible or local_size == 1 or count < local_size * min(threads, 2):
        return share
    first, last = (count * rank // local_size for rank in (local_rank, local_rank + 1))
    return share._replace(bound_to=_flat(cores.threads[first:last]))


def _beside_daemon(cores: Cores, local_rank: int, local_size: int, threads: int) -> Share:
    """Divides the cores if some are spare: one core per daemon or, if there are fewer, per group of daemons.

    A group's cores are adjacent: first the cores of its ranks, then the core of its daemons.
    """
    spare = len(cores.threads) - local_size * threads
    groups = min(spare, local_size)
    group = ((local_rank + 1) * groups - 1) // local_size
    first, after = (local_size * number // groups for number in (group, group + 1))
    left = spare - groups
    begin, end = (
        rank * threads + number + left * number // groups for number, rank in ((group, first), (group + 1, after))
    )
    own = cores.threads[begin : end - 1]
    mine = slice(*(len(own) * (rank - first) // (after - first) for rank in (local_rank, local_rank + 1)))
    return Share(threads, _flat(own[mine]), tuple(sorted(cores.threads[end - 1])))


def _flat(cores: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return tuple(sorted(cpu for core in cores for cpu in core))


def describe(cores: Cores, local_size: int, wish: Wish, *, bind: bool = True) -> str:
    """Describes in one line the shares of a host's ranks; the arguments are as in `divide`.

    A core is named by the number of its first hardware thread.
    """
    shares = [divide(cores, rank, local_size, wish) for rank in range(local_size)]
    text = f"{_count(local_size, 'rank')} of {_count(shares[0].threads, 'thread')} on {_count(cores.usable, 'core')}"
    if oversubscribed(cores.usable, local_size, shares[0].threads):
        return f"{text}, which they take turns on"
    bound = _named(cores, [share.bound_to for share in shares]) if bind else ""
    daemons = _named(cores, [share.daemon_on for share in shares]) if bind or wish.daemon_on else ""
    if bound and daemons:
        return f"{text}: they compute on {bound}, daemons on {daemons}"
    if bound:
        return f"{text}, each with its daemon on its own: {bound}"
    if daemons:
        return f"{text}, daemons on {daemons}"
    return text if local_size == 1 else f"{text}, which daemons share"


def _named(cores: Cores, shares: Sequence[tuple[int, ...]]) -> str:
    """Lists the distinct shares of cores, abbreviated if there are many."""
    firsts = {core[0] for core in cores.threads}
    texts = [write_cpus(firsts.intersection(cpus) or cpus) for cpus in dict.fromkeys(shares)]
    if len(texts) > _LISTED:
        texts = [*texts[: _LISTED - 2], "…", texts[-1]]
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def thread_variables(threads: int, environment: Mapping[str, str], *, insist: bool) -> dict[str, str]:
    """Returns the variables that set the number of threads of OpenMP, MKL, OpenBLAS and TensorFlow.

    Args:
        threads: threads per rank.
        environment: present environment; its values take precedence.
        insist: whether the user asked for this number, which then takes precedence over the environment.
    """
    if insist:
        names = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"]
        return dict.fromkeys(names, str(threads))
    if "OMP_NUM_THREADS" in environment:
        return {}
    names = ["OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"]  # MKL and OpenBLAS follow OMP_NUM_THREADS
    return {name: str(threads) for name in names if name not in environment}
