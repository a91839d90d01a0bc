"""Tapes and what belongs to them: on several ranks as on one with all their batches."""

import gc
import json
import tempfile
import threading
import time
import unittest.mock
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import coordd.tensorflow as cd
from coordd import api
from coordd.errors import NonFiniteError
from coordd.gradients.bucketing import Grouping
from coordd.gradients.reducer import Gradients
from coordd.gradients.settings import Choices
from coordd_tensorflow import graph
from coordd_tensorflow.exchange import Exchange
from coordd_tensorflow.graph import call
from coordd_tensorflow.slices import checked_finite
from tests.mpi.cases import ranks
from tests.tf_plugin.reference import ways


def weights() -> list[tf.Variable]:
    random = np.random.default_rng(0)
    shapes = {"first": (6, 8), "bias": (8,), "second": (8, 3)}
    return [tf.Variable(random.normal(size=shape), name=name) for name, shape in shapes.items()]


def batch(rank: int) -> tuple[tf.Tensor, tf.Tensor]:
    random = np.random.default_rng(rank + 1)
    return tf.constant(random.normal(size=(4, 6))), tf.constant(random.normal(size=(4, 3)))


def loss_of(held: list[tf.Variable], x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    first, bias, second = held
    return tf.reduce_mean(tf.square(tf.tanh(x @ first + bias) @ second - y))


def alone(steps: int) -> list[np.ndarray]:
    """What one process makes of the batches of all ranks."""
    held = weights()
    x, y = (tf.concat(parts, 0) for parts in zip(*map(batch, range(cd.size())), strict=True))
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = loss_of(held, x, y)
        for variable, gradient in zip(held, tape.gradient(loss, held), strict=True):
            variable.assign_sub(0.1 * gradient)
    return [variable.numpy() for variable in held]


@ranks(2)
def case_joined_slices_are_looked_at() -> None:
    slices = tf.IndexedSlices(tf.constant([[1.0, np.nan]]), tf.constant([0]), tf.constant([2, 2]))
    with pytest.raises(NonFiniteError, match="'table' of all ranks is not finite: 1 NaN, 0 infinite"):
        checked_finite(slices, "table", "raise")
    with unittest.mock.patch("coordd_tensorflow.slices.log.warning") as warning:
        assert checked_finite(slices, "table", "warn").values.shape == (1, 2)
    warning.assert_called_once()


@ranks(2)
def case_functions_that_leave_no_thread_to_others_are_warned_of_once() -> None:
    """Three are called, and TensorFlow has two threads."""
    patched = {"_threads": unittest.mock.Mock(return_value=2), "functions_called": unittest.mock.Mock(return_value=3)}
    with unittest.mock.patch.multiple(graph, **patched), unittest.mock.patch.object(graph.log, "warning") as warning:
        waits = graph.Waits()
        with waits.one_more():
            waits.look()
            warning.assert_not_called()
            with waits.one_more():
                patched["functions_called"].return_value = 2
                waits.look()
                warning.assert_not_called()
                patched["functions_called"].return_value = 3
                waits.look()
                waits.look()
                assert warning.call_args.args[1:] == (3, 2)
                warning.assert_called_once()


@ranks(2, deadline=60)
def case_a_model_that_is_gone_leaves_nothing() -> None:
    for way in range(2):
        held = weights()
        gone = [weakref.ref(variable) for variable in held]

        def step(held=held) -> None:
            with tf.GradientTape() as tape:
                loss = loss_of(held, *batch(cd.rank()))
            cd.DistributedGradientTape(tape).gradient(loss, held)

        ways(step)[way]()
        del held, step
        gc.collect()
        assert [variable() for variable in gone] == [None] * 3


def trained(steps: int, way: int, **details) -> list[np.ndarray]:
    held = weights()
    x, y = batch(cd.rank())

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(held, x, y)
        distributed = cd.DistributedGradientTape(tape, **details)
        for variable, gradient in zip(held, distributed.gradient(loss, held), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    run = tf.function(step) if way else step
    for _ in range(steps):
        run(x, y)
    return [variable.numpy() for variable in held]


def same(found: list[np.ndarray], expected: list[np.ndarray], exact: float = 1e-12) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=exact, atol=exact)


@ranks(1, 2, 4)
def case_training_equals_one_process_with_all_batches() -> None:
    for way in (0, 1):
        same(trained(4, way), alone(4))


def case_choices_of_the_tape() -> None:
    for way in (0, 1):
        same(trained(3, way, num_groups=2), alone(3))
        same(trained(3, way, gradient_predivide_factor=2.0), alone(3))
        same(trained(3, way, compression=cd.Compression.fp16), alone(3), exact=1e-2)
    with pytest.raises(cd.ArgumentError, match="not supported with op != Average"):
        cd.DistributedGradientTape(tf.GradientTape(), gradient_predivide_factor=2.0, op=cd.Sum)
    with pytest.raises(cd.ArgumentError, match="not combined by Adasum"):
        cd.DistributedGradientTape(tf.GradientTape(), op=cd.Adasum)


def case_groups_of_variables_travel_together() -> None:
    held = weights()
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = loss_of(held, *batch(cd.rank()))
        found = cd.DistributedGradientTape(tape, groups=[[held[2], held[0]]]).gradient(loss, held)
    with tf.GradientTape() as tape:
        loss = loss_of(held, *(tf.concat(parts, 0) for parts in zip(*map(batch, range(cd.size())), strict=True)))
    same(found, tape.gradient(loss, held))


def case_a_tape_may_be_wrapped_before_it_records() -> None:
    held = weights()
    with cd.DistributedGradientTape(tf.GradientTape(persistent=True)) as tape:
        loss = loss_of(held, *batch(cd.rank()))
    assert isinstance(tape, tf.GradientTape)
    first = tape.gradient(loss, held)
    structured = tape.gradient(loss, {"w": held[0], "rest": (held[1], held[2])})
    same([structured["w"], *structured["rest"]], first)
    same([tape.gradient(loss, held[0])], first[:1])


def case_gradients_that_are_kept_stay_as_they_are() -> None:
    """Memory in which gradients are reduced is used again, but not while somebody has them."""
    held = weights()
    kept = []
    for step in range(4):
        with tf.GradientTape() as tape:
            loss = float(step) * loss_of(held, *batch(cd.rank()))
        kept.append(cd.DistributedGradientTape(tape).gradient(loss, held))
    for step, gradients in enumerate(kept):
        same(gradients, [gradient.numpy() * step for gradient in kept[1]])


def case_a_tape_around_another_one_goes_through_its_reduction() -> None:
    """A penalty on averaged gradients, whose second derivatives are those of one process with all batches."""

    def gradients(held: list[tf.Variable], x: tf.Tensor, y: tf.Tensor, wrap: Any) -> list[tf.Tensor]:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = loss_of(held, x, y)
            first = wrap(inner).gradient(loss, held)
            penalty = sum(tf.reduce_sum(gradient**2) for gradient in first)
        return wrap(outer).gradient(penalty, held)

    everything = [tf.concat(parts, 0) for parts in zip(*map(batch, range(cd.size())), strict=True)]
    held = weights()[:2]  # of the last one the loss is linear
    rest = weights()[2:]
    wanted = gradients([*held, *rest], *everything, lambda tape: tape)
    for way in ways(lambda x, y: gradients([*held, *rest], x, y, cd.DistributedGradientTape)):
        same(way(*batch(cd.rank())), wanted)


def case_a_tape_around_another_one_goes_through_joined_slices() -> None:
    """As through dense gradients: those of one process with the rows of all ranks."""
    table = tf.Variable(np.random.default_rng(3).normal(size=(5, 2)))
    rows = [tf.constant([rank % 5, 2]) for rank in range(cd.size())]

    def penalised(mine: list[tf.Tensor], wrap: Any, op: Any) -> tf.Tensor:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = sum(tf.reduce_sum(tf.gather(table, each) ** 3) for each in mine) / len(mine)
            first = tf.convert_to_tensor(wrap(inner).gradient(loss, table))
            penalty = tf.reduce_sum(first**2)
        found = tf.convert_to_tensor(outer.gradient(penalty, table))
        return found if wrap is plain else cd.allreduce(found, op=op)

    def plain(tape: Any) -> Any:
        return tape

    for op, factor in ((cd.Average, 1), (cd.Sum, cd.size())):  # of a penalty on the sum
        wanted = penalised(rows, plain, op) * factor**2 * (factor if op is cd.Sum else 1)
        for sparse_as_dense in (False, True):

            def wrap(tape: Any, op: Any = op, sparse_as_dense: bool = sparse_as_dense) -> Any:
                return cd.DistributedGradientTape(tape, op=op, sparse_as_dense=sparse_as_dense)

            for way in ways(lambda mine, wrap=wrap, op=op: penalised([mine], wrap, op)):
                same([way(rows[cd.rank()])], [wanted])


def case_second_derivatives_of_complex_variables_are_those_of_one_process() -> None:
    def gradients(held: list[tf.Variable], x: tf.Tensor, wrap: Any) -> list[tf.Tensor]:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_mean(tf.abs(tf.sin(x * held[0]) + held[1] ** 2) ** 2)
            first = wrap(inner).gradient(loss, held)
            penalty = sum(tf.reduce_sum(tf.abs(gradient) ** 2) for gradient in first)
        return wrap(outer).gradient(penalty, held)

    held = [tf.Variable([0.3 + 0.2j, -0.1 + 0.4j]), tf.Variable([0.5 - 0.3j, 0.2 + 0.1j])]
    rows = [
        tf.constant([[0.7 - 0.5j, 0.1 + 0.9j], [0.2 + 0.3j, -0.6 + 0.1j]]) * (rank + 1) for rank in range(cd.size())
    ]
    wanted = gradients(held, tf.concat(rows, 0), lambda tape: tape)
    for way in ways(lambda x: gradients(held, x, cd.DistributedGradientTape)):
        same(way(rows[cd.rank()]), wanted)


def case_a_rank_without_any_gradient_is_told_in_a_graph() -> None:
    held = [tf.Variable([1.0, 2.0], name="lonely")]

    @tf.function
    def gradients() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(held[0]) if cd.rank() else tf.constant(1.0)
        return cd.DistributedGradientTape(tape).gradient(loss, held)

    with pytest.raises(tf.errors.OpError, match=r"some ranks have gradients for lonely.*, and others have none"):
        gradients()


def case_what_a_graph_returns_is_not_overwritten_by_its_next_run() -> None:
    held = weights()

    @tf.function
    def gradients(scale: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = scale * loss_of(held, *batch(cd.rank()))
        return cd.DistributedGradientTape(tape).gradient(loss, held)

    kept = [gradients(tf.constant(float(scale), tf.float64)) for scale in range(1, 5)]
    for scale, found in enumerate(kept, 1):
        same(found, [gradient.numpy() * scale for gradient in kept[0]])


def case_two_tapes_in_one_graph() -> None:
    held, others = weights(), weights()

    @tf.function
    def gradients() -> list[list[tf.Tensor]]:
        with tf.GradientTape(persistent=True) as tape:
            loss, other = loss_of(held, *batch(cd.rank())), 2.0 * loss_of(others, *batch(cd.rank()))
        tape = cd.DistributedGradientTape(tape)
        return [tape.gradient(loss, held), tape.gradient(other, others)]

    for _ in range(3):
        one, two = gradients()
        same(two, [2.0 * gradient.numpy() for gradient in one])


def slowed(tensor: tf.Tensor, seconds: tf.Tensor) -> tf.Tensor:
    """The tensor, after a pause in which TensorFlow may run what does not depend on it."""

    def wait(array: np.ndarray, pause: np.ndarray) -> np.ndarray:
        time.sleep(float(pause))
        return array

    late = tf.numpy_function(wait, [tensor, seconds], tensor.dtype, stateful=False)
    late.set_shape(tensor.shape)
    return late


def pauses() -> tf.Tensor:
    """The first call is slow on rank 0, and the second one on rank 1."""
    return tf.constant([0.05, 0.0] if cd.rank() == 0 else [0.0, 0.05])


@ranks(2)
def case_calls_of_one_function_stay_in_program_order() -> None:
    """TensorFlow orders calls of functions only if they write the same variable; these only read one."""
    factor = tf.Variable(2.0)

    @tf.function
    def mean(x: tf.Tensor, seconds: tf.Tensor) -> tf.Tensor:
        return cd.allreduce(slowed(x, seconds) * factor)

    @tf.function
    def both(seconds: tf.Tensor) -> list[tf.Tensor]:
        return [mean(tf.constant(1.0), seconds[0]), mean(tf.constant(10.0), seconds[1])]

    for _ in range(5):
        assert [float(found) for found in both(pauses())] == [2.0, 20.0]


@ranks(2)
def case_gradients_of_operations_of_one_function_stay_in_order() -> None:
    """An eager tape differentiates a function in a graph in which TensorFlow orders nothing."""

    def lagging(tensor: tf.Tensor, seconds: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def same_value(x: tf.Tensor) -> tuple[tf.Tensor, Any]:
            return tf.identity(x), lambda upstream: slowed(upstream, seconds)

        return same_value(tensor)

    @tf.function
    def loss_from(x: tf.Tensor, y: tf.Tensor, seconds: tf.Tensor) -> tf.Tensor:
        one, two = cd.allreduce(x), cd.allreduce(y)
        return lagging(one, seconds[0]) + 10.0 * lagging(two, seconds[1])

    for _ in range(5):
        x, y = tf.constant(1.0), tf.constant(2.0)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([x, y])
            loss = loss_from(x, y, pauses())
        assert [float(found) for found in tape.gradient(loss, [x, y])] == [1.0, 10.0]


@ranks(2)
def case_gradients_of_one_function_called_twice_stay_apart() -> None:
    held = weights()

    def tape_of(x: tf.Tensor, y: tf.Tensor) -> tuple[tf.GradientTape, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = loss_of(held, x, y)
        return tape, loss

    @tf.function
    def averaged(x: tf.Tensor, y: tf.Tensor, seconds: tf.Tensor) -> list[tf.Tensor]:
        tape, loss = tape_of(slowed(x, seconds), y)
        return cd.DistributedGradientTape(tape).gradient(loss, held)

    @tf.function
    def both(x: tf.Tensor, y: tf.Tensor, seconds: tf.Tensor) -> list[list[tf.Tensor]]:
        return [averaged(x, y, seconds[0]), averaged(3.0 * x, y, seconds[1])]

    def expected(scale: float) -> list[np.ndarray]:
        each = []
        for rank in range(cd.size()):
            x, y = batch(rank)
            tape, loss = tape_of(scale * x, y)
            each.append(tape.gradient(loss, held))
        return [np.mean(parts, 0) for parts in zip(*each, strict=True)]

    for _ in range(5):
        one, two = both(*batch(cd.rank()), pauses())
        same([gradient.numpy() for gradient in one], expected(1.0))
        same([gradient.numpy() for gradient in two], expected(3.0))


def case_sparse_gradients() -> None:
    table = tf.Variable(np.arange(20.0).reshape(10, 2), name="table")

    def gradient(rows: tf.Tensor, dense: bool) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows)) * (cd.rank() + 1.0)
        found = cd.DistributedGradientTape(tape, sparse_as_dense=dense).gradient(loss, table)
        assert isinstance(found, tf.Tensor if dense else tf.IndexedSlices)
        return tf.convert_to_tensor(found)

    expected = np.zeros((10, 2))
    for rank in range(cd.size()):
        expected[[rank, 9]] += (rank + 1.0) / cd.size()
    for dense in (False, True):
        for run in ways(lambda rows, dense=dense: gradient(rows, dense)):
            same([run(tf.constant([cd.rank(), 9]))], [expected])


def case_local_sources_stay_local() -> None:
    held = weights()
    with tf.GradientTape(persistent=True) as tape:
        loss = loss_of(held, *batch(cd.rank()))
    mine = tape.gradient(loss, held)
    common = cd.DistributedGradientTape(tape).gradient(loss, held)
    for scale in (True, False):
        partial = cd.DistributedGradientTape(tape, scale_local_gradients=scale)
        partial.register_local_source(held[1])
        found = partial.gradient(loss, held)
        same([found[0], found[2]], [common[0], common[2]])
        same([found[1]], [mine[1].numpy() / (cd.size() if scale else 1)])
        ((source, gradient),), others = partial.get_local_and_global_gradients(loss, {"b": held[1:], "a": held[0]})
        assert [id(each) for each in (source, *(each for each, _ in others))] == [id(held[at]) for at in (1, 0, 2)]
        same([gradient, *(each for _, each in others)], [found[1], found[0], found[2]])


@ranks(4)
def case_ranks_outside_of_the_process_set_train_alone() -> None:
    held = weights()
    with tf.GradientTape(persistent=True) as tape:
        loss = loss_of(held, *batch(cd.rank()))
    mine = tape.gradient(loss, held)
    found = cd.DistributedGradientTape(tape, process_set=cd.ProcessSet([0, 2])).gradient(loss, held)
    if cd.rank() % 2:
        same(found, mine)
    else:
        both = cd.grouped_allreduce(mine, process_set=cd.ProcessSet([0, 2]), name="both")
        same(found, both)


def case_who_has_no_gradient_where_others_have_one_is_told() -> None:
    held = weights()

    def gradients() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(held[0]) + (tf.reduce_sum(held[1]) if cd.rank() else 0.0)
        return cd.DistributedGradientTape(tape).gradient(loss, held)

    with pytest.raises(cd.MismatchError, match=r"some ranks have gradients for bias.*, and others have none"):
        gradients()
    cd.barrier()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(held[0]) + tf.reduce_sum(held[1])
    assert cd.DistributedGradientTape(tape).gradient(loss, held)[2] is None  # which no rank has


def case_different_variables_are_told() -> None:
    held = [tf.Variable([1.0, 2.0], name=name) for name in ("both", "extra")][: 1 + cd.rank() % 2]
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(variable) for variable in held])
    with pytest.raises(cd.MismatchError, match="extra"):
        cd.DistributedGradientTape(tape).gradient(loss, held)


