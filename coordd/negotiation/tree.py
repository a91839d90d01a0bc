"""The tree of reports: a pure function of the host of every rank, so that every rank computes the same.

The first rank of each host is the leader that reports for its host; the hosts form a tree with rank 0 at its root, and
so do the ranks of a host that has many. Where one rank can serve all others, the tree is a star.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["NOBODY", "Post", "post", "superiors", "tree"]

NOBODY = -1
"""The parent of rank 0."""


@dataclass(frozen=True)
class Post:
    """One rank's place in the tree.

    Attributes:
        rank: this rank.
        parent: the rank that it reports to; `NOBODY` for rank 0.
        spans: for each child the ranks that it reports for, as a bit mask; this rank is a child of itself.
    """

    rank: int
    parent: int
    spans: Mapping[int, int] = field(default_factory=dict)

    @property
    def span(self) -> int:
        """All ranks that this one reports for, as a bit mask."""
        return sum(self.spans.values())

    @property
    def children(self) -> tuple[int, ...]:
        """The ranks that report to this rank, without itself."""
        return tuple(child for child in self.spans if child != self.rank)

    @property
    def is_star(self) -> bool:
        """Whether each child reports for itself only."""
        return all(span == 1 << child for child, span in self.spans.items())

    def toward(self, rank: int) -> int:
        """Returns the neighbour on the way to another rank."""
        return next((child for child in self.children if self.spans[child] >> rank & 1), self.parent)


def post(rank: int, hosts: Sequence[str], fan_in: int) -> Post:
    """Returns the place of one rank; see `tree`."""
    return tree(hosts, fan_in)[rank]


def superiors(rank: int, hosts: Sequence[str], fan_in: int) -> Iterator[int]:
    """Yields the ranks between one rank and the coordinator, which comes last; none for the coordinator."""
    posts = tree(hosts, fan_in)
    while (rank := posts[rank].parent) != NOBODY:
        yield rank


def tree(hosts: Sequence[str], fan_in: int) -> list[Post]:
    """Computes the places of all ranks.

    Args:
        hosts: the host of every rank.
        fan_in: how many hosts report to one host, and how many ranks of a host to one of them; on one host, or with no
            more ranks than that, all report to rank 0.
    """
    parents = [NOBODY] * len(hosts)
    groups: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(host, []).append(rank)
    if len(groups) == 1 or len(hosts) <= fan_in:
        parents[1:] = [0] * (len(hosts) - 1)
    else:
        for group in (*groups.values(), [ranks[0] for ranks in groups.values()]):
            for child, parent in _edges(group, fan_in):
                parents[child] = parent
    return _posts(parents)


def _edges(ranks: Sequence[int], fan_in: int) -> Iterator[tuple[int, int]]:
    """Yields the edges of a tree under the first rank: at most ``fan_in`` equal parts, each divided the same way."""
    head, rest = ranks[0], ranks[1:]
    parts = min(fan_in, len(rest))
    for number in range(parts):
        part = rest[len(rest) * number // parts : len(rest) * (number + 1) // parts]
        yield part[0], head
        yield from _edges(part, fan_in)


def _posts(parents: Sequence[int]) -> list[Post]:
    spans: list[dict[int, int]] = [{rank: 1 << rank} for rank in range(len(parents))]
    total = [1 << rank for rank in range(len(parents))]
    for rank in _leaves_first(parents):
        if parents[rank] != NOBODY:
            spans[parents[rank]][rank] = total[rank]
            total[parents[rank]] |= total[rank]
    return [Post(rank, parent, dict(sorted(spans[rank].items()))) for rank, parent in enumerate(parents)]


def _leaves_first(parents: Sequence[int]) -> Iterator[int]:
    """Yields every rank after all of its children."""
    children = [0] * len(parents)
    for parent in parents[1:]:
        children[parent] += 1
    free = [rank for rank, count in enumerate(children) if not count]
    for rank in free:
        yield rank
        if (parent := parents[rank]) != NOBODY:
            children[parent] -= 1
            if not children[parent]:
                free.append(parent)
