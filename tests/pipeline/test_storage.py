"""How a tensor's values lie in a frame."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.pipeline.storage import FORMS

TINY = float(np.finfo(np.float32).tiny)
INT8 = FORMS["int8"]


def kept(form, array):
    part = FORMS[form].stored(array)
    out = np.full(part.nbytes, 99, np.uint8)
    part.write(out)
    assert part.nbytes == FORMS[form].nbytes(array.dtype, array.size)
    found = FORMS[form].read(out, array.dtype, array.shape)
    assert found.dtype == array.dtype
    return found


@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=256, max_size=900))
def test_no_value_is_off_by_more_than_half_a_scale_of_its_block(numbers):
    array = np.array(numbers, np.float32)
    found = kept("int8", array)
    for start in range(0, len(array), 256):
        part, rounded = array[start : start + 256], found[start : start + 256]
        half = max(np.abs(part).max() / 127, TINY) / 2
        assert np.abs(part - rounded).max() <= half * (1 + 1e-4)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_int8_takes_a_quarter_of_fp32_and_a_little(dtype):
    array = np.linspace(-3, 3, 5000).reshape(50, 100).astype(dtype)
    assert INT8.stored(array).nbytes == 5000 + 4 * 20
    assert np.abs(kept("int8", array).astype(float) - array.astype(float)).max() <= 3 / 127


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, 1e300])
def test_what_fp32_has_no_number_for_is_not_for_int8(bad):
    array = np.ones(1000)
    array[777] = bad
    assert INT8.stored(array) is None


@pytest.mark.parametrize("form", ["bf16", "int8"])
@pytest.mark.parametrize("array", [np.arange(1000), np.ones(1000, bool), np.ones(10, np.float32), np.ones(0)])
def test_integers_and_small_tensors_stay_as_they_are(form, array):
    assert FORMS[form].stored(array) is None


def test_what_has_sixteen_bits_already_is_not_for_bf16():
    assert FORMS["bf16"].stored(np.ones(1000, np.float16)) is None


def test_bf16_rounds_to_the_nearest_of_any_strides():
    array = np.random.default_rng(1).normal(size=(40, 30)).T
    np.testing.assert_array_equal(kept("bf16", array), array.astype(ml_dtypes.bfloat16).astype(np.float64))


def test_what_is_more_than_bf16s_largest_becomes_infinite():
    array = np.full(300, 1.0)
    array[7] = -1e300
    assert kept("bf16", array)[7] == -np.inf