@ranks(2)
def case_other_initial_values_are_told_to_all() -> None:
    """At once and in a graph, with a tape for each step."""
    for wrap in (lambda function: function, tf.function):
        held = [tf.Variable(np.full(3, float(cd.rank())), name=f"other_initial_{wrap is tf.function:d}")]

        @wrap
        def step(held: list[tf.Variable] = held) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(held[0]))
            (gradient,) = cd.DistributedGradientTape(tape).gradient(loss, held)
            held[0].assign_sub(0.1 * gradient)

        with pytest.raises((cd.MismatchError, tf.errors.OpError), match="start with different values of other_initial"):  # noqa: PT012 - the check comes with the second step
            for _ in range(3):
                step()
        cd.barrier()


@ranks(1, 2, 4)
def case_variables_are_broadcast() -> None:
    held = [tf.Variable(np.full(3, float(cd.rank())), name="same") for _ in range(2)]
    cd.broadcast_variables(held, cd.size() - 1)
    assert all((variable.numpy() == cd.size() - 1).all() for variable in held)
    if cd.size() > 1:
        with pytest.raises(cd.MismatchError, match="broadcast_variables"):
            cd.broadcast_variables(held[: 1 + cd.rank() % 2], 0)


def case_batch_normalisation_over_all_ranks() -> None:
    import keras

    x = np.random.default_rng(3).normal(2.0, 3.0, size=(6 * cd.size(), 5, 4)).astype("float32")
    cuts = np.cumsum(
        [0, *(4 + 2 * (rank % 2) + (2 if rank == cd.size() - 1 and cd.size() % 2 else 0) for rank in range(cd.size()))]
    )
    cuts[-1] = len(x)
    own = slice(cuts[cd.rank()], cuts[cd.rank() + 1])

    def run(layer: keras.Layer, part: np.ndarray) -> tuple[tf.Tensor, tf.Tensor, list[tf.Tensor]]:
        values = tf.constant(part)
        with tf.GradientTape() as tape:
            tape.watch(values)
            found = layer(values, training=True)
            loss = tf.reduce_sum(tf.sin(found))
        into, *held = tape.gradient(loss, [values, *[each.value for each in layer.trainable_weights]])
        return found, into, held

    plain, mine = keras.layers.BatchNormalization(), cd.SyncBatchNormalization()
    expected, into, held = run(plain, x)
    for step in ways(lambda: run(mine, x[own])):
        mine.build(x.shape) if not mine.built else None
        found, own_into, own_held = step()
        np.testing.assert_allclose(found, expected[own], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(own_into, into[own], rtol=1e-4, atol=1e-5)
        for one, other in zip(own_held, held, strict=True):
            np.testing.assert_allclose(cd.allreduce(one, op=cd.Sum), other, rtol=1e-4, atol=1e-4)
    fresh = cd.SyncBatchNormalization()
    run(fresh, x[own])
    for one, other in zip(fresh.non_trainable_weights, plain.non_trainable_weights, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5)


def case_masked_batches_are_normalised_by_what_is_not_masked() -> None:
    import keras

    random = np.random.default_rng(5)
    x = random.normal(2.0, 3.0, size=(3 * cd.size(), 6, 4)).astype("float32")
    mask = random.integers(0, 2, size=x.shape[:2]).astype(bool)
    own = slice(3 * cd.rank(), 3 * cd.rank() + 3)
    expected = keras.layers.BatchNormalization()(x, training=True, mask=mask)
    found = cd.SyncBatchNormalization()(x[own], training=True, mask=mask[own])
    np.testing.assert_allclose(found, expected[own], rtol=1e-4, atol=1e-4)
    with pytest.raises(cd.ArgumentError, match="fused"):
        cd.SyncBatchNormalization(fused=True)


@ranks(2)
def case_reductions_run_beside_backward_and_the_timeline_shows_it() -> None:
    folder = Path(cd.broadcast_object(tempfile.mkdtemp() if cd.rank() == 0 else None))
    random = np.random.default_rng(0)
    layers = [tf.Variable(random.normal(0, 0.05, (384, 384)).astype("float32"), name=f"deep{at}") for at in range(8)]
    x = tf.constant(random.normal(size=(256, 384)).astype("float32"))

    @tf.function
    def step() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            y = x
            for layer in layers:
                y = tf.tanh(y @ layer)
            loss = tf.reduce_mean(y)
        return cd.DistributedGradientTape(tape, num_groups=8).gradient(loss, layers)

    step()
    step()  # in which the values of the variables are compared, too
    daemon = api.operations().daemon
    daemon.set_window(0.0)  # else it waits for company as long as such a small step takes
    cd.start_timeline(str(folder))
    for _ in range(10):
        step()
    cd.stop_timeline()
    daemon.set_window(daemon.config.cycle_ms / 1e3)
    events = json.loads((folder / f"rank.{cd.rank()}.json").read_text())
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    moved = [event for event in events if event["name"] == "ALLREDUCE" and "gradients" in rows[event["tid"]]]
    spans = sorted((event["ts"], event["ts"] + event["dur"], rows[event["tid"]]) for event in moved)
    steps = [spans[first : first + 8] for first in range(0, len(spans), 8)]
    assert len(steps) == 10
    assert all(len({name for _, _, name in step}) == 8 for step in steps)
    early = sum(step[0][1] < step[-1][0] for step in steps)  # the last one begins when backward ends
    assert early >= 8, steps


def case_a_tape_is_wrapped_once_and_wrappers_do_not_know_each_other() -> None:
    held = weights()
    with tf.GradientTape(persistent=True) as tape:
        loss = loss_of(held, *batch(cd.rank()))
    average, total = cd.DistributedGradientTape(tape), cd.DistributedGradientTape(tape, op=cd.Sum)
    same([each / cd.size() for each in total.gradient(loss, held)], average.gradient(loss, held))
    with pytest.raises(cd.ArgumentError, match="wrap it once"):
        cd.DistributedGradientTape(average)


def case_a_step_that_fails_half_way_is_forgotten() -> None:
    held = weights()
    fails = tf.Variable(True)

    @tf.function
    def gradients() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = loss_of(held, *batch(cd.rank()))
        found = tf.GradientTape.gradient(tape, loss, held)
        with tf.control_dependencies([tf.debugging.Assert(tf.logical_not(fails), ["half way"])]):
            last = tf.identity(found[0])
        way = Exchange(Choices(compression=cd.Compression.none, grouping=Grouping(3, kind=tf.Variable)))
        return way.reduce([last, *found[1:]], held)

    with pytest.raises(tf.errors.InvalidArgumentError, match="half way"):
        gradients()
    fails.assign(False)
    cd.barrier()
    with tf.GradientTape() as tape:
        loss = loss_of(held, *batch(cd.rank()))
    same(gradients(), cd.grouped_allreduce(tape.gradient(loss, held), name="plainly"))


class Watched:
    """Notes which gradients have been put to be reduced."""

    def __init__(self) -> None:
        self.used: set[Gradients] = set()
        self._put = Gradients.put

    def put(self, gradients: Gradients, *given: object) -> None:
        self.used.add(gradients)
        self._put(gradients, *given)

    @property
    def begun(self) -> bool:
        """Whether a step has put something, and was not waited for."""
        return any(bucket.begun for gradients in self.used for bucket in gradients._buckets)


@ranks(2, deadline=60)
def case_a_step_that_fails_half_way_on_one_rank_is_discarded_on_all() -> None:
    """If TensorFlow has begun with another gradient by then, as it may; else the other rank waits for the next."""
    held, watched, told, made, begun = weights(), Watched(), [], 0, False
    way = Exchange(Choices(compression=cd.Compression.none, grouping=Grouping(len(held), kind=tf.Variable)))

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor, fails: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(held, x, y)
        first, *rest = tape.gradient(loss, held)
        slow = tf.linalg.matmul(*[tf.fill([900, 900], first[0, 0])] * 2)[0, 0]
        with tf.control_dependencies([tf.debugging.Assert(tf.logical_not(fails) & (slow > -1e300), ["out of memory"])]):
            first = tf.identity(first)
        for variable, gradient in zip(held, way.reduce([first, *rest], held), strict=True):
            variable.assign_sub(0.1 * gradient)

    with unittest.mock.patch.object(Gradients, "put", lambda *given: watched.put(*given)):  # noqa: PLW0108 - a bound method would not get the gradients
        while made < 6:
            try:
                step(*batch(cd.rank()), tf.constant(made == 3 and cd.rank() == 1 and not told))
                made += 1
            except tf.errors.OpError as error:
                told.append(str(error))
                begun |= watched.begun
    begun = cd.broadcast_object(begun, 1)
    assert len(told) == int(begun or cd.rank() == 1)
    assert all(("out of memory" if cd.rank() else "rank 1 has not completed a step") in text for text in told)
    for variable, value in zip(held, alone(6), strict=True):
        np.testing.assert_allclose(variable.numpy(), value)


@ranks(2, deadline=60)
def case_a_step_that_fails_half_way_is_told_to_the_others_before_the_next_one() -> None:
    """Rank 1 fails once a gradient is given away, and does nothing more until rank 0 has heard of it."""
    held, watched, fails = weights(), Watched(), tf.Variable(False)
    way = Exchange(Choices(compression=cd.Compression.none, grouping=Grouping(len(held), kind=tf.Variable)))
    before: list[tf.Tensor] = []

    def one_by_one(*given: Any, **how: Any) -> list[tf.Tensor]:
        """Starts a bucket after the one before, and after what fails."""
        with tf.control_dependencies(before):
            asserted = [tf.debugging.Assert(tf.logical_not(fails), ["out of memory"])] if len(before) == 1 else []
        with tf.control_dependencies([*before, *asserted]):
            found = call(*given, **how)
        before.extend(found)
        return found

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = loss_of(held, x, y)
        for variable, gradient in zip(held, way.reduce(tape.gradient(loss, held), held), strict=True):
            variable.assign_sub(0.1 * gradient)

    with (
        unittest.mock.patch.object(Gradients, "put", lambda *given: watched.put(*given)),  # noqa: PLW0108 - as above
        unittest.mock.patch("coordd_tensorflow.exchange.call", one_by_one),
    ):
        for _ in range(3):
            step(*batch(cd.rank()))
    fails.assign(cd.rank() == 1)
    with pytest.raises(tf.errors.OpError, match=r"out of memory|rank 1 has not completed a step"):
        step(*batch(cd.rank()))
    assert cd.rank() == 0 or all(heard(gradients, 20) for gradients in watched.used)
    fails.assign(False)
    for _ in range(3):
        step(*batch(cd.rank()))
    for variable, value in zip(held, alone(6), strict=True):
        np.testing.assert_allclose(variable.numpy(), value)


def heard(gradients: Gradients, seconds: float) -> bool:
    """Waits until all ranks have heard that this one discards its step."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (told := gradients._told) is not None and told.wait(0.1):
            return True
    return False


@ranks(2, deadline=60)
def case_sparse_gradients_of_two_threads_are_not_mixed_up() -> None:
    """Both variables have TensorFlow's default name; the threads of each rank begin in another order."""
    tables = [tf.Variable(tf.ones((rows, 4))) for rows in (100, 50)]
    assert len({table.name for table in tables}) == 1
    turns = [threading.Event() for _ in tables]
    turns[cd.rank()].set()
    found: dict[int, list[list[float]]] = {0: [], 1: []}

    def train(which: int) -> None:
        turns[which].wait()
        for _ in range(3):
            with cd.DistributedGradientTape(tf.GradientTape()) as tape:
                loss = tf.reduce_sum(tf.gather(tables[which], [cd.rank()])) * 100.0**which
            turns[1 - which].set()
            slices = tape.gradient(loss, [tables[which]])[0]
            found[which].append(slices.values[:, 0].numpy().tolist())

    threads = [threading.Thread(target=train, args=(which,)) for which in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: [[0.5, 0.5]] * 3, 1: [[50.0, 50.0]] * 3}
