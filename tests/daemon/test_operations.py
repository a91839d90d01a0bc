"""Operations on arrays, and what their callers hear of bad input."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import pytest

import coordd
from coordd import api
from coordd.errors import ArgumentError, MismatchError, RefusedError
from coordd.negotiation.wire import decode, encode
from coordd.ops.arguments import check_reducible
from coordd.ops.messages import Announcement, Kind, ReduceOp, Report
from coordd.ops.process_sets import ProcessSet, global_process_set
from tests.local_ranks import each_rank, local_ranks

HERE = re.escape(__file__)

# What the ranks disagree about, how rank 0 calls and how the others do, and what is told of either.
MISMATCHES = {
    "shape": (
        lambda ops: ops.allreduce(np.ones((2, 3)), name="w"),
        lambda ops: ops.allreduce(np.ones((3, 2)), name="w"),
        ("(2, 3)", "(3, 2)"),
    ),
    "dtype": (
        lambda ops: ops.allreduce(np.ones(2, np.float32), name="w"),
        lambda ops: ops.allreduce(np.ones(2, ml_dtypes.bfloat16), name="w"),
        ("float32", "bfloat16"),
    ),
    "operation": (
        lambda ops: ops.allreduce(np.ones(2), name="w"),
        lambda ops: ops.allgather(np.ones(2), name="w"),
        ("allreduce", "allgather"),
    ),
    "reduction": (
        lambda ops: ops.allreduce(np.ones(2), name="w", op=ReduceOp.SUM),
        lambda ops: ops.allreduce(np.ones(2), name="w", op=ReduceOp.MAX),
        ("sum", "max"),
    ),
    "scale factors": (
        lambda ops: ops.allreduce(np.ones(2), name="w", prescale=0.5),
        lambda ops: ops.allreduce(np.ones(2), name="w", postscale=3),
        ("prescale 0.5, postscale 1.0", "prescale 1.0, postscale 3.0"),
    ),
    "root rank": (
        lambda ops: ops.broadcast(np.ones(2), 0, name="w"),
        lambda ops: ops.broadcast(np.ones(2), 1, name="w"),
        ("0", "1"),
    ),
    "process set": (
        lambda ops: ops.allreduce(np.ones(2), name="w", process_set=ProcessSet([0, 1])),
        lambda ops: ops.allreduce(np.ones(2), name="w"),
        ("(0-1)", "(0-2)"),
    ),
}


@pytest.fixture
def ranks():
    with local_ranks(3) as found:
        yield found


@pytest.mark.parametrize("attribute", MISMATCHES)
def test_a_disagreement_is_told_to_every_rank_in_the_same_words_and_work_goes_on(ranks, attribute):
    first, others, (value, other) = MISMATCHES[attribute]

    def body(rank):
        with pytest.raises(MismatchError) as caught:
            (first if rank == 0 else others)(api.operations()).result(10.0)
        assert coordd.allreduce(np.ones(2), name="w").tolist() == [1.0, 1.0]
        return caught.value

    errors = ranks.each(body)
    assert len({str(error) for error in errors}) == 1
    assert {(error.name, error.attribute) for error in errors} == {("w", attribute)}
    text = rf"ranks disagree on the {attribute} of 'w' \(rank 0: {re.escape(value)} at {HERE}:\d+; "
    assert re.search(text + rf"ranks? (1|2|1-2): {re.escape(other)} at {HERE}:\d+\)", str(errors[0])), errors[0]


def test_allgathers_may_differ_in_the_first_dimension_only(ranks):
    def body(rank):
        assert coordd.allgather(np.full((rank, 2), rank)).tolist() == [[1, 1], [2, 2], [2, 2]]
        with pytest.raises(MismatchError, match=r"shape of 'w' \(rank 0: \(any, 2\).*ranks 1-2: \(any, 3\)"):
            api.operations().allgather(np.ones((1, 2 if rank == 0 else 3)), name="w").result(10.0)

    ranks.each(body)


def test_a_cached_tensor_may_change_its_shape_if_all_agree(ranks):
    def body(rank):
        for length in (4, 4, 4, 7, 7, 4):
            assert coordd.allreduce(np.ones(length), name="changing", op=ReduceOp.SUM).tolist() == [3.0] * length
        with pytest.raises(MismatchError, match="shape"):
            coordd.allreduce(np.ones(4 + (rank == 1)), name="changing")
        assert coordd.allreduce(np.ones(4), name="changing", op=ReduceOp.SUM).tolist() == [3.0] * 4

    ranks.each(body)


@pytest.mark.parametrize(
    ("dtype", "op", "scaled", "why"),
    [
        (np.int32, ReduceOp.AVERAGE, False, "an average of integers would be truncated: use Sum"),
        (np.uint8, ReduceOp.SUM, True, "factors would be truncated"),
        (bool, ReduceOp.SUM, False, "use Max for 'any', Min for 'all'"),
        (bool, ReduceOp.AVERAGE, False, "use Max for 'any', Min for 'all'"),
        (np.complex64, ReduceOp.MAX, False, "complex numbers have no order"),
        (ml_dtypes.float8_e4m3fn, ReduceOp.SUM, False, "reduce in bfloat16 and convert"),
        ("datetime64[s]", ReduceOp.MAX, False, "use a numeric type"),
    ],
)
def test_reductions_without_a_meaning_are_refused_where_they_are_asked_for(dtype, op, scaled, why):
    with pytest.raises(ArgumentError, match=rf"Tensor type \w+\S* is not supported for {op.name.lower()}: .*{why}"):
        check_reducible(np.dtype(dtype), op, scaled=scaled)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64, np.complex128])
def test_inexact_numbers_can_be_averaged_and_scaled(dtype):
    check_reducible(np.dtype(dtype), ReduceOp.AVERAGE, scaled=True)


BAD_CALLS = {
    "a name has 1 to 1024 bytes; this one has 1025": lambda ops: ops.allreduce(np.ones(1), name="n" * 1025),
    "a name has 1 to 1024 bytes; this one has 0": lambda ops: ops.allreduce(np.ones(1), name=""),
    "a name is a string, not 7": lambda ops: ops.allgather(np.ones(1), name=7),
    "cannot be written in UTF-8": lambda ops: ops.allgather(np.ones(1), name="\ud800"),
    "invalid root rank 3 for provided process set: members are (0, 1, 2)": lambda ops: ops.broadcast(np.ones(1), 3),
    "invalid root rank -1": lambda ops: ops.broadcast(np.ones(1), -1),
    "tried to ALLGATHER a rank-zero tensor (x)": lambda ops: ops.allgather(np.ones(()), name="x"),
    "dtype('O') cannot travel": lambda ops: ops.allgather(np.array([{}])),
    "dtype('>f4') cannot travel": lambda ops: ops.allreduce(np.ones(2, ">f4")),
    "there is no rank 3 in a world of 3": lambda ops: ops.send(np.ones(1), 3, name="x"),
    "there is no rank -1 in a world of 3": lambda ops: ops.recv(None, -1, name="x"),
    "has ranks that do not exist in a world of 3": lambda ops: ops.allgather(
        np.ones(1), process_set=ProcessSet([0, 9])
    ),
}


@pytest.mark.parametrize("text", BAD_CALLS)
def test_bad_calls_are_refused_at_once_on_the_rank_that_makes_them(ranks, text):
    def body(rank):
        if rank == 1:
            with pytest.raises(ArgumentError, match=re.escape(text)):
                BAD_CALLS[text](api.operations())
        return coordd.allgather([rank], name="afterwards").tolist()

    assert ranks.each(body) == [[0, 1, 2]] * 3


def test_who_is_not_a_member_is_told_and_stays_in_step(ranks):
    def body(rank):
        if rank == 1:
            with pytest.raises(ArgumentError, match="Rank 1 is not a member of the provided process set"):
                coordd.allreduce(np.ones(1), process_set=ProcessSet([0, 2]))
        else:
            coordd.allreduce(np.ones(1), process_set=ProcessSet([0, 2]))
        return coordd.allreduce(np.array([float(rank)])).tolist()

    assert ranks.each(body) == [[1.0]] * 3


def test_numbers_of_numpy_are_as_good_as_pythons(ranks):
    """Messages carry Python's own, whatever the caller gave."""

    def body(rank):
        ops = api.operations()
        details = {"prescale": np.float32(2), "postscale": np.int64(3), "name": np.str_("x"), "op": 1}
        assert ops.allreduce(np.ones(1), **details).result(10.0).tolist() == [18.0]
        assert ops.broadcast(np.array([rank]), np.int64(2)).result(10.0).tolist() == [2]
        ops.send(np.array([rank]), np.int8((rank + 1) % 3), name="ring")
        return ops.recv(None, np.uint8((rank - 1) % 3), name="ring").result(10.0).tolist()

    assert ranks.each(body) == [[2], [0], [1]]


