"""The environment of a simulated rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from random import Random

from coordd.negotiation.tree import Post, tree
from coordd_tools.sim.agenda import Agenda
from coordd_tools.sim.caches import Caches
from coordd_tools.sim.exchange import Exchange
from coordd_tools.sim.ledger import Ledger
from coordd_tools.sim.letters import Routes
from coordd_tools.sim.network import Network
from coordd_tools.sim.payload import Payload
from coordd_tools.sim.scenes import Scenes
from coordd_tools.sim.script import Script
from coordd_tools.sim.swarm import Swarm
from coordd_tools.sim.trace import Trace
from coordd_tools.sim.words import Words

__all__ = ["Setting", "Settings"]


@dataclass(frozen=True)
class Settings:
    """The settings of the simulated job."""

    size: int
    cache_capacity: int
    fusion_bytes: int
    stall_seconds: float
    abort_seconds: float
    lock_steps: int
    early: float
    steps: int
    hosts: tuple[str, ...] = ()
    fan_in: int = 2
    batch: int = 32

    @cached_property
    def posts(self) -> list[Post]:
        """The posts of the tree of coordinators, by rank."""
        return tree(self.places, self.fan_in)

    @property
    def places(self) -> tuple[str, ...]:
        """The host of every rank."""
        return self.hosts or ("h",) * self.size

    @property
    def is_star(self) -> bool:
        """Whether all ranks report to rank 0."""
        return self.posts[0].is_star

    @classmethod
    def draw(cls, rng: Random, swarm: Swarm) -> Settings:
        """Draws small caches, buckets and trees, so that their limits are reached all the time."""
        size = rng.randint(3, 9) if swarm.tree else rng.randint(2, 6)
        return cls(
            size=size,
            cache_capacity=rng.choice((4, 16, 64) if swarm.steady else (0, 1, 2, 3, 8, 64)),
            fusion_bytes=rng.choice((0, 16, 64, 1 << 20)),
            stall_seconds=rng.choice((0.05, 0.5, 5.0)),
            abort_seconds=8.0 if swarm.impatience else 0.0,
            lock_steps=rng.randint(1, 3) if swarm.locks else 0,
            early=rng.choice((0.002, 0.02)) if swarm.early and not swarm.reorder else 0.0,
            steps=rng.randint(4, 16) if swarm.steady else rng.randint(1, 6),
            hosts=tuple(f"h{rng.randint(0, size) if swarm.tree else 0}" for _ in range(size)),
            fan_in=rng.choice((2, 2, 3)),
            batch=rng.choice((1, 2, 32)),
        )


@dataclass(frozen=True)
class Setting:
    """The clock, the random generator, and all objects that the ranks share."""

    settings: Settings
    swarm: Swarm
    script: Script
    scenes: Scenes
    rng: Random
    agenda: Agenda
    trace: Trace
    network: Network
    exchange: Exchange
    words: Words
    ledger: Ledger
    caches: Caches
    payload: Payload
    routes: Routes
