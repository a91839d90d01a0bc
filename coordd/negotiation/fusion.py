"""Tensor fusion: assigns tensors to buckets by a pure function of the plan, so that every rank packs the same."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

from coordd.ops.dtypes import dtype_of
from coordd.ops.messages import Kind, ReduceOp, Request, Response

__all__ = ["buckets", "item_size", "size"]


@lru_cache(maxsize=64)
def item_size(dtype: str) -> int:
    """Bytes of one element: ``float32`` has 4, ``bfloat16`` 2, ``float8_e4m3fn`` and ``int4`` 1."""
    if not dtype[0].isalpha():  # a structured dtype
        return dtype_of(dtype).itemsize
    digits = "".join(character for character in dtype.partition("_")[0] if character.isdigit())
    return 1 if dtype == "bool" else -(-int(digits) // 8)


@lru_cache(maxsize=1 << 16)
def _traits(request: Request) -> tuple[tuple[object, ...], int]:
    """The properties that must be equal inside a bucket, and the tensor's bytes."""
    key = (request.dtype, request.op, request.prescale, request.postscale, request.members)
    return key, math.prod(request.shape) * item_size(request.dtype)


def size(request: Request) -> int:
    """Bytes of a tensor."""
    return _traits(request)[1]


def buckets(responses: Iterable[Response], *, fusion_bytes: int) -> list[list[Response]]:
    """Groups the responses of one plan.

    Allreduces of equal dtype, operation, scale factors, process set and number of joined ranks share a bucket, with
    look-ahead over other responses, until the next one would exceed ``fusion_bytes``. Every other response, and every
    response if ``fusion_bytes`` is 0, has a bucket of its own; so has an Adasum, which is of one tensor. Buckets are
    ordered by their first response.
    """
    found: list[list[Response]] = []
    open_buckets: dict[tuple[object, ...], tuple[list[Response], int]] = {}
    for response in responses:
        request = response.request
        if request.kind is not Kind.ALLREDUCE or request.op is ReduceOp.ADASUM or not fusion_bytes:
            found.append([response])
            continue
        traits, nbytes = _traits(request)
        key = (traits, response.absent)
        bucket, filled = open_buckets.get(key, (None, 0))
        if bucket is not None and filled + nbytes <= fusion_bytes:
            bucket.append(response)
        else:
            bucket, filled = [response], 0
            found.append(bucket)
        open_buckets[key] = (bucket, filled + nbytes)
    return found
