from __future__ import annotations

import pytest
import torch

from coordd_torch.compression import Compression

NARROW = {Compression.fp16: torch.float16, Compression.bf16: torch.bfloat16}


def test_none_is_the_tensor_itself():
    tensor = torch.ones(3)
    small, context = Compression.none.compress(tensor)
    assert small is tensor
    assert Compression.none.decompress(small, context) is tensor


@pytest.mark.parametrize("compression", NARROW)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_floats_travel_in_sixteen_bits(compression, dtype):
    tensor = torch.tensor([1.0, -0.5, 3.140625], dtype=dtype)
    small, context = compression.compress(tensor)
    assert small.dtype == NARROW[compression]
    back = compression.decompress(small, context)
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


@pytest.mark.parametrize("compression", NARROW)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_what_is_narrow_or_no_float_stays_as_it_is(compression, dtype):
    tensor = torch.ones(3).to(dtype)
    small, context = compression.compress(tensor)
    assert small is tensor
    assert compression.decompress(small, context) is tensor


def test_the_range_of_bf16_is_that_of_fp32():
    tensor = torch.tensor([1e38, 70_000.0])
    assert torch.isfinite(Compression.bf16.compress(tensor)[0]).all()
    assert torch.isinf(Compression.fp16.compress(tensor)[0]).all()
