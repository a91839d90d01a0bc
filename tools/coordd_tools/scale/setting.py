"""The simulated job: its ranks, the tree, the network, and the stragglers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from random import Random

from coordd.negotiation.tree import Post, tree

__all__ = ["Setting"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All inputs of a run, apart from the speed of this machine.

    Attributes:
        ranks: the number of ranks.
        hosts: the number of hosts; the first ranks are on the first host.
        tensors: the number of tensors that each rank announces in a step.
        fan_in: the setting of this name.
        latency: seconds that a message takes from one rank to another.
        bandwidth: bytes per second that a rank sends, and that it receives.
        postage: seconds of a rank's time for each message that it sends or receives, in addition to measured time.
        cuts: the number of reports for a rank's tensors; ranks of up to four kinds split them differently.
        gap: seconds between two of these reports.
        stragglers: the number of late ranks.
        delay: seconds by which they are late.
        steps: the number of steps after the first.
        seed: chooses the stragglers.
    """

    ranks: int = 1000
    hosts: int = 125
    tensors: int = 160
    fan_in: int = 16
    latency: float = 20e-6
    bandwidth: float = 1.25e9
    postage: float = 10e-6
    cuts: int = 1
    gap: float = 0.0
    stragglers: int = 0
    delay: float = 0.0
    steps: int = 3
    seed: int = 0

    @cached_property
    def posts(self) -> list[Post]:
        """The posts of the tree, by rank."""
        return tree([f"node{rank * self.hosts // self.ranks:05d}" for rank in range(self.ranks)], self.fan_in)

    @cached_property
    def depths(self) -> list[int]:
        """The number of hops from each rank to rank 0."""
        found = [0] * self.ranks
        for post in self.posts[1:]:  # a parent is a lower rank
            found[post.rank] = found[post.parent] + 1
        return found

    @cached_property
    def late(self) -> frozenset[int]:
        """The stragglers."""
        return frozenset(Random(self.seed).sample(range(self.ranks), self.stragglers))  # noqa: S311 - repeatable
