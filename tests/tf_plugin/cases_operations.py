"""Every operation, at once and in a graph: values, gradients, errors."""

import tempfile
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import coordd.tensorflow as cd
from tests.mpi.cases import ranks
from tests.tf_plugin.reference import DTYPES, FLOATS, everyones, graph, mine, reduced, ways

EXACT = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 1e-6, "complex64": 1e-6}


def close(found: tf.Tensor, expected: np.ndarray) -> None:
    assert found.dtype.name == expected.dtype.name
    assert found.shape == expected.shape
    wide = "complex128" if expected.dtype.kind == "c" else "float64"
    exact = EXACT.get(expected.dtype.name, 1e-12)
    np.testing.assert_allclose(found.numpy().astype(wide), expected.astype(wide), rtol=exact, atol=exact)


def operations_of(dtype: str) -> list[cd.Sum]:
    found = [cd.Product]
    found += [] if dtype.startswith("complex") else [cd.Min, cd.Max]
    found += [] if dtype == "bool" else [cd.Sum]
    return found + ([cd.Average] if dtype.startswith(("float", "bfloat", "complex")) else [])


@ranks(1, 2, 4)
def case_allreduce_of_every_type_and_operation() -> None:
    for dtype in DTYPES:
        for op in operations_of(dtype):
            for reduce in ways(lambda tensor, op=op: cd.allreduce(tensor, op=op)):
                tensor = mine(dtype)
                close(reduce(tensor), reduced(everyones(dtype), op))
                assert np.array_equal(tensor.numpy(), mine(dtype).numpy())


def case_allreduce_of_any_shape() -> None:
    for shape in [(), (0,), (3, 0), (1000, 33)]:
        for reduce in ways(lambda tensor: cd.allreduce(tensor, op=cd.Sum, name="shaped")):
            close(reduce(mine(shape=shape)), reduced(everyones(shape=shape)))


def case_factors_and_compression() -> None:
    scale = {"prescale_factor": 0.5, "postscale_factor": 3.0}
    for reduce in ways(lambda tensor: cd.allreduce(tensor, op=cd.Sum, **scale)):
        close(reduce(mine("float64")), reduced(everyones("float64")) * 1.5)
    for compression, small in [(cd.Compression.fp16, "float16"), (cd.Compression.bf16, "bfloat16")]:
        for reduce in ways(lambda tensor, how=compression: cd.allreduce(tensor, compression=how)):
            found = reduce(mine())
            assert found.dtype == tf.float32
            expected = reduced([array.astype(cd_type(small)) for array in everyones()], cd.Average)
            np.testing.assert_allclose(found.numpy(), expected.astype("float32"), rtol=1e-2, atol=1e-2)


def cd_type(name: str) -> np.dtype:
    return tf.as_dtype(name).as_numpy_dtype


@ranks(1, 2, 4)
def case_allreduce_sends_the_same_reduction_of_gradients_back() -> None:
    def gradient(tensor: tf.Tensor, op: object) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            loss = tf.reduce_sum(cd.allreduce(tensor, op=op, name="there") * (cd.rank() + 1.0))
        return tape.gradient(loss, tensor)

    total = sum(range(1, cd.size() + 1))
    for op, expected in [(cd.Sum, total), (cd.Average, total / cd.size())]:
        for run in ways(lambda tensor, op=op: gradient(tensor, op)):
            close(run(mine()), np.full((5, 3), expected, "float32"))


