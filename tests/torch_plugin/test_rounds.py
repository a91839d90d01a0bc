"""What compressors ask for, as arrays and back; and what they must not hide."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import coordd.torch as cd
from coordd_torch.compression import made
from coordd_torch.rounds import Deal, Gather, Mean
from tests.torch_plugin.journeys import travelled

dtypes = st.sampled_from(
    [torch.uint8, torch.int8, torch.int32, torch.int64, torch.bfloat16, torch.float32, torch.float64]
)


@given(st.lists(dtypes, min_size=1, max_size=4), st.integers(1, 3), st.data())
def test_everybody_gets_everybodys_tensors_whatever_their_types_and_sizes(kinds, size, data):
    mine = [
        [torch.arange(data.draw(st.integers(0, 5))).to(dtype) + member for dtype in kinds] for member in range(size)
    ]
    rounds = [Gather(*tensors) for tensors in mine]
    tails = [torch.tensor([1.0, float(member)]) for member in range(size)]
    joined = np.concatenate([round_.pack(tail) for round_, tail in zip(rounds, tails, strict=True)])
    for member, round_ in enumerate(rounds):
        answer, tail = round_.open(joined, size, size)
        assert tail.tolist() == [size, sum(range(size))]
        for given_, found in zip(mine, answer, strict=True):
            for wanted, tensor in zip(given_, found, strict=True):
                assert tensor.dtype == wanted.dtype
                assert torch.equal(tensor, wanted)
        others = sum(tensor.nbytes for place, tensors in enumerate(mine) if place != member for tensor in tensors)
        assert round_.received(size) >= others


@given(st.integers(1, 4), st.data())
def test_everybody_gets_what_each_has_for_it(size, data):
    def hand(giver, taker):
        count = data.draw(st.integers(0, 5))
        return [torch.full((count,), 10.0 * giver + taker), torch.arange(3, dtype=torch.int8)[: count % 3]]

    hands = [[hand(giver, taker) for taker in range(size)] for giver in range(size)]
    rounds = [Deal(*hands[giver]) for giver in range(size)]
    dealt = [np.split(one.pack(torch.ones(2)), np.cumsum(one.splits)[:-1]) for one in rounds]
    for taker, round_ in enumerate(rounds):
        answer, tail = round_.open(np.concatenate([parcels[taker] for parcels in dealt]), size, size)
        assert tail.tolist() == [size, size]
        for giver, found in enumerate(answer):
            for wanted, tensor in zip(hands[giver][taker], found, strict=True):
                assert tensor.dtype == wanted.dtype
                assert torch.equal(tensor, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_means_come_back_in_shape_and_tails_as_sums(dtype):
    round_ = Mean(torch.ones(2, 3, dtype=dtype), torch.tensor(5.0, dtype=dtype))
    array = round_.pack(torch.tensor([1.0, 0.0, 3.0]))
    assert array.shape == (10,)
    (ones, five), tail = round_.open(array, 4, 4)
    assert torch.equal(ones, torch.ones(2, 3, dtype=dtype))
    assert five.shape == ()
    assert tail.tolist() == [4.0, 0.0, 12.0]


def test_nothing_travels_behind_a_later_round():
    for round_ in (Mean(torch.ones(2)), Gather(torch.ones(2))):
        _, tail = round_.open(round_.pack(None), 1, 1)
        assert tail is None


class Hiding:
    """Written for Horovod, by somebody who did not think of infinities."""

    compress = staticmethod(lambda tensor: (tensor.clamp(-1, 1).nan_to_num(0.0), None))
    decompress = staticmethod(lambda tensor, _: tensor)


ALL = [cd.Compression.int8, cd.Compression.topk, cd.Compression.powersgd, Hiding]


@pytest.mark.parametrize("compression", ALL)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_ends_the_journey_on_all_ranks(compression, value):
    """In the first round, whatever the compressor makes of it; nothing is remembered, nothing counted as lost."""
    tensors = [[torch.ones(50, 40)], [torch.ones(50, 40)]]
    tensors[1][0][3, 3] = value
    compressors = [made(compression) for _ in tensors]
    for arrival in travelled(compressors, tensors):
        assert arrival.mean is None
        assert arrival.journey.broken
        assert arrival.journey.number == 0
    assert [compressor.memory for compressor in compressors] == [{}, {}]
    assert [compressor.error for compressor in compressors] == [0.0, 0.0]


def test_large_is_not_infinite():
    (arrival,) = travelled([cd.Compression.topk(ratio=1.0)], [[torch.full((3,), 3e38)]])
    assert arrival.mean.tolist() == torch.full((3,), 3e38).tolist()


def test_tails_travel_beside_every_kind_of_round():
    for compression in ALL:
        arrivals = travelled(
            [made(compression) for _ in range(2)], [[torch.ones(9)]] * 2, tails=[torch.ones(3), torch.arange(3.0)]
        )
        assert [arrival.journey.tail.tolist() for arrival in arrivals] == [[1.0, 2.0, 3.0]] * 2


def test_a_compressor_without_a_round_is_told():
    class Silent(cd.Compressor):
        def exchange(self, cargo):
            return cargo.flat
            yield

    with pytest.raises(cd.ArgumentError, match=r"Silent.exchange\(\) has to yield at least one round"):
        travelled([Silent()], [[torch.ones(3)]])
