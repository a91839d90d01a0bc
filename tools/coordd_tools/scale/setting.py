"""What is simulated: the job, the tree, the network, and who is late."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from random import Random

from coordd.tree import Post, tree

__all__ = ["Setting"]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """All that a run depends on, but for the speed of this machine.

    Attributes:
        ranks: how many.
        hosts: on how many hosts they are, the first ranks on the first host.
        tensors: how many each rank announces in a step.
        fan_in: the setting of this name.
        latency: seconds that a message takes from one rank to another.
        bandwidth: bytes a second that a rank sends, and that it receives.
        postage: seconds of a rank's time for each message that it sends or receives, beside what is measured.
        cuts: how many reports a rank's tensors come in; every fourth rank cuts elsewhere.
        gap: seconds between two of these reports.
        stragglers: how many ranks are late.
        delay: seconds that they are late.
        steps: how many steps follow the first.
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
        """The tree."""
        return tree([f"node{rank * self.hosts // self.ranks:05d}" for rank in range(self.ranks)], self.fan_in)

    @cached_property
    def depths(self) -> list[int]:
        """How many hops each rank is away from rank 0."""
        found = [0] * self.ranks
        for post in self.posts[1:]:  # a parent is a lower rank
            found[post.rank] = found[post.parent] + 1
        return found

    @cached_property
    def late(self) -> frozenset[int]:
        """The stragglers."""
        return frozenset(Random(self.seed).sample(range(self.ranks), self.stragglers))  # noqa: S311 - repeatable
