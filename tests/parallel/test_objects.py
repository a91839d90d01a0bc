"""Python objects of the ranks, each of which travels in two operations."""

from __future__ import annotations

import itertools

import pytest

from coordd import api
from coordd.errors import RefusedError
from coordd.ops.handles import Handle
from coordd.parallel.objects import allgather_object, broadcast_object
from tests.local_ranks import each_rank


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("call", [allgather_object, broadcast_object])
def test_an_interrupted_call_is_told_and_the_next_ones_match(monkeypatch, call, named):
    """As a signal's handler interrupts it while it waits for the sizes."""
    times = itertools.count()

    def interrupted(handle, timeout=None):
        found = usual(handle, timeout)
        if api.rank() == 1 and next(times) == 2:
            text = "a handler's"
            raise TimeoutError(text)
        return found

    def body(rank):
        name = {"name": "it"} if named else {}
        before = call([rank, 0], **name)
        with pytest.raises(TimeoutError if rank else RefusedError, match="a handler's"):
            call([rank, 1], **name)
        return before, [call([rank, number], **name) for number in (2, 3)]

    usual = Handle.result
    monkeypatch.setattr(Handle, "result", interrupted)
    whole = call is allgather_object
    wanted = [[[0, number], [1, number]] if whole else [0, number] for number in (0, 2, 3)]
    assert each_rank(2, body) == [(wanted[0], wanted[1:])] * 2
