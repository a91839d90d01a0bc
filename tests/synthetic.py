"""Training steps that take as long as a formula says: jobs like those of the benchmark, machines of many moods."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from coordd.tuning.autotune import Tuner
from coordd.tuning.settings import Settings, Space

__all__ = ["JOBS", "START", "Job", "Listed", "Mood", "Training", "space_of", "train"]

START = Settings(fusion_mb=32.0, cycle_ms=20.0, buckets=1, algorithm="slices", compression="none")
_MIB = 1 << 20


def space_of(*, compressions: tuple[str, ...] = ()) -> Space:
    return Space.around(START, algorithms=("slices", "ring"), compressions=compressions)


@dataclass(frozen=True)
class Job:
    """A model on a network. Times in milliseconds.

    Buckets become ready evenly during backward, wait for the batching window unless backward is over, and travel one
    after the other; the step ends when the last one has arrived.
    """

    forward: float
    backward: float
    mib: float  # of gradients
    ms_per_mib: float
    ms_per_bucket: float
    ring: float  # the other algorithm's time, over that of the first

    @lru_cache(maxsize=None)  # noqa: B019, UP033 - there are three jobs
    def step(self, settings: Settings) -> float:
        gradients = int(self.mib * _MIB)
        size = settings.bucket_bytes(gradients)
        count = min(200, math.ceil(gradients / size))
        rate = self.ms_per_mib * (self.ring if settings.algorithm == "ring" else 1.0)
        if settings.compression == "bf16":
            rate *= 0.6
        travel = self.ms_per_bucket + rate * self.mib / count
        free = 0.0
        for bucket in range(1, count + 1):
            ready = self.backward * bucket / count
            free = max(free, min(ready + settings.cycle_ms, self.backward)) + travel
        return self.forward + max(self.backward, free)

    def best(self, space: Space) -> float:
        names = Settings.__struct_fields__
        choices = itertools.product(*(space.choices(name) for name in names))
        return min(self.step(Settings(**dict(zip(names, values, strict=True)))) for values in choices)


JOBS = {
    "mlp": Job(forward=12, backward=22, mib=32.1, ms_per_mib=0.9, ms_per_bucket=0.4, ring=0.8),
    "small": Job(forward=2, backward=4, mib=1.3, ms_per_mib=0.9, ms_per_bucket=0.5, ring=1.1),
    "gpt": Job(forward=70, backward=130, mib=18.7, ms_per_mib=1.2, ms_per_bucket=0.4, ring=1.1),
}


@dataclass(frozen=True)
class Mood:
    """How a machine strays from the formula.

    Attributes:
        noise: relative standard deviation of a step.
        pauses: chance that a step holds an evaluation or a checkpoint, and takes up to 50 times as long.
        drift: the whole run's slowing down, relative.
        bursts: chance that a neighbour begins to take a quarter of the machine, for some hundred steps.
        lengths: relative spread of the steps' own lengths.
    """

    noise: float = 0.03
    pauses: float = 0.0
    drift: float = 0.0
    bursts: float = 0.0
    lengths: float = 0.0


@dataclass
class Training:
    """A run of a job; what is told to the tuner is seconds."""

    job: Job
    mood: Mood
    steps: int
    random: random.Random
    now: int = 0
    disturbed: int = 0

    def step(self, settings: Settings) -> float:
        mood, chance = self.mood, self.random
        self.now += 1
        self.disturbed = max(0, self.disturbed - 1)
        if chance.random() < mood.bursts:
            self.disturbed = chance.randrange(100, 400)
        longer = 1 + mood.drift * self.now / self.steps
        longer *= 1.33 if self.disturbed else 1.0
        longer *= math.exp(chance.gauss(0, mood.noise)) * (1 + mood.lengths * chance.random())
        if chance.random() < mood.pauses:
            longer *= chance.uniform(2, 50)
        return self.job.step(settings) * longer / 1000


class Listed:
    """Proposes what it was given, in that order."""

    def __init__(self, *candidates: Settings) -> None:
        self.candidates = list(candidates)
        self.learned: list[tuple[Settings, float]] = []

    def propose(self) -> Settings | None:
        return self.candidates.pop(0) if self.candidates else None

    def learn(self, settings: Settings, relative: float) -> None:
        self.learned.append((settings, relative))


def train(tuner: Tuner, step: Callable[[Settings], float], steps: int) -> None:
    """Trains until the search ends, or for so many steps; settings are applied at once."""
    settings = tuner.settings
    for _ in range(steps):
        settings = tuner.tell(step(settings)) or settings
        assert settings == tuner.settings
        if tuner.done:
            break
