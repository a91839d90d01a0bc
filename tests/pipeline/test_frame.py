"""Values that travel between stages as one array of bytes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from coordd.errors import ArgumentError
from coordd.pipeline.frame import joined, pack, parted, unpack
from coordd.transport.shared_memory.loans import blank
from tests.pipeline.arrays import ARRAYS


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Output:
    hidden: Any
    cache: Any = None


DTYPES = ["bool", "int8", "int64", "float16", "float32", "float64", "complex64", "bfloat16", "float8_e4m3fn"]


def travelled(value, **options):
    frame, sent = pack(value, ARRAYS, **options)
    assert frame.dtype == np.uint8
    assert frame.ndim == 1
    return unpack(frame, ARRAYS), sent, frame


def equal(left, right):
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    assert left.tobytes() == right.tobytes()


arrays = st.sampled_from([np.dtype(name) for name in DTYPES[:7]]).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)
trees = st.recursive(
    arrays | st.none() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda parts: st.lists(parts, max_size=4) | st.dictionaries(st.text(), parts, max_size=4) | st.tuples(parts, parts),
    max_leaves=12,
)


@given(trees)
def test_any_tree_arrives_as_it_left(value):
    (found, received), sent, _ = travelled(value)
    for left, right in zip(sent, received, strict=True):
        equal(left, right)
    structure, parts = parted(found, ARRAYS)
    assert structure == parted(value, ARRAYS)[0]
    assert len(parts) == len(sent)


@pytest.mark.parametrize("name", DTYPES)
def test_every_type_of_number_arrives_at_a_multiple_of_64_without_a_copy(name):
    value = [np.arange(35).astype(name).reshape(5, 7), np.ones(3, name)]
    (_, received), _, frame = travelled(value)
    for left, right in zip(value, received, strict=True):
        equal(left, right)
        assert right.ctypes.data % 64 == 0
        assert np.shares_memory(right, frame)


def test_classes_of_the_model_arrive_as_such():
    x, y = np.ones(2), np.arange(3)
    value = {"pair": Pair(x, None), "out": Output(y, OrderedDict(a=(x, 7)))}
    (found, received), sent, _ = travelled(value)
    assert isinstance(found["pair"], Pair)
    assert isinstance(found["out"], Output)
    assert found["out"].cache["a"][1] == 7
    assert [id(tensor) for tensor in sent] == [id(x), id(y)]
    assert received[1] is found["out"].hidden


def test_one_tensor_in_two_places_travels_once_and_stays_one():
    x = np.ones(1000)
    (found, received), _, frame = travelled([x, {"again": x}])
    assert found[0] is found[1]["again"]
    assert len(received) == 1
    assert len(frame) < 2 * x.nbytes


@pytest.mark.parametrize("axes", [(0, 1, 2), (2, 0, 1), (1, 0, 2), (2, 1, 0)])
def test_a_transposed_tensor_keeps_its_order_in_memory(axes):
    value = np.arange(24.0).reshape(2, 3, 4).transpose(axes)
    (found, _), _, frame = travelled(value)
    np.testing.assert_array_equal(found, value)
    assert found.strides == value.strides
    assert np.shares_memory(found, frame)


def test_a_slice_and_an_expanded_tensor_arrive_whole():
    for value in (np.arange(24.0).reshape(4, 6)[::2, 1:4], np.broadcast_to(np.float32(3), (4, 5))):
        np.testing.assert_array_equal(travelled(value)[0][0], value)


def test_gradients_that_are_missing_travel_as_none():
    (found, received), _, _ = travelled([np.ones(2), None, np.zeros(3)])
    assert found[1] is None
    assert len(received) == 2


def test_what_cannot_be_pickled_is_named_with_its_place_and_type():
    value = {"a": np.ones(2), "mask": [1, 2, Output((), cache=lambda: None)]}
    with pytest.raises(ArgumentError, match=r"value\['mask'\]\[2\]\.cache, of type builtins\.function, cannot travel"):
        pack(value, ARRAYS)


def test_a_value_that_contains_itself_and_a_lambda_ends_in_an_error():
    value = [lambda: None]
    value.append(value)
    with pytest.raises(ArgumentError, match=r"value\[0\], of type builtins.function"):
        pack(value, ARRAYS)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda frame: frame[:-1], "was packed with"),
        (lambda frame: frame[:30], "was packed with"),
        (lambda frame: frame[:10], "at least 24 bytes, this one has 10"),
        (lambda frame: np.concatenate([frame, frame]), "was packed with"),
        (lambda frame: np.roll(frame, 1), "are no frame"),
        (lambda frame: frame.view(np.int8), "not int8"),
        (lambda frame: frame[::2], "contiguous"),
    ],
)
def test_what_is_no_whole_frame_is_refused(spoil, text):
    frame, _ = pack([np.ones(5)], ARRAYS)
    frame = np.concatenate([frame, np.zeros(-len(frame) % 2, np.uint8)]) if text == "contiguous" else frame
    with pytest.raises(ArgumentError, match=text):
        unpack(spoil(frame), ARRAYS)


def test_a_frame_that_came_to_an_odd_address_is_read_all_the_same():
    frame, _ = pack(np.arange(5.0), ARRAYS)
    odd = blank(len(frame) + 1)[1:]
    odd[:] = frame
    found = unpack(odd, ARRAYS)[0]
    np.testing.assert_array_equal(found, np.arange(5.0))
    assert found.flags.aligned


def test_a_value_is_put_together_with_other_tensors():
    structure, tensors = parted(("x", np.ones(2)), ARRAYS)
    assert joined(structure, [7]) == ("x", 7)
    assert len(tensors) == 1


def test_each_tensor_is_stored_as_the_sender_says_and_read_without_being_told():
    big = np.linspace(-1, 1, 4096, dtype=np.float32)
    value = [big, big.astype(np.float64), np.arange(4096), big[:8].copy()]
    forms = iter(["bf16", "int8", "int8", "bf16"])
    (found, _), _, frame = travelled(value, compress=lambda tensor: next(forms))
    assert len(frame) < 2 * 4096 + 4096 + 64 + 8 * 4096 + 1000
    assert [part.dtype for part in found] == [part.dtype for part in value]
    np.testing.assert_array_equal(found[0], big.astype(ml_dtypes.bfloat16).astype(np.float32))
    np.testing.assert_allclose(found[1], big, atol=1 / 254)
    np.testing.assert_array_equal(found[2], value[2])
    np.testing.assert_array_equal(found[3], value[3])


def test_an_unknown_form_is_refused():
    with pytest.raises(ArgumentError, match="no form 'zip'; there are bf16, int8"):
        pack(np.ones(5), ARRAYS, compress=lambda tensor: "zip")
