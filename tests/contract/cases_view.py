"""A view: the memory of a tensor as an array, and back."""

from __future__ import annotations

import numpy as np

from coordd import api
from coordd.ops.messages import ReduceOp
from tests.contract.plugin import plugin
from tests.contract.reference import close, data
from tests.mpi.cases import ranks

SHAPES = ((5, 3), (3, 0), ())


@ranks(2)
def case_every_type_and_shape_there_and_back() -> None:
    for dtype in plugin().dtypes:
        for shape in SHAPES:
            array = data(dtype, shape, seed=0)
            view = plugin().view(plugin().tensor(array.copy()))
            close(view, array)
            close(plugin().view(plugin().back(view)), array)


@ranks(2)
def case_memory_is_shared_where_that_is_promised() -> None:
    for dtype in plugin().dtypes:
        tensor = plugin().tensor(data(dtype, (5, 3), seed=0))
        view = plugin().view(tensor)
        assert np.shares_memory(view, plugin().view(tensor)) == plugin().shares
        if plugin().adopts:
            assert np.shares_memory(view, plugin().view(plugin().back(view)))


@ranks(2)
def case_an_operation_changes_a_tensor_where_it_lies_or_a_copy() -> None:
    everyones = [data("float64", (5, 3), seed=rank) for rank in range(2)]
    mine, expected = everyones[api.rank()], sum(everyones)
    tensor = plugin().tensor(mine.copy())
    view = plugin().view(tensor)
    array = view if plugin().writable else view.copy()
    found = api.operations().allreduce(array, name="place", op=ReduceOp.SUM).result()
    close(plugin().view(plugin().back(found)), expected)
    close(plugin().view(tensor), expected if plugin().writable else mine)


@ranks(2)
def case_every_type_travels() -> None:
    for dtype in plugin().dtypes:
        everyones = [data(dtype, (rank + 1, 3), seed=rank) for rank in range(2)]
        rows = plugin().allgather(plugin().tensor(everyones[api.rank()]), name=dtype)
        close(plugin().view(rows), np.concatenate(everyones))


@ranks(2)
def case_a_tensor_of_any_layout_travels() -> None:
    everyones = [data("float64", (6, 4), seed=rank).T[::2] for rank in range(2)]
    for number, reduce in enumerate(plugin().reductions):
        found = reduce(plugin().tensor(everyones[api.rank()]), name=f"layout {number}", op=ReduceOp.SUM)
        close(plugin().view(found), sum(everyones))
