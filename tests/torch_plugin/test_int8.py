"""Eight-bit integers with a scale for each block."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import coordd.torch as cd
from coordd_torch.int8 import dequantized, quantized
from tests.torch_plugin.journeys import travelled

TINY = torch.finfo(torch.float32).tiny
values = st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=600)


@given(values, st.integers(1, 300))
def test_no_value_is_off_by_more_than_half_a_scale(numbers, block):
    flat = torch.tensor(numbers)
    found = dequantized(*quantized(flat, block), block)[: len(flat)]
    for part, rounded in zip(flat.split(block), found.split(block), strict=True):
        half = max(part.abs().max().item() / 127, TINY) / 2
        assert (part - rounded).abs().max() <= half * (1 + 1e-4)


def test_the_largest_value_of_a_block_and_zero_are_exact():
    flat = torch.tensor([0.0, 12.7, -0.05, 0.0, 0.0])
    numbers, scales = quantized(flat, 3)
    assert numbers.dtype == torch.int8
    assert numbers.tolist() == [0, 127, 0, 0, 0, 0]  # -0.05 is half a scale, and rounds to even
    torch.testing.assert_close(scales[0].item(), 0.1)
    assert dequantized(numbers, scales, 3).tolist()[3:5] == [0.0, 0.0]


@given(values)
def test_what_is_small_in_one_block_is_not_lost_to_what_is_large_in_another(numbers):
    small = torch.linspace(0.5, 1.0, 8)
    flat = torch.cat([small, torch.tensor(numbers)])
    assert (dequantized(*quantized(flat, 8), 8)[:8] - small).abs().max() <= 1 / 254 * (1 + 1e-4)


@given(st.lists(values, min_size=1, max_size=5), st.sampled_from([1, 7, 256]))
def test_the_mean_is_that_of_what_everybody_has_sent(parts, block):
    size = max(map(len, parts))
    mine = [torch.tensor(part + [0.0] * (size - len(part))) for part in parts]
    arrivals = travelled([cd.Compression.int8(block=block) for _ in mine], [[tensor] for tensor in mine])
    sent = torch.stack([tensor - arrival.lost for tensor, arrival in zip(mine, arrivals, strict=True)])
    largest = max(tensor.abs().max().item() for tensor in mine)
    rounded_again = 1 / 254 if len(parts) > 2 else 0.0  # slices are added up by their owners, and sent anew
    for arrival in arrivals:
        assert torch.equal(arrival.mean, arrivals[0].mean)
        torch.testing.assert_close(arrival.mean, sent.mean(0), rtol=0, atol=(1e-5 + rounded_again) * largest + 1e-37)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_bytes_do_not_grow_with_the_ranks(ranks):
    compressors = [cd.Compression.int8() for _ in range(ranks)]
    travelled(compressors, [[torch.randn(100, 256)]] * ranks)
    assert [3.8 < compressor.ratio < 4 for compressor in compressors] == [True] * ranks


def test_a_quarter_of_the_bytes_travels():
    compressors = [cd.Compression.int8() for _ in range(2)]
    travelled(compressors, [[torch.randn(100, 256)]] * 2)
    for compressor in compressors:
        assert 3.9 < compressor.ratio < 4
        assert 0 < compressor.error < 0.01


@pytest.mark.parametrize("block", [0, -1])
def test_a_block_has_values(block):
    with pytest.raises(cd.ArgumentError, match="at least one value"):
        cd.Compression.int8(block=block)
