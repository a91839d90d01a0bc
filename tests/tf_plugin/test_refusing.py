"""What one rank refuses in TensorFlow, at once and in a graph, is heard by the others; ranks are threads.

Each `LocalRanks.each` counts calls and operations anew, so what was refused must be over on all ranks before the next:
a test ends with something that all of them complete.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install 'coordd[tensorflow]'")
import tensorflow as tf

import coordd.tensorflow as cd
from coordd import api
from tests.local_ranks import local_ranks

ONE = tf.ones(4)
BAD = tf.constant([True, False])
VARIABLES = [tf.Variable(ONE) for _ in range(2)]
SOME, OTHER = ([variable] for variable in VARIABLES)
"""Two lists of a variable, for ranks are threads, and each has variables of its own."""


def slices(values=((1.0, 1.0),), indices=(0,), dtype=None):
    return tf.IndexedSlices(tf.constant(values, dtype), tf.constant(indices), tf.constant([3, len(values[0])]))


SLICES = slices()
INTEGERS = slices(((1, 1),))

CALLS = {
    "allreduce": (lambda n: cd.allreduce(ONE, name=n), lambda n: cd.allreduce(BAD, name=n)),
    "no tensor": (lambda n: cd.allreduce(ONE, name=n), lambda n: cd.allreduce(None, name=n)),
    "no argument": (lambda n: cd.allreduce(ONE, name=n), lambda n: cd.allreduce(name=n)),
    "an unknown argument": (lambda n: cd.allreduce(ONE, name=n), lambda n: cd.allreduce(ONE, name=n, bogus=1)),
    "no set": (lambda n: cd.allreduce(ONE, name=n), lambda n: cd.allreduce(ONE, name=n, process_set=None)),
    "two reductions": (lambda n: cd.allreduce(ONE, name=n), lambda n: cd.allreduce(ONE, True, op=cd.Sum, name=n)),
    "no compression": (lambda n: cd.allreduce(ONE, name=n), lambda n: cd.allreduce(ONE, compression=7, name=n)),
    "grouped": (
        lambda n: cd.grouped_allreduce([ONE, ONE], name=n),
        lambda n: cd.grouped_allreduce([ONE, BAD], name=n),
    ),
    "grouped, with nothing": (
        lambda n: cd.grouped_allreduce([ONE, ONE], name=n),
        lambda n: cd.grouped_allreduce([ONE, None], name=n),
    ),
    "no group": (lambda n: cd.grouped_allreduce([ONE], name=n), lambda n: cd.grouped_allreduce(None, name=n)),
    "grouped slices": (
        lambda n: cd.grouped_allreduce([SLICES, ONE], name=n),
        lambda n: cd.grouped_allreduce([slices(((1.0, 1.0),), (0, 1)), ONE], name=n),
    ),
    "grouped, after slices": (
        lambda n: cd.grouped_allreduce([SLICES, ONE], name=n),
        lambda n: cd.grouped_allreduce([SLICES, object()], name=n),
    ),
    "slices, reduction": (lambda n: cd.allreduce(SLICES, name=n), lambda n: cd.allreduce(SLICES, op=cd.Max, name=n)),
    "slices, factor": (
        lambda n: cd.allreduce(SLICES, name=n),
        lambda n: cd.allreduce(SLICES, prescale_factor=2.0, name=n),
    ),
    "slices, lengths": (
        lambda n: cd.allreduce(SLICES, name=n),
        lambda n: cd.allreduce(slices(((1.0, 1.0),), (0, 1)), name=n),
    ),
    "slices, a scalar": (
        lambda n: cd.allreduce(SLICES, name=n),
        lambda n: cd.allreduce(tf.IndexedSlices(tf.constant(1.0), tf.constant(0)), name=n),
    ),
    "slices, indices": (
        lambda n: cd.allreduce(SLICES, name=n),
        lambda n: cd.allreduce(slices(((1.0, 1.0),), (0.0,)), name=n),
    ),
    "slices, averages of integers": (
        lambda n: cd.allreduce(SLICES, name=n),
        lambda n: cd.allreduce(INTEGERS, name=n),
    ),
    "slices, set": (lambda n: cd.allreduce(SLICES, name=n), lambda n: cd.allreduce(SLICES, name=n, process_set="all")),
    "allgather": (lambda n: cd.allgather(ONE, name=n), lambda n: cd.allgather(tf.constant(1.0), name=n)),
    "no group to gather": (lambda n: cd.grouped_allgather([ONE], name=n), lambda n: cd.grouped_allgather(7, name=n)),
    "broadcast": (lambda n: cd.broadcast(ONE, 0, name=n), lambda n: cd.broadcast(ONE, 7, name=n)),
    "broadcast in place": (lambda n: cd.broadcast_(SOME, 0, name=n), lambda n: cd.broadcast_(OTHER, 7, name=n)),
    "broadcast into nothing": (lambda n: cd.broadcast_(SOME, 0, name=n), lambda n: cd.broadcast_(None, 0, name=n)),
    "broadcast into a tensor": (lambda n: cd.broadcast_(SOME, 0, name=n), lambda n: cd.broadcast_([ONE], 0, name=n)),
    "alltoall": (lambda n: cd.alltoall(ONE, name=n), lambda n: cd.alltoall(ONE, [9, 9], name=n)),
    "splits of text": (lambda n: cd.alltoall(ONE, [2, 2], name=n), lambda n: cd.alltoall(ONE, ["a", "b"], name=n)),
    "splits of floats": (lambda n: cd.alltoall(ONE, [2, 2], name=n), lambda n: cd.alltoall(ONE, [2.0, 2.0], name=n)),
    "reducescatter": (lambda n: cd.reducescatter(ONE, name=n), lambda n: cd.reducescatter(ONE, op=cd.Adasum, name=n)),
    "no group to scatter": (
        lambda n: cd.grouped_reducescatter([ONE], name=n),
        lambda n: cd.grouped_reducescatter(None, name=n),
    ),
}
NOT_NAMED = {
    "barrier": (cd.barrier, lambda: cd.barrier(bogus=1)),
    "variables": (lambda: cd.broadcast_variables(SOME, 0), lambda: cd.broadcast_variables(OTHER, 7)),
    "no variables": (lambda: cd.broadcast_variables(SOME, 0), lambda: cd.broadcast_variables(None, 0)),
    "variables that are none": (lambda: cd.broadcast_variables(SOME, 0), lambda: cd.broadcast_variables([ONE], 0)),
    "variables without a root": (lambda: cd.broadcast_variables(SOME, 0), lambda: cd.broadcast_variables(OTHER)),
    "variables in no set": (
        lambda: cd.broadcast_variables(SOME, 0),
        lambda: cd.broadcast_variables(OTHER, 0, process_set="all"),
    ),
}
AT_ONCE = {
    "an object": (lambda: cd.broadcast_object(1), lambda: cd.broadcast_object(1, bogus=1)),
    "objects": (lambda: cd.allgather_object(1), lambda: cd.allgather_object(1, bogus=1)),
}


@pytest.fixture(scope="module")
def two():
    with local_ranks(2) as ranks:
        yield ranks


def heard(ranks, good, bad):
    """Checks that rank 0 hears of what rank 1 refuses, and that what comes next is paired rightly."""
    both = threading.Barrier(2)

    def body(rank):
        wanted = "rank 1 refused" if rank == 0 else r"."
        with pytest.raises(Exception, match=wanted) as caught:  # also Python's own, such as of a wrong keyword
            (bad if rank else good)()
        both.wait(15)
        told = f"{caught.value}" if rank == 0 else ""
        sums = cd.allreduce(np.full(2, float(rank)), op=cd.Sum).numpy().tolist()
        rows = cd.allgather(tf.constant([rank])).numpy().tolist()
        root = cd.broadcast(tf.constant([rank + 7]), 0).numpy().tolist()
        return told, sums, rows, root, cd.allreduce(ONE, name="a").numpy()[0]

    results = ranks.each(body)
    assert [result[1:] for result in results] == [([1.0, 1.0], [0, 1], [7], 1.0)] * 2
    return results[0][0]


@pytest.mark.parametrize("way", ["at once", "graph"])
@pytest.mark.parametrize("name", ["a", None])
@pytest.mark.parametrize("what", CALLS)
def test_whatever_is_refused_is_heard_by_all_who_wait_for_it(two, what, name, way):
    def one(call):
        return lambda: tf.function(call, autograph=False)(name) if way == "graph" else call(name)

    told = heard(two, *map(one, CALLS[what]))
    assert "test_refusing.py" in told  # the script's line, whatever lies between


@pytest.mark.parametrize("way", ["at once", "graph"])
@pytest.mark.parametrize("what", NOT_NAMED)
def test_what_is_refused_without_a_name_is_heard(two, what, way):
    good, bad = NOT_NAMED[what]
    graph = way == "graph"
    heard(two, *(tf.function(call, autograph=False) if graph else call for call in (good, bad)))


@pytest.mark.parametrize("what", AT_ONCE)
def test_wrong_keywords_of_objects_are_heard(two, what):
    heard(two, *AT_ONCE[what])


DIFFERENT = {
    "reductions of slices": (
        lambda n: cd.allreduce(SLICES, name=n),
        lambda n: cd.allreduce(SLICES, op=cd.Sum, name=n),
        "reduction of",
    ),
    "slices and a dense tensor": (
        lambda n: cd.allreduce(SLICES, name=n),
        lambda n: cd.allreduce(tf.ones([3, 2]), name=n),
        "operation of",
    ),
    "widths of slices": (
        lambda n: cd.allreduce(SLICES, name=n),
        lambda n: cd.allreduce(slices(((1.0,) * 5,)), name=n),
        "shape of",
    ),
    "types of slices": (
        lambda n: cd.allreduce(SLICES, name=n),
        lambda n: cd.allreduce(slices(dtype=tf.float64), name=n),
        "dtype of",
    ),
    "types of indices": (
        lambda n: cd.allreduce(SLICES, name=n),
        lambda n: cd.allreduce(slices(indices=np.array([0], np.int64)), name=n),
        "dtype of",
    ),
    "slices in other places of a group": (
        lambda n: cd.grouped_allreduce([SLICES, ONE], name=n),
        lambda n: cd.grouped_allreduce([SLICES, SLICES], name=n),
        "operation of",
    ),
}


@pytest.mark.parametrize("way", ["at once", "graph"])
@pytest.mark.parametrize("name", ["a", None])
@pytest.mark.parametrize("what", DIFFERENT)
def test_slices_that_do_not_belong_together_are_told_to_all(two, what, name, way):
    *calls, problem = DIFFERENT[what]

    def body(rank):
        call = tf.function(calls[rank], autograph=False) if way == "graph" else calls[rank]
        with pytest.raises((cd.MismatchError, tf.errors.OpError), match=f"ranks disagree on the {problem}"):
            call(name)
        cd.barrier()
        return cd.allreduce(SLICES, name="a").values.numpy().tolist(), cd.allreduce(ONE).numpy()[0]

    assert two.each(body) == [([[0.5, 0.5]] * 2, 1.0)] * 2


def test_slices_have_gradients_and_keep_their_types(two):
    def body(rank):
        values = tf.Variable(tf.fill([rank + 1, 2], rank + 1.0))
        indices = tf.range(rank + 1, dtype=tf.int64)

        def step():
            with tf.GradientTape() as tape:
                found = cd.allreduce(tf.IndexedSlices(values, indices), op=cd.Sum, name="there")
                loss = tf.reduce_sum(found.values) * (rank + 1.0)
            return found.values, found.indices, tape.gradient(loss, values)

        results = []
        for way in (step, tf.function(step)):
            joined, where, gradient = way()
            assert where.dtype == tf.int64
            results.append((joined.numpy()[:, 0].tolist(), where.numpy().tolist(), gradient.numpy().tolist()))
        return results

    expected = [([1.0, 2.0, 2.0], [0, 0, 1], [[1.5, 1.5]] * (rank + 1)) for rank in range(2)]
    assert two.each(body) == [[result] * 2 for result in expected]


@pytest.mark.parametrize("way", ["at once", "graph"])
def test_gradients_that_are_slices_on_some_ranks_only_are_told_to_all(two, way):
    def body(rank):
        table, weight = tf.Variable(tf.ones([3, 2]), name="table"), tf.Variable(tf.ones(2), name="weight")

        def step():
            with tf.GradientTape() as tape:
                rows = tf.gather(table, [0]) if rank else table * 2.0
                loss = tf.reduce_sum(rows * weight)
            return cd.DistributedGradientTape(tape).gradient(loss, [table, weight])

        with pytest.raises((cd.CoorddError, tf.errors.OpError), match="different parameters to DistributedOptimizer"):
            (tf.function(step, autograph=False) if way == "graph" else step)()
        cd.barrier()
        return cd.allreduce(ONE).numpy()[0]

    assert two.each(body) == [1.0] * 2


def test_sums_of_integers_stay_integers(two):
    def body(_):
        return cd.allreduce(INTEGERS, op=cd.Sum).values.dtype

    assert two.each(body) == [tf.int32] * 2


GROUPS = {"allreduce": cd.grouped_allreduce, "allgather": cd.grouped_allgather, "scatter": cd.grouped_reducescatter}


@pytest.mark.parametrize("way", ["at once", "graph"])
@pytest.mark.parametrize("what", GROUPS)
def test_a_group_of_nothing_takes_a_number(two, what, way):
    def body(rank):
        def group(tensors, name=None):
            call = tf.function(lambda: GROUPS[what](tensors, name=name), autograph=False) if way == "graph" else None
            return call() if call is not None else GROUPS[what](tensors, name=name)

        assert [*group([])] == [*group([], "named")] == []
        if rank:
            with pytest.raises((cd.RefusedError, tf.errors.OpError), match=r"rank 0 refused .* list of tensors"):
                group([ONE])
        else:
            assert not [*group([])]
        cd.barrier()
        return [each.numpy()[0] for each in group((ONE, ONE))], cd.allreduce(ONE).numpy()[0]

    assert two.each(body) == [([1.0, 1.0], 1.0)] * 2


def test_a_group_may_come_from_a_generator_or_be_the_rows_of_a_tensor(two):
    def body(_):
        rows = tf.ones([2, 3])
        each = cd.grouped_allreduce((row for row in rows), op=cd.Sum)
        whole = tf.function(lambda: cd.grouped_allreduce(rows, op=cd.Sum))()
        return [part.numpy().tolist() for part in (*each, *whole)]

    assert two.each(body) == [[[2.0] * 3] * 4] * 2


def test_lists_of_variables_of_which_one_is_empty_are_told_to_all(two):
    def body(rank):
        with pytest.raises(cd.MismatchError, match="different parameters to broadcast_variables"):
            cd.broadcast_variables(SOME if rank else [], 0)
        return cd.allreduce(ONE).numpy()[0]

    assert two.each(body) == [1.0] * 2


@pytest.mark.parametrize("dtype", [tf.uint8, tf.int32, tf.int64, tf.uint64])
@pytest.mark.parametrize("way", ["at once", "graph"])
def test_splits_keep_their_type(two, dtype, way):
    def body(rank):
        splits = tf.constant([1, 3] if rank == 0 else [2, 0], dtype)

        def give():
            return cd.alltoall(tf.range(4) + 10 * rank, splits, name="splits")

        rows, received = tf.function(give)() if way == "graph" else give()
        assert received.dtype == dtype
        return rows.numpy().tolist(), received.numpy().tolist()

    assert two.each(body) == [([0, 10, 11], [1, 2]), ([1, 2, 3], [3, 0])]


def test_questions_are_asked_when_the_graph_runs(two):
    def body(rank):
        own = cd.ProcessSet([rank])

        @tf.function
        def ask():
            ranks = [cd.rank_op(), cd.local_rank_op(name="place")]
            sizes = [cd.size_op(), cd.local_size_op(), cd.size_op(own.process_set_id), cd.size_op(own)]
            included = [cd.process_set_included_op(each) for each in (0, "all", "0", "1", "0,1")]
            return tf.stack([*ranks, *sizes, *included])

        found = ask()
        assert found.dtype == tf.int32
        for unknown in ("a", None, 7, [0], "0,0", "-1"):
            with pytest.raises(cd.ArgumentError):
                cd.size_op(unknown)
        for absent in ("0,9", cd.ProcessSet([9])):
            with pytest.raises(cd.ArgumentError, match="does not exist"):
                cd.process_set_included_op(absent)
        return found.numpy().tolist()

    assert two.each(body) == [[rank, rank, 2, 2, 1, 1, 1, 1, 1 - rank, rank, 1] for rank in range(2)]


def test_a_refused_group_names_the_line_of_the_script(two):
    def body(rank):
        found = []
        for group in (lambda: cd.grouped_allreduce([ONE, BAD if rank else ONE], name="a"),):
            for call in (group, tf.function(group, autograph=False)):
                with pytest.raises((cd.CoorddError, tf.errors.OpError)) as caught:
                    call()
                found.append(str(caught.value))
                cd.barrier()
        return found

    for told in two.each(body)[0]:
        assert "contextlib" not in told
        assert "test_refusing.py" in told


def test_a_set_of_some_ranks_hears_of_its_own_refusals_only():
    with local_ranks(3) as three:

        def body(rank):
            some = cd.ProcessSet([0, 2])
            if rank == 1:
                return cd.allreduce(ONE, name="all").numpy()[0]
            wanted = "rank 2 refused" if rank == 0 else r"."
            for call in (lambda: cd.allreduce(SLICES, op=cd.Max if rank else cd.Sum, process_set=some),):
                for way in (call, tf.function(call, autograph=False)):
                    with pytest.raises((cd.CoorddError, tf.errors.OpError), match=wanted):
                        way()
            with pytest.raises((cd.CoorddError, TypeError), match=wanted):
                cd.broadcast_variables(SOME, 0 if rank == 0 else 1, process_set=some)
            assert cd.allreduce(SLICES, op=cd.Sum, process_set=some).values.shape == (2, 2)
            return cd.allreduce(ONE, name="all").numpy()[0]

        assert three.each(body) == [1.0] * 3


def test_nothing_is_left_in_flight(two):
    for daemon in two.daemons:
        assert not [entry.request.name for entry in daemon.status.parts.member.table]
    assert api.__name__ == "coordd.api"
