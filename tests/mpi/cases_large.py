"""What is larger than MPI's 32-bit counts."""

from __future__ import annotations

import torch

import coordd.torch as cd
from tests.mpi.cases import ranks


@ranks(2, deadline=90)
def case_more_than_two_gibibytes() -> None:
    tensor = torch.full(((1 << 31) + 10,), cd.rank() + 1, dtype=torch.uint8)
    cd.allreduce_(tensor, op=cd.Sum, name="large")
    assert int(tensor[0]) == int(tensor[1 << 30]) == int(tensor[-1]) == 3
    assert int(tensor.min()) == int(tensor.max()) == 3
