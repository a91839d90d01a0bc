"""Arguments as users of `torch.distributed` give them, which would mean something else here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import coordd.torch as cd
from tests.local_ranks import each_rank

theirs = torch.distributed.ReduceOp
OPS = [
    theirs.SUM,
    theirs.AVG,
    theirs.PRODUCT,
    theirs.MIN,
    theirs.BAND,
    theirs.BOR,
    theirs.RedOpType.SUM,
    "sum",
    1.0,
    True,
]
TAKE_OP = {
    "allreduce": lambda op: cd.allreduce(torch.ones(2), op=op),
    "allreduce_": lambda op: cd.allreduce_(torch.ones(2), op=op),
    "allreduce_async": lambda op: cd.synchronize(cd.allreduce_async(torch.ones(2), op=op)),
    "grouped_allreduce": lambda op: cd.grouped_allreduce([torch.ones(2)], op=op),
    "reducescatter": lambda op: cd.reducescatter(torch.ones(2), op=op),
    "DistributedOptimizer": lambda op: cd.DistributedOptimizer(
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), op=op
    ),
}


@pytest.mark.parametrize("take", TAKE_OP)
def test_operations_of_another_library_are_refused_though_they_have_numbers(take):
    def body(rank):
        for op in OPS:
            with pytest.raises(cd.ArgumentError, match="op is"):
                TAKE_OP[take](op)
        return cd.allreduce(torch.ones(1) + rank, op=cd.Sum).item()

    assert each_rank(2, body) == [3.0, 3.0]


@pytest.mark.parametrize("op", [1, np.int64(1), cd.Sum])
def test_numbers_of_horovods_are_taken(op):
    assert each_rank(2, lambda rank: cd.allreduce(torch.ones(1) + rank, op=op).item()) == [3.0, 3.0]


@pytest.mark.parametrize("second", [cd.Sum, cd.Max, theirs.SUM, "loss", 1, 0.5])
@pytest.mark.parametrize("call", [cd.allreduce, cd.allreduce_, cd.allreduce_async, cd.allreduce_async_])
def test_what_is_no_truth_value_is_refused_in_the_place_of_average(call, second):
    def body(rank):
        with pytest.raises(cd.ArgumentError, match="average is"):
            call(torch.ones(2), second)
        with pytest.raises(cd.ArgumentError, match="average is"):
            cd.grouped_allreduce([torch.ones(2)], second)
        return cd.allreduce(torch.ones(1) + rank, op=cd.Sum).item()

    assert each_rank(2, body) == [3.0, 3.0]


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="gradients have the type of their parameter")
@pytest.mark.parametrize("wanted", [None, torch.float32])
def test_gradients_of_another_type_than_their_parameter_are_refused(wanted):
    def body(_):
        weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        weight.grad_dtype = wanted
        with pytest.raises(cd.ArgumentError, match="leave grad_dtype as it is"):
            cd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])

    each_rank(2, body)
