"""The speed-up of the paper's network in stages and replicas, with the ideal and the paper's own figures.

The paper: NKFlow (Zhong et al., Computer Science 51(12), 2024), table 2: batches of 1000 images in 10 microbatches.
Each replica takes a batch of its own, so speed-ups are those of images per second.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coordd.pipeline.load import Load
from coordd.pipeline.lowering import chain, lower
from coordd.pipeline.partition import split
from coordd.pipeline.schedules.registry import find
from coordd.pipeline.simulate import Costs, simulate
from coordd_tools.stages.cnn import Took
from coordd_tools.stages.ranks import run

__all__ = ["CASES", "MICROBATCHES", "PAPER", "ROWS", "Row", "ideal", "measure", "stages_of"]

MICROBATCHES, ROWS = 10, 100
CASES = tuple((stages, replicas) for replicas in (1, 2) for stages in (1, 2, 3))
PAPER = {(1, 1): 1.00, (2, 1): 1.10, (3, 1): 1.13, (1, 2): 1.62, (2, 2): 1.98, (3, 2): 2.00}
"""Speed-ups of table 2, by stages and replicas."""


@dataclass(frozen=True)
class Row:
    """One way to train the network.

    Attributes:
        stages: the number of stages.
        replicas: the number of replicas of each stage.
        layers: the number of layers of each stage.
        ideal: seconds of a step in the simulator, where only layers take time.
        seconds: the median of the measured seconds of a step.
    """

    stages: int
    replicas: int
    layers: tuple[int, ...]
    ideal: float
    seconds: float

    @property
    def efficiency(self) -> float:
        """The fraction of the ideal throughput that is reached."""
        return self.ideal / self.seconds

    def speedup(self, base: Row) -> float:
        """Returns the ratio of images per second to those of one stage on one rank."""
        return self.replicas * base.seconds / self.seconds

    def limit(self, base: Row) -> float:
        """Returns the ideal speed-up of the schedule."""
        return self.replicas * base.ideal / self.ideal


def stages_of(took: Sequence[Took], stages: int) -> tuple[range, ...]:
    """Splits the layers so that the slowest stage is as fast as possible."""
    return split([Load(each.forward, each.backward) for each in took], stages)


def ideal(took: Sequence[Took], spans: Sequence[range], schedule: str) -> float:
    """Returns the seconds of a step in which only the layers take time."""
    plan = find(schedule).plan(len(spans), MICROBATCHES)
    forward = [sum(took[layer].forward for layer in span) for span in spans]
    backward = [sum(took[layer].backward for layer in span) for span in spans]
    costs = Costs(forward, backward, [0.0] * len(spans))
    return simulate(lower(plan, chain(len(spans))), costs).makespan


def measure(
    took: Sequence[Took], cases: Sequence[tuple[int, int]], *, schedule: str, steps: int, computed: bool = False
) -> Iterator[Row]:
    """Trains the network in each way, one after the other.

    Args:
        took: the times of its layers.
        cases: numbers of stages and replicas.
        schedule: the schedule of the stages.
        steps: the number of timed steps.
        computed: whether layers compute instead of sleeping.
    """
    for stages, replicas in cases:
        spans = stages_of(took, stages)
        settings = {
            "took": None if computed else [dataclasses.asdict(each) for each in took],
            "layers": [len(span) for span in spans],
            "replicas": replicas,
            "schedule": schedule,
            "steps": steps,
        }
        seconds = run("speedup", stages * replicas, settings)
        layers = tuple(len(span) for span in spans)
        yield Row(stages, replicas, layers, ideal(took, spans, schedule), statistics.median(seconds))