def case_what_is_not_linear_has_no_gradient() -> None:
    def gradient(tensor: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            loss = tf.reduce_sum(cd.allreduce(tensor, op=cd.Max))
        return tape.gradient(loss, tensor)

    for run in ways(gradient):
        with pytest.raises(cd.ArgumentError, match="Max has no gradient here"):
            run(mine())


@ranks(1, 2, 4)
def case_grouped_allreduce() -> None:
    for reduce in ways(lambda *tensors: cd.grouped_allreduce(tensors, op=cd.Sum, name="group")):
        found = reduce(mine(seed=1), mine("float64", (2,), seed=2), mine("int32", (), seed=3))
        close(found[0], reduced(everyones(seed=1)))
        close(found[1], reduced(everyones("float64", (2,), seed=2)))
        close(found[2], reduced(everyones("int32", (), seed=3)))


@ranks(1, 2, 4)
def case_slices_are_joined() -> None:
    def slices(rank: int) -> tf.IndexedSlices:
        values = tf.fill([rank + 1, 2], rank + 1.0)
        return tf.IndexedSlices(values, tf.range(rank + 1), dense_shape=tf.constant([10, 2]))

    expected = sum(tf.convert_to_tensor(slices(rank)).numpy() for rank in range(cd.size()))
    for op, divisor in [(cd.Sum, 1), (cd.Average, cd.size())]:
        for reduce in ways(lambda op=op: cd.allreduce(slices(cd.rank()), op=op, name="slices")):
            found = reduce()
            assert isinstance(found, tf.IndexedSlices)
            assert len(found.indices) == sum(range(1, cd.size() + 1))
            np.testing.assert_allclose(tf.convert_to_tensor(found).numpy(), expected / divisor, rtol=1e-6)
    mixed = cd.grouped_allreduce([slices(cd.rank()), mine()], op=cd.Sum, name="mixed")
    assert tuple(mixed[0].dense_shape) == (10, 2)
    close(mixed[1], reduced(everyones()))
    with pytest.raises(cd.ArgumentError, match="Max of tf"):
        cd.allreduce(slices(0), op=cd.Max)


@ranks(1, 2, 4)
def case_allgather_joins_different_numbers_of_rows() -> None:
    for dtype in DTYPES:
        parts = [array[: rank + 1] for rank, array in enumerate(everyones(dtype))]
        for gather in ways(lambda tensor: cd.allgather(tensor, name="rows")):
            close(gather(tf.constant(parts[cd.rank()])), np.concatenate(parts))


@ranks(1, 2, 4)
def case_allgather_sends_average_gradients_of_own_rows_back() -> None:
    def gradient(tensor: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            rows = cd.allgather(tensor, name="there")
            weights = tf.cast(tf.range(tf.shape(rows)[0]), tf.float32)[:, None] * (cd.rank() + 1.0)
            loss = tf.reduce_sum(rows * weights)
        return tape.gradient(loss, tensor)

    start = sum(range(1, cd.rank() + 1))
    average = sum(range(1, cd.size() + 1)) / cd.size()
    expected = np.repeat(np.arange(start, start + cd.rank() + 1)[:, None] * average, 3, axis=1).astype("float32")
    for run in ways(gradient):
        close(run(mine()[: cd.rank() + 1]), expected)


@ranks(1, 2, 4)
def case_grouped_allgather() -> None:
    for gather in ways(lambda *tensors: cd.grouped_allgather(tensors, name="both")):
        first, second = gather(mine(seed=1), mine("int64", (2,), seed=2))
        close(first, np.concatenate(everyones(seed=1)))
        close(second, np.concatenate(everyones("int64", (2,), seed=2)))


@ranks(1, 2, 4)
def case_broadcast_from_every_root() -> None:
    for root in range(cd.size()):
        for dtype in DTYPES:
            for copy in ways(lambda tensor, root=root: cd.broadcast(tensor, root)):
                close(copy(mine(dtype)), everyones(dtype)[root])
    with pytest.raises(cd.ArgumentError, match="invalid root rank"):
        cd.broadcast(mine(), cd.size())


@ranks(1, 2, 4)
def case_broadcast_sends_gradients_to_the_root() -> None:
    root = cd.size() - 1

    def gradient(tensor: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            loss = tf.reduce_sum(cd.broadcast(tensor, root) * (cd.rank() + 1.0))
        return tape.gradient(loss, tensor)

    average = sum(range(1, cd.size() + 1)) / cd.size()
    for run in ways(gradient):
        close(run(mine()), np.full((5, 3), average if cd.rank() == root else 0.0, "float32"))


@ranks(1, 2, 4)
def case_broadcast_into_variables() -> None:
    for seed, copy in enumerate(ways(lambda: None)):
        variables = [tf.Variable(mine(seed=seed)), tf.Variable(mine("int64", (2,), seed=seed))]
        if copy() is None and seed == 0:
            cd.broadcast_(variables, 0)
        else:
            tf.function(lambda held=variables: [tensor + 0 for tensor in cd.broadcast_(held, 0)])()
        assert np.array_equal(variables[0].numpy(), everyones(seed=seed)[0])
        assert np.array_equal(variables[1].numpy(), everyones("int64", (2,), seed=seed)[0])


@ranks(1, 2, 4)
def case_alltoall_gives_each_rank_its_rows() -> None:
    size, rank = cd.size(), cd.rank()
    whole = [np.arange(size * 2, dtype="float32") + 100 * each for each in range(size)]
    for give in ways(cd.alltoall):
        close(give(tf.constant(whole[rank])), np.concatenate([array[2 * rank : 2 * rank + 2] for array in whole]))

    splits = [[(source + target) % 3 for target in range(size)] for source in range(size)]
    rows = [np.arange(sum(each), dtype="float32") + 100 * source for source, each in enumerate(splits)]
    expected = [array[sum(each[:rank]) : sum(each[: rank + 1])] for array, each in zip(rows, splits, strict=True)]
    for give in ways(lambda tensor, wanted: cd.alltoall(tensor, wanted, name="uneven")):
        found, received = give(tf.constant(rows[rank]), tf.constant(splits[rank], tf.int32))
        close(found, np.concatenate(expected))
        assert received.dtype == tf.int32
        assert received.numpy().tolist() == [len(part) for part in expected]


@ranks(1, 2, 4)
def case_alltoall_sends_gradients_back_to_where_rows_came_from() -> None:
    size = cd.size()

    def gradient(tensor: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            rows, _ = cd.alltoall(tensor, tf.ones(size, tf.int32), name="there")
            loss = tf.reduce_sum(rows * (cd.rank() + 1.0))
        return tape.gradient(loss, tensor)

    expected = np.array([*range(1, size + 1), 0.0], "float32")  # nobody gets the last row
    for run in ways(gradient):
        close(run(tf.zeros(size + 1)), expected)


@ranks(1, 2, 4)
def case_reducescatter_gives_each_rank_its_rows_of_the_sum() -> None:
    for dtype in ("float32", "bfloat16", "int32", "complex64"):
        for rows in (cd.size() * 2, cd.size() * 2 + 1, 1):
            everything = everyones(dtype, (rows, 2))
            expected = np.array_split(reduced(everything), cd.size())[cd.rank()]
            for scatter in ways(lambda tensor: cd.reducescatter(tensor, op=cd.Sum)):
                close(scatter(mine(dtype, (rows, 2))), expected)
    for scatter in ways(lambda *tensors: cd.grouped_reducescatter(tensors, name="all")):
        found = scatter(mine(shape=(8, 2), seed=1), mine("float64", (9,), seed=2))
        close(found[0], np.array_split(reduced(everyones(shape=(8, 2), seed=1), cd.Average), cd.size())[cd.rank()])
        close(found[1], np.array_split(reduced(everyones("float64", (9,), seed=2), cd.Average), cd.size())[cd.rank()])


@ranks(1, 2, 4)
def case_reducescatter_sends_all_rows_gradients_back() -> None:
    size = cd.size()

    def gradient(tensor: tf.Tensor, op: object) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            loss = tf.reduce_sum(cd.reducescatter(tensor, op=op, name="there", prescale_factor=2.0)) * (cd.rank() + 1.0)
        return tape.gradient(loss, tensor)

    rows = 2 * size + 1
    owners = np.concatenate([[owner + 1.0] * len(part) for owner, part in enumerate(np.array_split(range(rows), size))])
    for op, factor in [(cd.Sum, 2 * size), (cd.Average, 2)]:
        for run in ways(lambda tensor, op=op: gradient(tensor, op)):
            close(run(tf.zeros(rows)), (owners * factor).astype("float32"))


def twice(operation, tensor: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The gradient of the sum of cubes of an operation's result, and the gradient of the sum of its squares."""
    with tf.GradientTape() as outer:
        outer.watch(tensor)
        with tf.GradientTape() as inner:
            inner.watch(tensor)
            value = tf.reduce_sum(operation(tensor) ** 3)
        gradient = inner.gradient(value, tensor)
        penalty = tf.reduce_sum(gradient**2)
    return gradient, outer.gradient(penalty, tensor)


@ranks(1, 2, 4)
def case_operations_have_second_derivatives() -> None:
    """All ranks have equal tensors, so an operation that hands them on is as good as none."""
    size, some = cd.size(), tf.constant([2.0, -1.0, 0.5, 3.0], tf.float64)
    whole = {
        "allreduce": lambda tensor: cd.allreduce(tensor, name="d.reduced"),
        "sum": lambda tensor: cd.allreduce(tensor, op=cd.Sum, postscale_factor=1 / size),
        "group": lambda tensor: cd.grouped_allreduce([tensor, tensor], name="d.group")[0],
        "alltoall": lambda tensor: cd.alltoall(tensor, name="d.alltoall"),
    }
    expected = twice(lambda tensor: tensor, some)
    for operation in whole.values():
        for run in ways(lambda tensor, operation=operation: twice(operation, tensor)):
            for found, wanted in zip(run(some), expected, strict=True):
                close(found, wanted.numpy())


def in_called_graphs(operation) -> list[Any]:
    """An operation in a graph that is called, in a branch and in a loop: its tapes are outside."""

    def branch(tensor: tf.Tensor) -> tf.Tensor:
        return tf.cond(tf.reduce_sum(tensor) > 0, lambda: operation(tensor), lambda: tensor)

    def loop(tensor: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(lambda at, _: at < 2, lambda at, each: (at + 1, operation(each)), (0, tensor))[1]

    return [graph(operation), branch, graph(branch), loop, graph(loop)]


@ranks(2)
def case_operations_in_called_graphs_have_second_derivatives() -> None:
    some = tf.constant([2.0, -1.0, 0.5, 3.0], tf.float64)
    expected = twice(lambda tensor: tensor, some)
    operations = (
        cd.allreduce,
        lambda tensor: cd.grouped_allreduce([tensor, tensor])[1],
        lambda tensor: tf.ensure_shape(cd.alltoall(tensor), tensor.shape),  # which a loop needs to know
    )
    for operation in operations:
        for called in in_called_graphs(operation):
            for run in ways(lambda tensor, called=called: twice(called, tensor)):
                for found, wanted in zip(run(some), expected, strict=True):
                    close(found, wanted.numpy())


@ranks(2)
def case_an_outer_tape_may_ask_for_a_first_derivative_alone() -> None:
    some = tf.constant([2.0, -1.0, 0.5, 3.0], tf.float64)
    for called in in_called_graphs(cd.allreduce):
        with tf.GradientTape() as outer:
            outer.watch(some)
            with tf.GradientTape() as inner:
                inner.watch(some)
                value = tf.reduce_sum(called(some) ** 3)
            inner.gradient(value, some)
        close(outer.gradient(value, some), 3 * some.numpy() ** 2)


@ranks(1, 2, 4)
def case_second_derivatives_follow_the_rules_of_the_first() -> None:
    """The gradient of an allgather is a mean; that of a broadcast is a mean, at the root."""
    size, at_root = cd.size(), float(cd.rank() == 0)
    some = tf.constant(np.arange(1.0, 5.0))
    first, second = 3 * some.numpy() ** 2, 36 * some.numpy() ** 3
    found = [
        (lambda tensor: tf.split(cd.allgather(tensor), size)[0], at_root, at_root / size),
        (lambda tensor: cd.broadcast(tensor, 0), at_root, at_root / size),
        (lambda tensor: cd.reducescatter(tf.concat([tensor] * size, 0)), float(size), float(size) ** 2),
    ]
    for operation, once, again in found:
        for run in ways(lambda tensor, operation=operation: twice(operation, tensor)):
            gradient, penalty = run(some)
            close(gradient, first * once)
            close(penalty, second * again)


@ranks(2)
def case_saved_functions_keep_their_gradients() -> None:
    some = tf.constant([2.0, -1.0, 0.5, 3.0], tf.float64)
    module = tf.Module()
    module.reduced = tf.function(
        lambda tensor: cd.allreduce(tensor) ** 3, input_signature=[tf.TensorSpec(4, tf.float64)]
    )
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, folder)
        loaded = tf.saved_model.load(folder)
        with tf.GradientTape() as tape:
            tape.watch(some)
            value = tf.reduce_sum(loaded.reduced(some))
        close(tape.gradient(value, some), 3 * some.numpy() ** 2)


def case_third_derivatives_are_refused() -> None:
    def thrice(tensor):
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            _, second = twice(lambda each: cd.allreduce(each, name="third"), tensor)
        return tape.gradient(second, tensor)

    with pytest.raises(cd.ArgumentError, match="have no third derivatives here"):
        thrice(tf.constant([1.0, 2.0]))
    with pytest.raises(tf.errors.OpError, match="have no third derivatives here"):
        graph(thrice)(tf.constant([1.0, 2.0]))


@ranks(1, 2, 4)
def case_gradients_of_every_float_type() -> None:
    for dtype in FLOATS:
        with tf.GradientTape() as tape:
            tensor = tf.Variable(mine(dtype))
            loss = tf.reduce_sum(cd.allreduce(tensor, op=cd.Sum))
        close(tape.gradient(loss, tensor), np.full((5, 3), cd.size()).astype(cd_type(dtype)))


@ranks(1, 2, 4)
def case_barrier_and_questions() -> None:
    for ask in ways(lambda: (cd.barrier(), cd.rank_op(), cd.size_op(), cd.local_rank_op(), cd.local_size_op())[1:]):
        found = [int(each) for each in ask()]
        assert found == [cd.rank(), cd.size(), cd.local_rank(), cd.local_size()]
    some = cd.ProcessSet([0])
    assert int(cd.process_set_included_op(some.process_set_id)) == (cd.rank() == 0)
    assert int(cd.process_set_included_op()) == 1
    assert int(cd.size_op(some.process_set_id)) == 1


def case_join_takes_part_with_nothing() -> None:
    if cd.rank() == 0:
        last = cd.join()
    else:
        alone = cd.allreduce(tf.constant([1.0]), op=cd.Sum, name="late")
        assert alone.numpy().tolist() == [cd.size() - 1.0]
        last = int(tf.function(cd.join)())
    assert 0 < last < cd.size()
    close(cd.allreduce(mine(), op=cd.Sum), reduced(everyones()))


@ranks(4)
def case_process_sets_work_side_by_side() -> None:
    mine_ = cd.ProcessSet([0, 2]) if cd.rank() % 2 == 0 else cd.ProcessSet([1, 3])
    for reduce in ways(lambda tensor: cd.allreduce(tensor, op=cd.Sum, process_set=mine_)):
        close(reduce(mine()), reduced([everyones()[rank] for rank in mine_.ranks]))


def case_mistakes_are_told() -> None:
    with pytest.raises(cd.ArgumentError, match="a tensor is wanted, not a object"):
        cd.allreduce(object())
    with pytest.raises(cd.ArgumentError, match="a RaggedTensor cannot travel"):
        cd.allreduce(tf.ragged.constant([[1.0], []]))
    with pytest.raises(cd.ArgumentError, match="rank-zero"):
        cd.allgather(tf.constant(1.0))
    with pytest.raises(cd.ArgumentError, match="an average of integers would be truncated"):
        cd.allreduce(tf.constant([1]))
    with pytest.raises(cd.ArgumentError, match="is no compression"):
        cd.allreduce(mine(), compression="fp16")
    with pytest.warns(DeprecationWarning, match="has been replaced with `op`"):
        cd.allreduce(mine(), average=True)
    with pytest.raises(cd.MismatchError, match=r"shape.*'odd'"):
        cd.allreduce(tf.zeros(3 + cd.rank()), name="odd")
    # The line that has made the graph, as at work there is none.
    with pytest.raises(tf.errors.OpError, match=r"MismatchError: .*shape.*'odd'.*(at \S+reference\.py:\d+.*){2}"):
        graph(lambda: cd.allreduce(tf.zeros(3 + cd.rank()), name="odd"))()


def case_what_xla_compiles_cannot_call_the_daemon() -> None:
    @tf.function(jit_compile=True)
    def compiled(tensor: tf.Tensor) -> tf.Tensor:
        return cd.allreduce(tensor)

    with pytest.raises(cd.ArgumentError, match="set jit_compile=False"):
        compiled(mine())


def case_objects() -> None:
    assert cd.broadcast_object({"epoch": cd.rank()}, 1) == {"epoch": 1}
    assert cd.broadcast_object_fn(1)([cd.rank()]) == [1]
    assert cd.allgather_object(("rank", cd.rank())) == [("rank", rank) for rank in range(cd.size())]
