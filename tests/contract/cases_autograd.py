"""The autograd boundary: values and gradients of operations are those of one reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from coordd import api
from coordd.errors import ArgumentError
from coordd.ops.messages import ReduceOp
from tests.contract import reference
from tests.contract.plugin import plugin
from tests.contract.reference import Expected, close, data
from tests.mpi.cases import ranks

FLOATS = ("float16", "bfloat16", "float32", "float64")
OPS = (ReduceOp.SUM, ReduceOp.AVERAGE)
SHAPE = (5, 3)


def _agrees(
    operation: Callable[..., Any],
    expected: Callable[..., Expected],
    arrays: list[np.ndarray],
    upstreams: list[np.ndarray],
    **details: object,
) -> None:
    """Compares the result of an operation and its gradient with the reference's; and that the array stays as it is."""
    mine, upstream = arrays[api.rank()].copy(), upstreams[api.rank()]
    called = plugin().differentiated(lambda tensor: operation(tensor, name="there", **details), mine, upstream)
    for found, wanted in zip(called, expected(arrays, upstreams, **details), strict=True):
        close(plugin().view(found), wanted)
    close(mine, arrays[api.rank()])


def _everyones(dtype: str, *shapes: tuple[int, ...], seed: int) -> list[np.ndarray]:
    return [data(dtype, shape, seed=seed + rank) for rank, shape in enumerate(shapes)]


@ranks(2)
def case_values_of_every_reduction() -> None:
    for dtype in plugin().dtypes:
        if dtype.startswith("float8"):  # which cannot be added up
            continue
        everyones = _everyones(dtype, SHAPE, SHAPE, seed=0)
        op = ReduceOp.MAX if dtype == "bool" else ReduceOp.SUM
        for reduce in plugin().reductions:
            found = reduce(plugin().tensor(everyones[api.rank()].copy()), name=dtype, op=op)
            close(plugin().view(found), reference.allreduce(everyones, everyones, op).value)


@ranks(2)
def case_allreduce() -> None:
    for dtype in FLOATS:
        for op in OPS:
            arrays, upstreams = (_everyones(dtype, SHAPE, SHAPE, seed=seed) for seed in (0, 10))
            _agrees(plugin().reductions[0], reference.allreduce, arrays, upstreams, op=op)


@ranks(2)
def case_allgather_of_unequal_rows() -> None:
    whole = (4, 3)
    for shapes in [((1, 3), (3, 3)), ((4, 3), (0, 3))]:
        arrays, upstreams = _everyones("float64", *shapes, seed=0), _everyones("float64", whole, whole, seed=10)
        _agrees(plugin().allgather, reference.allgather, arrays, upstreams)


@ranks(2)
def case_alltoall_of_unequal_rows() -> None:
    arrays = _everyones("float64", (2, 3), (6, 3), seed=0)
    upstreams = _everyones("float64", (4, 3), (4, 3), seed=10)
    _agrees(plugin().alltoall, reference.alltoall, arrays, upstreams)


@ranks(2)
def case_broadcast() -> None:
    for root in range(2):
        arrays, upstreams = (_everyones("float64", SHAPE, SHAPE, seed=seed) for seed in (0, 10))
        _agrees(
            lambda tensor, name, root: plugin().broadcast(tensor, root, name=name),
            reference.broadcast,
            arrays,
            upstreams,
            root=root,
        )


@ranks(2)
def case_reducescatter_of_rows_that_do_not_divide_evenly() -> None:
    for op in OPS:
        arrays, upstreams = _everyones("float64", SHAPE, SHAPE, seed=0), _everyones("float64", (3, 3), (2, 3), seed=10)
        _agrees(plugin().reducescatter, reference.reducescatter, arrays, upstreams, op=op)


@ranks(2)
def case_what_is_not_linear_has_no_gradient() -> None:
    with pytest.raises(ArgumentError, match="Max has no gradient here"):
        plugin().differentiated(
            lambda tensor: plugin().reductions[0](tensor, name="max", op=ReduceOp.MAX), np.ones(2), np.ones(2)
        )
