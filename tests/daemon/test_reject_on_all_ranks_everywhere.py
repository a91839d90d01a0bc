"""Whatever public function announces an operation: what it refuses on one rank is counted, and all others hear of it.

What a call is given wrongly may be found before coordd's own code gets to it, by Python or by NumPy.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import coordd
import coordd.torch as cd
from coordd.parallel.collective_calls import CollectiveCall
from coordd_torch.rounds import Gather, Mean
from tests.daemon.test_reject_on_all_ranks import BAD, ONE, refused_by_last
from tests.local_ranks import local_ranks

FOUR = torch.ones(4, 2)
SPARSE = torch.eye(3).to_sparse()
RAGGED = [[1.0], [1.0, 2.0]]


def done(function):
    return lambda *args, **kwargs: function(*args, **kwargs).result()


ENTRIES = {
    "allreduce": (cd.allreduce, [ONE], [BAD]),
    "allreduce_": (cd.allreduce_, [ONE.clone()], [BAD]),
    "allreduce_async": (done(cd.allreduce_async), [ONE], [BAD]),
    "allreduce_async_": (done(cd.allreduce_async_), [ONE.clone()], [BAD]),
    "allgather": (cd.allgather, [ONE], [torch.tensor(1.0)]),
    "allgather_async": (done(cd.allgather_async), [ONE], [torch.tensor(1.0)]),
    "allgather_object": (cd.allgather_object, [1], [1, None, "all"]),
    "alltoall": (cd.alltoall, [FOUR], [[1.0, 2.0]]),
    "alltoall, by rows": (cd.alltoall, [FOUR], [torch.ones(3)]),
    "alltoall, by splits": (cd.alltoall, [FOUR], [FOUR, [9, 9]]),
    "alltoall_async": (done(cd.alltoall_async), [FOUR], [torch.ones(3)]),
    "barrier": (cd.barrier, [], ["all"]),
    "broadcast": (cd.broadcast, [ONE, 0], [ONE, 7]),
    "broadcast_": (cd.broadcast_, [ONE.clone(), 0], [ONE.clone(), 7]),
    "broadcast_, without anything": (cd.broadcast_, [ONE.clone(), 0], []),
    "broadcast_async": (done(cd.broadcast_async), [ONE, 0], ["x", 0]),
    "broadcast_async_": (done(cd.broadcast_async_), [ONE.clone(), 0], ["x", 0]),
    "broadcast_object": (cd.broadcast_object, [1, 0], [1, "a"]),
    "grouped_allreduce": (cd.grouped_allreduce, [[ONE, ONE]], [[ONE, BAD]]),
    "grouped_allreduce, of a generator": (cd.grouped_allreduce, [[ONE, ONE]], [iter([ONE, BAD])]),
    "grouped_allreduce_": (cd.grouped_allreduce_, [[ONE.clone(), ONE.clone()]], [[ONE.clone(), BAD]]),
    "grouped_allreduce_async": (done(cd.grouped_allreduce_async), [[ONE, ONE]], [[ONE, BAD]]),
    "grouped_allreduce_async_": (done(cd.grouped_allreduce_async_), [[ONE.clone(), ONE.clone()]], [[ONE, BAD]]),
    "grouped_allgather": (cd.grouped_allgather, [[ONE, ONE]], [[ONE, torch.tensor(1.0)]]),
    "grouped_allgather_async": (done(cd.grouped_allgather_async), [[ONE, ONE]], [[ONE, torch.tensor(1.0)]]),
    "grouped_reducescatter": (cd.grouped_reducescatter, [[ONE, ONE]], [[ONE, torch.tensor(1.0)]]),
    "grouped_reducescatter_async": (done(cd.grouped_reducescatter_async), [[ONE, ONE]], [[ONE, torch.tensor(1.0)]]),
    "join": (cd.join, [], [-1, "all"]),
    "reducescatter": (cd.reducescatter, [ONE], [torch.tensor(1.0)]),
    "reducescatter_async": (done(cd.reducescatter_async), [ONE], [torch.tensor(1.0)]),
    "sparse_allreduce_async": (done(cd.sparse_allreduce_async), [SPARSE, "s", cd.Sum], [ONE, "s", cd.Sum]),
    "NumPy allreduce": (coordd.allreduce, [np.ones(2)], [RAGGED]),
    "NumPy broadcast": (coordd.broadcast, [np.ones(2), 0], [RAGGED, 0]),
    "NumPy allgather": (coordd.allgather, [np.ones(2)], [RAGGED]),
    "NumPy barrier": (lambda *a, **k: coordd.barrier(**dict(zip(["process_set"], a, strict=False)), **k), [], ["all"]),
}


@pytest.fixture(scope="module")
def two():
    with local_ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("wrong", ["an unknown argument", "a bad value"])
@pytest.mark.parametrize("what", ENTRIES)
def test_every_public_function_counts_what_it_refuses_and_tells_the_others(two, what, wrong):
    function, good, bad = ENTRIES[what]
    given, more = (good, {"bogus": 1}) if wrong == "an unknown argument" else (bad, {})
    refused_by_last(two, lambda: function(*good), lambda: function(*given, **more), "rank 1 refused")


def test_what_one_rank_refuses_pairs_its_next_call_with_the_next_of_the_others(two):
    """The rank that catches the error goes on at once."""
    calls = {
        "alltoall": lambda value, **more: cd.alltoall(torch.full((2,), value), **more).tolist(),
        "NumPy": lambda value, **more: coordd.allreduce([value], op=cd.Sum, **more).tolist(),
        "objects": lambda value, **more: cd.broadcast_object(value, 0, **more),
        "all objects": cd.allgather_object,
    }

    def body(rank):
        found = {}
        for what, call in calls.items():
            with pytest.raises(TypeError if rank == 0 else cd.RefusedError):
                call(100.0, **({"bogus": 1} if rank == 0 else {}))
            found[what] = call(200.0 + rank)
        return found

    for found in two.each(body):
        assert found == {"alltoall": [200.0, 201.0], "NumPy": [401.0], "objects": 200.0, "all objects": [200.0, 201.0]}


@pytest.mark.parametrize("as_horovod", [False, True])
def test_a_group_of_nothing_with_a_name_is_told(as_horovod):
    groups = [
        cd.grouped_allreduce,
        cd.grouped_allgather,
        cd.grouped_reducescatter,
        done(cd.grouped_allreduce_async),
        done(cd.grouped_allgather_async),
        done(cd.grouped_reducescatter_async),
    ]
    with local_ranks(2, as_horovod=as_horovod) as ranks:

        def body(rank):
            for group in groups:
                if rank:
                    with pytest.raises(cd.RefusedError, match=r"rank 0 refused .* its list of tensors is empty"):
                        group([ONE, ONE], name="e")
                else:
                    assert not [*group([], name="e")]
                assert len(group([ONE, ONE, ONE], name="e")) == 3
                assert not [*group([], name="e")]
                assert len(group([ONE, ONE], name="e")) == 2
            return cd.allreduce(torch.full((1,), 100.0), op=cd.Sum).item()

        assert ranks.each(body) == [200.0] * 2


def test_a_group_of_nothing_leaves_one_of_its_name_that_is_in_flight_alone(two):
    tried = threading.Event()

    def body(rank):
        if rank:
            tried.wait(15)
            found = cd.grouped_allreduce([ONE, ONE], name="f")
        else:
            handle = cd.grouped_allreduce_async([ONE, ONE], name="f")
            assert not cd.grouped_allreduce([], name="f")
            tried.set()
            found = handle.result()
        return [each.tolist() for each in found]

    assert two.each(body) == [[[1.0] * 4] * 2] * 2


@pytest.mark.parametrize("bad", [torch.ones(4, 3), torch.ones(4), [[1.0, 2.0]]])
def test_a_batch_that_a_layer_refuses_is_counted_and_told(two, bad):
    refused_by_last(
        two, lambda: cd.SyncBatchNorm(2)(FOUR), lambda: cd.SyncBatchNorm(2)(bad), "rank 1 refused allgather"
    )

    def body(rank):
        layer = cd.SyncBatchNorm(2, momentum=None)
        with pytest.raises(Exception, match=r"."):
            layer(bad if rank else FOUR)
        layer(torch.full((4, 2), float(rank)))
        return layer.running_mean.tolist()

    assert two.each(body) == [[0.5, 0.5]] * 2


def test_a_layer_that_only_evaluates_has_nothing_to_tell(two):
    def body(rank):
        layer = cd.SyncBatchNorm(2).eval()
        if rank:
            with pytest.raises(cd.ArgumentError):
                layer(torch.ones(4))
        return cd.allgather(torch.full((1,), float(rank))).tolist()

    assert two.each(body) == [[0.0, 1.0]] * 2


class Twice(cd.Compressor):
    """Needs two rounds, and fails where and when it is told to."""

    def __init__(self, fails):
        super().__init__()
        self.fails = fails

    def exchange(self, cargo):
        if self.fails == 0:
            raise MemoryError("too large")
        found = torch.stack([own for (own,) in (yield Gather(cargo.flat))]).mean(0)
        if self.fails == 1:
            raise MemoryError("too large")
        found = (yield Mean(found))[0]
        cargo.flat.zero_()
        return found


INT8 = cd.Compression.int8
ROUNDS = {
    "an operation": (INT8, {"compression": INT8, "op": cd.Max}),
    "an unknown argument": (INT8, {"compression": INT8, "bogus": 1}),
    "a factor": (INT8, {"compression": INT8, "prescale_factor": "x"}),
    "a compressor": (INT8, {"compression": 7}),
    "a type": (INT8, {"compression": INT8, "bad": BAD}),
    "a compressor of one's own": (Twice(None), {"compression": Twice(0)}),
    "between its rounds": (Twice(None), {"compression": Twice(1)}),
}


@pytest.mark.parametrize("name", ["r", None])
@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("what", ROUNDS)
def test_what_is_refused_of_an_operation_in_rounds_is_counted_and_told(two, what, name, group):
    compression, wrong = ROUNDS[what]
    function = cd.grouped_allreduce if group else cd.allreduce

    def call(tensor, **more):
        found = function([ONE, tensor, ONE] if group else tensor, name=name, **more)
        return found[1] if group else found

    def bad():
        more = dict(wrong)
        return call(more.pop("bad", ONE), **more)

    if what != "a type" or not group:
        refused_by_last(two, lambda: call(ONE, compression=compression), bad, "rank 1 refused")

    def body(rank):
        """The rank that catches the error goes on at once."""
        with pytest.raises(Exception, match=r".*") as caught:
            bad() if rank else call(ONE, compression=compression)
        assert rank or isinstance(caught.value, (cd.RefusedError, cd.MismatchError))
        again = call(torch.full((4,), rank + 1.0), compression=compression, op=cd.Sum)
        return again.round().tolist(), cd.allreduce(torch.full((1,), rank + 1.0), op=cd.Sum).item()

    assert two.each(body) == [([3.0] * 4, 3.0)] * 2


@pytest.mark.parametrize("name", ["c", None])
def test_what_is_refused_within_a_call_and_caught_is_counted_and_told_before_the_next(two, name):
    def body(rank):
        with CollectiveCall("fit"):
            with pytest.raises((cd.RefusedError, cd.ArgumentError), match=r"rank 0 refused allreduce|bool"):
                cd.allreduce(ONE if rank else BAD, name=name)
            found = cd.allreduce(torch.full((1,), 200.0 + rank), op=cd.Sum).item()
        return found, cd.allreduce(torch.full((1,), rank + 1.0), op=cd.Sum).item()

    assert two.each(body) == [(401.0, 3.0)] * 2


def test_what_is_refused_within_a_call_at_its_end_fails_it_where_nobody_catches_it(two):
    def fit(rank):
        with CollectiveCall("fit"):
            if rank:
                cd.allreduce(ONE)
            else:
                with pytest.raises(cd.ArgumentError):
                    cd.allreduce(BAD)

    def body(rank):
        with pytest.raises(cd.RefusedError):
            fit(rank)
        return cd.allreduce(torch.full((1,), rank + 1.0), op=cd.Sum).item()

    assert two.each(body) == [3.0] * 2


def test_a_group_of_nothing_within_a_call(two):
    def body(rank):
        with CollectiveCall("fit"):
            if rank:
                with pytest.raises(cd.RefusedError, match="its list of tensors is empty"):
                    cd.grouped_allreduce([ONE, ONE], name="e")
            else:
                assert not cd.grouped_allreduce([], name="e")
            assert not cd.grouped_allreduce([])
            return cd.allreduce(torch.full((1,), rank + 1.0), op=cd.Sum).item()

    assert two.each(body) == [3.0] * 2
