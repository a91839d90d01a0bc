"""Whatever one rank refuses in a call of `coordd.torch` that all ranks make, the others hear."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import coordd.torch as cd
from tests.local_ranks import local_ranks
from tests.refusals.injection import EVERY, check_all


def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))


def optimizer(op):
    def call(_):
        made = net()
        return cd.DistributedOptimizer(torch.optim.SGD(made.parameters(), lr=0.1), made.named_parameters(), op=op)

    return call


def parameters(_):
    cd.broadcast_parameters(net().state_dict())


def state(_):
    cd.broadcast_optimizer_state(torch.optim.Adam(net().parameters()))


def process_set(_):
    cd.remove_process_set(cd.add_process_set([0, 2]))


CALLS = {
    "average": optimizer(cd.Average),
    "adasum": optimizer(cd.Adasum),
    "parameters": parameters,
    "state": state,
    "set": process_set,
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("part", [0.1, *EVERY])
def test_the_others_hear_of_a_rank_that_fails_anywhere(name, rank, part):
    start = partial(local_ranks, 3, stall_check=False)
    assert len(check_all(start, lambda _: CALLS[name], rank, part)) > 5


def test_a_tree_of_coordinators_passes_it_on():
    start = partial(local_ranks, 4, fan_in=2, simulate_hosts=2, stall_check=False)
    assert len(check_all(start, lambda _: CALLS["parameters"], 3)) > 5
