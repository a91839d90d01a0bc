"""Dividing a host's cores among its ranks.

```
 8 cores, 2 ranks of 3 threads      0 1 2 | 3      4 5 6 | 7          7 cores, 2 ranks      0 1 2   3 4 5 | 6
                                    rank 0  daemon rank 1  daemon                           rank 0  rank 1  both daemons
```

Rules: ranks of one host never get more threads than the host has cores for us, hyper-threads not counted, unless the
user asks for them. Cores that are left over are the daemons'. Where none are, a rank and its daemon are bound to their
share, for who wakes the other there need not wake an idle core; but more threads than one need two cores at least.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from coordd.affinity import daemon_cores, write_cpus
from coordd.cores import Cores
from coordd.crowd import oversubscribed, threads_asked

__all__ = ["Share", "Wish", "describe", "divide", "thread_variables"]

# Daemons do most of their work at the same moment, when backward ends and the compute cores fall idle: more of them on
# one core would wait for each other longer than sharing a core with the computation costs.
_DAEMONS_A_CORE = 2
_LISTED = 4


class Wish(NamedTuple):
    """What the user wants for each rank; empty is for us to choose.

    Attributes:
        threads: with which it computes.
        daemon_on: the hardware threads on which its daemon runs.
    """

    threads: int = 0
    daemon_on: frozenset[int] = frozenset()

    @classmethod
    def of(cls, threads: int, environment: Mapping[str, str]) -> Wish:
        """Takes the number of threads that was asked for, which wins, and the environment.

        Raises:
            ConfigError: the environment names no processors where it should.
        """
        return cls(threads or threads_asked(environment), daemon_cores(environment))


class Share(NamedTuple):
    """What one rank gets.

    Attributes:
        threads: with which it computes.
        bound_to: the hardware threads to stay on, empty for any.
        daemon_on: those on which its daemon runs, alone or with few other daemons; empty if it runs among the others.
    """

    threads: int
    bound_to: tuple[int, ...] = ()
    daemon_on: tuple[int, ...] = ()


def divide(cores: Cores, local_rank: int, local_size: int, wish: Wish) -> Share:
    """Computes the share of one of ``local_size`` ranks on a host.

    Args:
        cores: what the ranks may use together.
        local_rank: which of them it is.
        local_size: how many they are.
        wish: what the user wants.
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
    """Divides cores of which some are spare: one for each daemon or, if they are fewer, for each group of daemons.

    A group's cores come together: first those of its ranks, then the one of its daemons.
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
    """Says in one line what the ranks of a host get; the first arguments are those of `divide`.

    A core goes by the number of its first hardware thread.
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
    """Lists shares of cores, each once, and at most a few."""
    firsts = {core[0] for core in cores.threads}
    texts = [write_cpus(firsts.intersection(cpus) or cpus) for cpus in dict.fromkeys(shares)]
    if len(texts) > _LISTED:
        texts = [*texts[: _LISTED - 2], "…", texts[-1]]
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def thread_variables(threads: int, environment: Mapping[str, str], *, insist: bool) -> dict[str, str]:
    """Picks the variables that tell OpenMP, MKL, OpenBLAS and TensorFlow their threads.

    Args:
        threads: threads per rank.
        environment: what is set already, which wins.
        insist: the user asked for this number, which wins over the environment.
    """
    if insist:
        names = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"]
        return dict.fromkeys(names, str(threads))
    if "OMP_NUM_THREADS" in environment:
        return {}
    names = ["OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"]  # MKL and OpenBLAS follow OMP_NUM_THREADS
    return {name: str(threads) for name in names if name not in environment}
