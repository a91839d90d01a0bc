"""Cost model: the costs of layers, and the costs and memory of the stages built from them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property

from coordd.errors import ArgumentError
from coordd.pipeline.action import Kind
from coordd.pipeline.plan import Plan

__all__ = ["Load", "Memory", "Share", "shares"]


@dataclass(frozen=True)
class Load:
    """Costs of a layer, or of several that stay together, for one microbatch; loads can be added.

    Attributes:
        forward: seconds.
        backward: seconds.
        parameters: bytes of weights; tied weights count in each of their layers.
        activation: bytes kept from the forward pass for the backward pass.
        layers: number of layers.
        inward: seconds of `backward` for the gradients of the inputs, which the previous stage waits for.
    """

    forward: float = 0.0
    backward: float = 0.0
    parameters: int = 0
    activation: int = 0
    layers: int = 1
    inward: float = 0.0

    def __post_init__(self) -> None:
        for value in astuple(self):
            if not (math.isfinite(value) and value >= 0):
                raise ArgumentError(f"{self} has a negative or endless cost: measure that layer again")

    @property
    def seconds(self) -> float:
        """Seconds of forward and backward together."""
        return self.forward + self.backward

    def __add__(self, other: Load) -> Load:
        return Load(
            self.forward + other.forward,
            self.backward + other.backward,
            self.parameters + other.parameters,
            self.activation + other.activation,
            self.layers + other.layers,
            self.inward + other.inward,
        )

    @classmethod
    def total(cls, loads: Iterable[Load]) -> Load:
        """Returns the sum of loads."""
        return sum(loads, cls(layers=0))


# For each schedule the number of microbatches whose activations are live on a stage, and the number of versions of its
# weights: (microbatches m, stages p, stage s). If ranks have several stages each, or stages have different numbers of
# replicas, only the plan determines them.
_LIVE: dict[str, Callable[[int, int, int], int]] = {
    "gpipe": lambda m, p, s: m,  # noqa: ARG005 - the forms of a table share their arguments
    "1f1b": lambda m, p, s: min(m, p - s),
    "pipedream": lambda m, p, s: min(m, p - s),
    "2bw": lambda m, p, s: min(m, p - s),
    "1f1b-eager": lambda m, p, s: min(m, 2 * (p - s) - 1),
    "zb-h1": lambda m, p, s: min(m, p),  # noqa: ARG005 - as above
    "zb-h2": lambda m, p, s: min(m, 2 * p - 1),  # noqa: ARG005 - as above
    "zb-lean": lambda m, p, s: min(m, p),  # noqa: ARG005 - as above
    "zb-h2-lean": lambda m, p, s: min(m, 2 * p - 1),  # noqa: ARG005 - as above
}
_VERSIONS: dict[str, Callable[[int, int], int]] = {
    "pipedream": lambda p, s: p - s,
    "2bw": lambda p, s: 2,  # noqa: ARG005 - as above
}


_FREES = frozenset({Kind.BACKWARD, Kind.WEIGHT})


@dataclass(frozen=True)
class Memory:
    """Memory of a stage: its weights, the same size of gradients, the optimizer's state, and live activations.

    Attributes:
        cap: bytes that a stage may hold; `None` for no limit.
        schedule: its name; GPipe keeps the activations of all microbatches, 1F1B one microbatch's per remaining stage.
        microbatches: how many one rank processes in a step.
        state: bytes of the optimizer's state per byte of weights: 0 for SGD, 1 with momentum, 2 for Adam.
        plan: the plan to execute; if given, live microbatches are counted in it instead of derived from `schedule` and
            `microbatches`.
        recompute: whether only the inputs of a stage are kept, and the activations of one microbatch at a time.
        entering: for each cut between items, the bytes of a microbatch that a stage beginning there keeps besides its
            activations; 0 if left out.
    """

    cap: float | None = None
    schedule: str = "1f1b"
    microbatches: int = 1
    state: float = 2.0
    plan: Plan | None = None
    recompute: bool = False
    entering: Sequence[float] = ()

    def __post_init__(self) -> None:
        if self.schedule not in _LIVE and self.plan is None:
            known = ", ".join(_LIVE)
            raise ArgumentError(f"what a stage holds under {self.schedule!r} has no closed form; choose one of {known}")
        if self.cap is not None and not self.cap >= 0:
            raise ArgumentError(f"a stage cannot be kept below {self.cap} bytes: give a cap in bytes, or none")
        if self.microbatches < 1:
            raise ArgumentError(f"a step of {self.microbatches} microbatches trains nothing: give one or more")
        if not (math.isfinite(self.state) and self.state >= 0):
            raise ArgumentError(f"an optimizer cannot have {self.state} bytes of state for a byte of weights")

    def live(self, stage: int, stages: int) -> int:
        """Returns the most microbatches that are between their forward and backward passes at a time."""
        if self.plan is not None:
            return self._counted[stage]
        return _LIVE[self.schedule](self.microbatches, stages, stage)

    def weight(self, stage: int, stages: int) -> float:
        """Returns bytes per byte of weights: weights, their older versions, gradients, and optimizer state."""
        versions = _VERSIONS[self.schedule](stages, stage) if self.schedule in _VERSIONS else 1
        return versions + 1 + self.state

    def alive(self, stage: int, stages: int) -> int:
        """Returns the most microbatches whose activations are live at a time."""
        return 1 if self.recompute else self.live(stage, stages)

    def received(self, items: int) -> list[float]:
        """Returns, for each of ``items`` items, the bytes of one microbatch that enter a stage which begins there."""
        return [0.0, *(self.entering or [0.0] * (items - 1))]

    @cached_property
    def _counted(self) -> list[int]:
        """For each stage the most microbatches of a replica between their passes, counted in the plan."""
        assert self.plan is not None  # noqa: S101 - who calls has looked
        most = [0] * self.plan.stages
        for actions in self.plan.actions:
            now = dict.fromkeys(range(self.plan.stages), 0)
            for stage, kind, _, _ in actions:
                now[stage] += (kind is Kind.FORWARD) - (kind in _FREES)
                most[stage] = max(most[stage], now[stage])
        return most


@dataclass(frozen=True)
class Share:
    """Work and memory of one stage.

    Attributes:
        items: the items of the stage.
        load: the sum of their loads.
        exchange: seconds per microbatch that its cuts cost.
        live: the most microbatches whose activations it holds.
        memory: bytes in all.
    """

    items: range
    load: Load
    exchange: float
    live: int
    memory: int

    @property
    def seconds(self) -> float:
        """Seconds per microbatch; the slowest stage determines the speed of the pipeline."""
        return self.load.seconds + self.exchange


def shares(
    loads: Sequence[Load],
    stages: Sequence[range],
    *,
    cuts: Sequence[float] = (),
    memory: Memory | None = None,
) -> tuple[Share, ...]:
    """Returns the costs and the memory of each stage.

    Args:
        loads: of the items that were split.
        stages: consecutive runs of items, as `coordd.pipeline.partition.split` returns them.
        cuts: seconds, as for `split`.
        memory: as for `split`.
    """
    memory = memory or Memory()
    received = memory.received(len(loads))
    edges = [0.0, *(cuts if len(cuts) else [0.0] * (len(loads) - 1)), 0.0]
    found = []
    for stage, items in enumerate(stages):
        load = Load.total(loads[items.start : items.stop])
        live = memory.live(stage, len(stages))
        held = memory.weight(stage, len(stages)) * load.parameters + live * received[items.start]
        held += memory.alive(stage, len(stages)) * load.activation
        found.append(Share(items, load, edges[items.start] + edges[items.stop], live, math.ceil(held)))
    return tuple(found)
