"""A tree of coordinators over real sockets and processes: four hosts on one machine, rank 3 below rank 2."""

from __future__ import annotations

import pytest

from tests.mpi.launch import launch

pytestmark = pytest.mark.mpi

# What is tried is who talks to whom, which PyTorch would not change: it takes seconds to load.
_TREE = {"COORDD_SIMULATE_HOSTS": "4", "COORDD_FAN_IN": "2"}

_STEPS = """
import numpy as np
import coordd as cd

cd.init()
start = cd.api.operations().allreduce
for step in range(40):
    handles = [start(np.full(3, float(step + n)), name=f"w{n}", op=cd.ReduceOp.SUM) for n in range(50)]
    for n, handle in enumerate(handles):
        assert handle.result().tolist() == [4.0 * (step + n)] * 3
    if step % 10 == 9:
        assert cd.allreduce(np.ones(step), name=f"new {step}", op=cd.ReduceOp.SUM).sum() == 4 * step
print(f"rank {cd.rank()} is through")
"""

_FAULT = """
import os, signal, sys
import numpy as np
import coordd as cd
from coordd.errors import PeerError

cd.init()
try:
    cd.barrier()  # which the culprit may leave before the others
    if cd.rank() == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    cd.allreduce(np.ones(3), name="gradient")
except PeerError as error:
    print(f"rank {cd.rank()} hears of rank {error.rank}", flush=True)
    raise
"""


def test_steps_go_through_those_in_between() -> None:
    outcome = launch(4, _STEPS, launcher="coordd", variables=_TREE)
    assert outcome.returncode == 0, repr(outcome)
    assert all(f"rank {rank} is through" in outcome.stdout for rank in range(4)), repr(outcome)


@pytest.mark.parametrize("culprit", [2, 3], ids=["in between", "at the end"])
def test_a_death_is_told_on_both_sides_of_it(culprit: int) -> None:
    outcome = launch(4, _FAULT, str(culprit), launcher="coordd", variables=_TREE)
    assert outcome.returncode != 0, repr(outcome)
    for rank in {0, 1, 2, 3} - {culprit}:
        assert f"rank {rank} hears of rank {culprit}" in outcome.stdout, repr(outcome)
