"""Gradients that the user wants reduced together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import coordd.torch as cd
from tests.local_ranks import each_rank


def trained(**details):
    """The buckets of an optimizer after a step, as lists of the parameters' places; and the gradients."""

    def body(rank):
        mine = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6)))
        cd.broadcast_parameters(mine.state_dict())
        places = {id(parameter): place for place, parameter in enumerate(mine.parameters())}
        chosen = {key: value(mine) if callable(value) else value for key, value in details.items()}
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=0.0), **chosen)
        for _ in range(2):
            optimizer.zero_grad()
            mine(torch.full((1, 4), rank + 1.0)).sum().backward()
            optimizer.step()
        buckets = [
            sorted(places[id(gradient.parameter)] for gradient in bucket) for bucket in optimizer._coordd._buckets
        ]
        return sorted(buckets), [parameter.grad.clone() for parameter in mine.parameters()]

    torch.manual_seed(0)
    (buckets, gradients), (others, same) = each_rank(2, body)
    assert buckets == others
    assert all(map(torch.equal, gradients, same))
    return buckets


def test_so_many_buckets_of_nearly_equal_size():
    assert trained(num_groups=3) == [[0, 1], [2, 3], [4, 5]]
    assert trained(groups=2) == [[0, 1, 2], [3, 4, 5]]
    assert [len(group) for group in trained(num_groups=4)] == [2, 1, 2, 1]
    assert trained(num_groups=9) == [[place] for place in range(6)]


def test_the_user_s_own_groups_and_the_rest_as_usual():
    def groups(made):
        first, second, third, *_ = made.parameters()
        return [[third, first], [second]]

    assert trained(groups=groups) == [[0, 2], [1], [3, 4, 5]]


@pytest.mark.parametrize(
    "details",
    [{"num_groups": -1}, {"groups": "all"}, {"groups": [torch.ones(1)]}, {"groups": [[1]]}, {"groups": -2}],
    ids=str,
)
def test_what_is_no_grouping_is_refused(details):
    def body(_):
        mine = nn.Linear(1, 1)
        with pytest.raises(cd.ArgumentError, match="should be a non-negative integer"):
            cd.DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=0.1), **details)

    each_rank(1, body)


def test_a_parameter_is_in_one_group_only():
    def body(_):
        mine = nn.Linear(1, 1)
        with pytest.raises(cd.ArgumentError, match="in one of them only"):
            cd.DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=0.1), groups=[[mine.weight], [mine.weight]])

    each_rank(1, body)
