"""Buckets: nothing is lost, nothing comes twice, the order is kept, and only like goes with like."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.negotiation.fusion import buckets, item_size
from coordd.ops.messages import Kind, ReduceOp, Request, Response

requests = st.builds(
    Request,
    st.sampled_from([Kind.ALLREDUCE, Kind.ALLREDUCE, Kind.ALLREDUCE, Kind.BROADCAST, Kind.ALLGATHER, Kind.BARRIER]),
    st.text("abcdef", min_size=1, max_size=3),
    st.sampled_from(["float32", "bfloat16"]),
    st.lists(st.integers(0, 4), max_size=2).map(tuple),
    st.sampled_from([ReduceOp.SUM, ReduceOp.MAX]),
    prescale=st.sampled_from([1.0, 0.5]),
    postscale=st.sampled_from([1.0, 0.5]),
    members=st.sampled_from([(), (0, 1)]),
)
plans = st.lists(st.builds(Response, requests), max_size=30)
limits = st.sampled_from([0, 1, 8, 20, 64, 1 << 20])


def tensor(name: str, elements: int, dtype: str = "float32", **details: object) -> Response:
    return Response(Request(Kind.ALLREDUCE, name, dtype, (elements,), **details))


def size(response: Response) -> int:
    return math.prod(response.request.shape) * {"float32": 4, "bfloat16": 2}[response.request.dtype]


def traits(response: Response) -> tuple[object, ...]:
    request = response.request
    return request.dtype, request.op, request.prescale, request.postscale, request.members


def names(found: list[list[Response]]) -> list[str]:
    return [" ".join(response.request.name for response in bucket) for bucket in found]


@given(plans, limits)
def test_every_response_is_in_one_bucket(plan, limit):
    found = buckets(plan, fusion_bytes=limit)
    assert sorted(id(response) for bucket in found for response in bucket) == sorted(map(id, plan))
    assert all(found)


@given(plans, limits)
def test_the_order_of_the_plan_is_kept(plan, limit):
    place = {id(response): number for number, response in enumerate(plan)}
    numbers = [[place[id(response)] for response in bucket] for bucket in buckets(plan, fusion_bytes=limit)]
    assert all(bucket == sorted(bucket) for bucket in numbers)
    assert [bucket[0] for bucket in numbers] == sorted(bucket[0] for bucket in numbers)


@given(plans, limits)
def test_only_like_goes_with_like_and_no_bucket_is_too_large(plan, limit):
    for bucket in buckets(plan, fusion_bytes=limit):
        if len(bucket) > 1:
            assert len({traits(response) for response in bucket}) == 1
            assert {response.request.kind for response in bucket} == {Kind.ALLREDUCE}
            assert sum(map(size, bucket)) <= limit


@given(plans, limits)
def test_a_bucket_ends_only_because_the_next_would_not_have_fitted(plan, limit):
    last: dict[object, list[Response]] = {}
    for bucket in buckets(plan, fusion_bytes=limit):
        if bucket[0].request.kind is not Kind.ALLREDUCE or not limit:
            continue
        if (before := last.get(traits(bucket[0]))) is not None:
            assert sum(map(size, before)) + size(bucket[0]) > limit
        last[traits(bucket[0])] = bucket


@given(plans, limits)
def test_every_rank_finds_the_same(plan, limit):
    copies = [
        Response(Request(**{name: getattr(r.request, name) for name in r.request.__struct_fields__})) for r in plan
    ]
    assert buckets(copies, fusion_bytes=limit) == buckets(plan, fusion_bytes=limit)


def test_look_ahead_passes_over_what_is_different():
    plan = [tensor("a", 1), tensor("h", 1, "float16"), tensor("b", 1), tensor("i", 1, "float16"), tensor("c", 1)]
    assert names(buckets(plan, fusion_bytes=64)) == ["a b c", "h i"]


def test_a_full_bucket_is_closed():
    plan = [tensor(name, 2) for name in "abcde"]
    assert names(buckets(plan, fusion_bytes=16)) == ["a b", "c d", "e"]


def test_what_is_larger_than_a_bucket_travels_alone():
    plan = [tensor("a", 1), tensor("large", 100), tensor("b", 1), tensor("c", 1)]
    assert names(buckets(plan, fusion_bytes=16)) == ["a", "large", "b c"]


def test_without_fusion_everything_travels_alone():
    assert names(buckets([tensor("a", 1), tensor("b", 0)], fusion_bytes=0)) == ["a", "b"]


def test_nothing_makes_no_bucket():
    assert buckets([], fusion_bytes=64) == []


DTYPES = [np.dtype(kind) for kind in "?bBhHiIlLqQefdgFD"]
DTYPES += [np.dtype(getattr(ml_dtypes, name)) for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint2")]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_an_element_has_the_size_that_numpy_says(dtype):
    assert item_size(dtype.name) == dtype.itemsize
