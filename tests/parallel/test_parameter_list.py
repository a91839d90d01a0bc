"""What ranks must have in common, and what they may differ in."""

from __future__ import annotations

import numpy as np
import pytest

from coordd import api
from coordd.errors import MismatchError
from coordd.ops.process_sets import global_process_set
from coordd.parallel.parameter_list import NearlyEqual
from tests.local_ranks import each_rank

VALUES = np.array([1.0, -2.0, 0.5])


def compared(mine):
    """Compares what each rank has; returns what each is told."""

    def body(rank):
        found = NearlyEqual(
            api.operations(),
            {"first": VALUES, "second": mine(rank)},
            caller="DistributedOptimizer",
            name="values",
            process_set=global_process_set,
            advice="broadcast them",
        )
        try:
            found.check()
        except MismatchError as error:
            return str(error)
        return ""

    return each_rank(3, body)


@pytest.mark.parametrize(
    "mine",
    [
        lambda _: VALUES,
        lambda rank: VALUES * (1 + rank * 1e-3),
        lambda rank: VALUES if rank else np.full(3, np.nan),
        lambda _: np.array([np.inf, -np.inf, np.nan]),
        lambda _: np.empty(0),
        lambda _: np.zeros(2),
    ],
    ids=["equal", "rounded", "not to be seen", "not finite", "empty", "zeros"],
)
def test_values_may_differ_by_rounding(mine):
    assert compared(mine) == [""] * 3


@pytest.mark.parametrize("mine", [lambda rank: VALUES + rank, lambda rank: np.zeros(3) + (rank == 2) * 1e-9])
def test_other_values_are_named_on_all_ranks(mine):
    told = compared(mine)
    assert len(set(told)) == 1
    assert "start with different values of second: broadcast them" in told[0]
