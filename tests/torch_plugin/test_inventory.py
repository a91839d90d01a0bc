"""Whether all ranks have given their optimizers the same; parameters that differ are among the optimizer's tests."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import coordd.torch as cd
from tests.local_ranks import each_rank


@pytest.mark.parametrize(
    "compressions",
    [
        (cd.Compression.topk(ratio=0.5), cd.Compression.int8()),
        (cd.Compression.int8(block=256), cd.Compression.int8(block=128)),
        (cd.Compression.powersgd(rank=1), cd.Compression.powersgd(rank=2)),
    ],
    ids=["kinds", "blocks", "ranks"],
)
def test_ranks_that_compress_in_different_ways_are_told(compressions):
    def body(rank):
        net = nn.Linear(40, 30)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with pytest.raises(cd.MismatchError, match=rf"{type(compressions[0]).__name__}\(.*\) on rank 0 only; "):
            cd.DistributedOptimizer(optimizer, net.named_parameters(), compression=compressions[rank])

    each_rank(2, body)
