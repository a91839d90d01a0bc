"""What a simulated rank finds around itself."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from coordd_tools.sim.agenda import Agenda
from coordd_tools.sim.caches import Caches
from coordd_tools.sim.exchange import Exchange
from coordd_tools.sim.ledger import Ledger
from coordd_tools.sim.network import Network
from coordd_tools.sim.script import Script
from coordd_tools.sim.swarm import Swarm
from coordd_tools.sim.trace import Trace
from coordd_tools.sim.words import Words

__all__ = ["Setting", "Settings"]


@dataclass(frozen=True)
class Settings:
    """The knobs of the simulated job."""

    size: int
    cache_capacity: int
    fusion_bytes: int
    stall_seconds: float
    abort_seconds: float
    lock_steps: int
    early: float
    steps: int

    @classmethod
    def draw(cls, rng: Random, swarm: Swarm) -> Settings:
        """Draws small caches and buckets, so that their limits are met all the time."""
        return cls(
            size=rng.randint(2, 6),
            cache_capacity=rng.choice((4, 16, 64) if swarm.steady else (0, 1, 2, 3, 8, 64)),
            fusion_bytes=rng.choice((0, 16, 64, 1 << 20)),
            stall_seconds=rng.choice((0.05, 0.5, 5.0)),
            abort_seconds=8.0 if swarm.impatience else 0.0,
            lock_steps=rng.randint(1, 3) if swarm.locks else 0,
            early=rng.choice((0.002, 0.02)) if swarm.early and not swarm.reorder else 0.0,
            steps=rng.randint(4, 16) if swarm.steady else rng.randint(1, 6),
        )


@dataclass(frozen=True)
class Setting:
    """The clock, chance, and everything that the ranks share."""

    settings: Settings
    swarm: Swarm
    script: Script
    rng: Random
    agenda: Agenda
    trace: Trace
    network: Network
    exchange: Exchange
    words: Words
    ledger: Ledger
    caches: Caches
