"""Registry of schedules by name, and their plans for a number of ranks. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from coordd.errors import ArgumentError
from coordd.pipeline.plan import Plan
from coordd.pipeline.schedules import schedule

__all__ = ["SCHEDULES", "Choice", "find"]


@dataclass(frozen=True)
class Choice:
    """A schedule that can be chosen.

    Attributes:
        name: name of the schedule.
        make: creates a plan from a number of ranks, of microbatches and of replicas; further arguments are in
            ``takes``.
        chunks: number of stages per rank; the default where ``takes`` contains ``chunks``.
        takes: the names of its further arguments.
        flushes: whether the pipeline drains before weights change, so that gradients are those of plain training.
        slow: whether creating a plan takes long for many ranks.
        uneven: whether stages may have different numbers of replicas.
        fills: whether there must be as many microbatches as stages.
    """

    name: str
    make: Callable[..., Plan]
    chunks: int = 1
    takes: frozenset[str] = frozenset()
    flushes: bool = True
    slow: bool = False
    uneven: bool = False
    fills: bool = False

    def plan(
        self,
        ranks: int,
        microbatches: int,
        *,
        chunks: int | None = None,
        replicas: int | Sequence[int] = 1,
        steps: int = 1,
    ) -> Plan:
        """Creates a plan.

        Args:
            ranks: number of ranks of each replica of the pipeline.
            microbatches: number per replica, in a step.
            chunks: number of stages per rank; by default the schedule's own.
            replicas: of the whole pipeline, or of each stage.
            steps: number of consecutive steps, if the pipeline does not drain between them.

        Raises:
            ArgumentError: the schedule does not support these numbers.
        """
        chunks = chunks or self.chunks
        if chunks != self.chunks and "chunks" not in self.takes:
            raise ArgumentError(
                f"{self.name} does not cut the layers of a rank into {chunks} stages but into {self.chunks}: leave "
                "chunks out, or choose interleaved"
            )
        if not (self.uneven or isinstance(replicas, int)):
            few = ", ".join(choice.name for choice in _CHOICES if choice.uneven)
            raise ArgumentError(
                f"{self.name} gives all stages equally many replicas: give one number of them, or choose one of {few}"
            )
        if steps > 1 and self.flushes:
            raise ArgumentError(f"{self.name} has an empty pipeline between steps: plan one step, not {steps}")
        given = {"chunks": chunks, "steps": steps}
        more = {name: value for name, value in given.items() if name in self.takes}
        return self.make(ranks, microbatches, replicas=replicas, **more)


def _pipedream(ranks: int, microbatches: int, *, replicas: int, steps: int) -> Plan:
    """PipeDream changes weights after each microbatch, so further steps are just more microbatches."""
    return schedule.pipedream(ranks, microbatches * steps, replicas=replicas)


_CHOICES = (
    Choice("gpipe", schedule.gpipe, uneven=True),
    Choice("1f1b", schedule.one_f_one_b, uneven=True),
    Choice("1f1b-eager", schedule.eager, uneven=True),
    Choice("interleaved", schedule.interleaved, chunks=2, takes=frozenset({"chunks"})),
    Choice("zb-h1", schedule.zero_bubble),
    Choice("zb-h2", schedule.zero_bubble_far),
    Choice("zb-lean", schedule.zero_bubble_lean),
    Choice("zb-h2-lean", schedule.zero_bubble_far_lean),
    Choice("zb-v", schedule.zero_bubble_v, chunks=2, slow=True),
    Choice("pipedream", _pipedream, takes=frozenset({"steps"}), flushes=False, slow=True),
    Choice("2bw", schedule.two_buffered, takes=frozenset({"steps"}), flushes=False, slow=True, uneven=True, fills=True),
)

SCHEDULES: Mapping[str, Choice] = {choice.name: choice for choice in _CHOICES}
"""All schedules by name."""


def find(name: str) -> Choice:
    """Returns a schedule.

    Raises:
        ArgumentError: no schedule has this name; the text suggests the nearest one.
    """
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name.lower(), SCHEDULES, n=1, cutoff=0.4)
        hint = f", did you mean {near[0]}?" if near else ":"
        raise ArgumentError(f"there is no schedule {name!r}{hint} choose one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]
