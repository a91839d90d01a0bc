"""The largest values, and the rest later."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import coordd.torch as cd
from tests.torch_plugin.journeys import travelled

numbers = st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=200)
shares = st.floats(0.01, 1.0)


@given(numbers, shares)
def test_the_largest_travel_and_nothing_else(values, share):
    tensor = torch.tensor(values)
    (arrival,) = travelled([cd.Compression.topk(ratio=share)], [[tensor]])
    count = max(1, round(share * len(tensor)))
    sent, kept = arrival.mean, arrival.lost
    assert torch.equal(sent + kept, tensor), "what is sent and what is kept is all there is"
    assert torch.all((sent == 0) | (kept == 0))
    assert (sent != 0).sum() <= count
    assert torch.equal(sent.abs().sort().values[-count:], tensor.abs().sort().values[-count:])


@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=5), shares)
def test_over_the_steps_nothing_is_lost(steps, share):
    """All means together, and the mean of what is still to be sent, are the means of all gradients."""
    size = max(len(part) for step in steps for part in step)
    compressors = [cd.Compression.topk(ratio=share) for _ in range(2)]
    kept = [torch.zeros(size, dtype=torch.float64) for _ in range(2)]
    arrived, computed = torch.zeros(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
    for step in steps:
        gradients = [torch.tensor(part + [0.0] * (size - len(part)), dtype=torch.float64) for part in step]
        computed += sum(gradients) / 2
        due = [[gradient + rest] for gradient, rest in zip(gradients, kept, strict=True)]
        arrivals = travelled(compressors, due)
        arrived += arrivals[0].mean
        kept = [arrival.lost for arrival in arrivals]
    torch.testing.assert_close(arrived + sum(kept) / 2, computed, rtol=1e-9, atol=1e-6)


def test_values_travel_in_the_type_of_the_gradients_and_their_rounding_is_kept():
    tensor = torch.tensor([1.0, 1 + 2**-7, 0.25], dtype=torch.bfloat16)
    (arrival,) = travelled([cd.Compression.topk(ratio=0.4)], [[tensor]])
    assert arrival.mean.tolist() == [0.0, 1 + 2**-7, 0.0]
    assert arrival.mean.dtype == torch.float32


def test_eight_bytes_a_value_travel():
    compressors = [cd.Compression.topk(ratio=0.01) for _ in range(2)]
    travelled(compressors, [[torch.randn(100_000)]] * 2)
    assert 48 < compressors[0].ratio < 50
    assert 0.5 < compressors[0].error < 1


@pytest.mark.parametrize("share", [0, -0.1, 1.1])
def test_there_is_no_such_share(share):
    with pytest.raises(cd.ArgumentError, match="above 0 and at most 1"):
        cd.Compression.topk(ratio=share)