def test_requests_can_be_written_for_the_wire():
    def body(rank):
        ops, array = api.operations(), np.ones((2, 3))
        requests = [
            ops.request(Kind.ALLREDUCE, np.str_("x"), array, ProcessSet(np.arange(1))),
            ops.request(Kind.BROADCAST, None, array, global_process_set, root=0),
        ]
        report = Report(0, fresh=tuple(Announcement(request) for request in requests))
        assert decode(encode(report)) == report

    each_rank(2, lambda rank: body(rank) if rank == 0 else None)


def test_unnamed_operations_count_for_each_process_set_alone():
    def body(rank):
        ops, array = api.operations(), np.ones(1)
        sets = [global_process_set, ProcessSet([0, 2]), ProcessSet([0, 1]), global_process_set, ProcessSet([0, 2])]
        return [
            ops.request(Kind.ALLREDUCE, None, array, which).name for which in sets if rank in (which.ranks or (0, 1, 2))
        ]

    names, second, _ = each_rank(3, body)
    assert len(set(names)) == 5
    assert second == [names[0], names[2], names[3]]


def test_a_name_may_be_long_and_of_any_letters(ranks):
    names = ["n" * 1024, "✓ Größe", "a\nb\0c", "\N{PILE OF POO}" * 256]

    def body(rank):
        handles = [api.operations().allreduce(np.ones(1), name=name) for name in names[:: 1 if rank else -1]]
        assert [handle.result(10.0).tolist() for handle in handles] == [[1.0]] * 4
        for name in names:
            api.operations().send(np.array([rank]), rank, name=name)
            assert api.operations().recv(None, rank, name=name).result(10.0).tolist() == [rank]

    ranks.each(body)


