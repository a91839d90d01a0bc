"""What is larger than MPI's 32-bit counts."""

from __future__ import annotations

import torch

import coordd.torch as cd
from tests.mpi.cases import ranks


@ranks(2, deadline=90)
def case_more_than_two_gibibytes() -> None:
    """More elements than a 32-bit count can say, then fewer, but more bytes."""
    elements = torch.empty((1 << 31) + 16, dtype=torch.uint8)
    for tensor in (elements, elements.view(torch.float32)):
        tensor.fill_(cd.rank() + 1)
        cd.allreduce_(tensor, op=cd.Sum, name="large")
        assert [int(limit) for limit in tensor.aminmax()] == [3, 3]
