"""All splits there are, to compare with, and items to split."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, pairwise

from hypothesis import strategies as st

from coordd.pipeline.load import Load, Memory

Stages = tuple[range, ...]

seconds = st.integers(0, 12).map(float)
loads = st.builds(
    Load,
    forward=seconds,
    backward=st.integers(1, 12).map(float),
    parameters=st.integers(1, 9),
    activation=st.integers(0, 9),
    layers=st.integers(1, 3),
)
memories = st.builds(
    Memory,
    cap=st.none(),
    schedule=st.sampled_from(["gpipe", "1f1b", "pipedream", "2bw", "zb-h1"]),
    microbatches=st.integers(1, 8),
    state=st.sampled_from([0.0, 1.0, 2.0, 0.3]),
)


def every(items: int, stages: int) -> Iterator[Stages]:
    """All splits in stages none of which is empty."""
    for cuts in combinations(range(1, items), stages - 1):
        yield tuple(range(a, b) for a, b in pairwise((0, *cuts, items)))


def even(items: int, stages: int) -> Stages:
    """Stages of equally many items."""
    ends = [items * stage // stages for stage in range(stages + 1)]
    return tuple(range(a, b) for a, b in pairwise(ends))


@st.composite
def problems(draw, most: int = 9) -> tuple[list[Load], int, list[float]]:
    """Items, a number of stages, and what each cut costs; nothing in half of all cases."""
    items = draw(st.lists(loads, min_size=1, max_size=most))
    stages = draw(st.integers(1, min(4, len(items))))
    count = len(items) - 1
    cuts = draw(st.one_of(st.just([]), st.lists(seconds, min_size=count, max_size=count)))
    return items, stages, cuts