REFUSED = {
    "allreduce": lambda ops: ops.allreduce(np.ones(2, bool)),
    "a factor": lambda ops: ops.allreduce(np.ones(2), prescale=np.nan),
    "broadcast": lambda ops: ops.broadcast(np.ones(2), 7),
    "allgather": lambda ops: ops.allgather(np.ones(())),
    "alltoall": lambda ops: ops.alltoall(np.ones(2), [9, 9, 9]),
    "reducescatter": lambda ops: ops.reducescatter(np.ones(())),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_an_operation_that_one_rank_refuses_is_not_paired_with_its_next_one(ranks, refused):
    kind = refused if refused != "a factor" else "allreduce"
    usual = {
        "allreduce": lambda ops, x: ops.allreduce(x, op=ReduceOp.SUM),
        "broadcast": lambda ops, x: ops.broadcast(x, 0),
        "allgather": lambda ops, x: ops.allgather(x),
        "alltoall": lambda ops, x: ops.alltoall(x),
        "reducescatter": lambda ops, x: ops.reducescatter(x, op=ReduceOp.SUM),
    }[kind]

    def body(rank):
        ops = api.operations()
        if rank == 1:
            with pytest.raises(ArgumentError):
                REFUSED[refused](ops)
        else:
            first = usual(ops, np.full(3, 100.0))  # rank 1 never takes part
        second = usual(ops, np.full(3, float(rank))).result()
        assert second.max() < 100
        return None if rank == 1 else type(first.error())

    assert ranks.each(body) == [RefusedError, None, RefusedError]


def test_an_array_that_cannot_be_changed_is_refused():
    def body(rank):
        fixed = np.ones(3)
        fixed.flags.writeable = False
        for start in (lambda: api.operations().allreduce(fixed), lambda: api.operations().broadcast(fixed, 0)):
            with pytest.raises(ArgumentError, match="read-only"):
                start()
        return api.operations().allgather(fixed).result().shape

    assert each_rank(2, body) == [(6,)] * 2


def test_structured_types_differ_by_their_fields():
    """NumPy's name of such a type says only how large it is."""
    kinds = [np.dtype([("a", "i4"), ("b", "f8")]), np.dtype([("b", "f8"), ("a", "i4")])]

    def body(rank):
        with pytest.raises(MismatchError, match="Mismatched data types"):
            api.operations().allgather(np.ones(1, kinds[rank]), name="other").result()
        found = api.operations().allgather(np.array([(rank, 1.5)], kinds[0]), name="same").result()
        api.operations().broadcast(np.zeros(2, kinds[1]), 0, name="sent").result()
        return found.tolist()

    assert each_rank(2, body) == [[(0, 1.5), (1, 1.5)]] * 2
