"""What one rank refuses, or does otherwise, in calls of `coordd.keras` is heard by the others; ranks are threads.

Each `LocalRanks.each` counts calls and operations anew, so what was refused must be over on all ranks before the next:
a test ends with something that all of them complete.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

pytest.importorskip("keras", reason="Keras is not installed: pip install 'coordd[tensorflow]'")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install 'coordd[tensorflow]'")
import keras
import tensorflow as tf

import coordd.keras as cd
from tests.local_ranks import local_ranks

if keras.backend.backend() != "tensorflow":
    pytest.skip("these tests are for Keras on TensorFlow", allow_module_level=True)


# Variables of TensorFlow do not know NumPy's argument ``copy``.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*Gradients do not exist:UserWarning"),
]


@pytest.fixture(scope="module")
def two():
    with local_ranks(2) as ranks:
        yield ranks


def built(rank=0):
    """A model of one layer, whose variables are called alike on all ranks."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="only", kernel_initializer="ones")])
    model.layers[0].kernel.assign(np.full((2, 1), rank + 1.0))
    return model


def heard(ranks, good, bad, wanted="rank 1 refused"):
    """Checks that rank 0 hears of what rank 1 refuses, and that what comes next is paired rightly."""
    both = threading.Barrier(2)

    def body(rank):
        with pytest.raises(Exception, match=wanted if rank == 0 else ".") as caught:  # also Python's own
            (bad if rank else good)()
        both.wait(15)
        sums = cd.allreduce(np.full(2, float(rank)), op=cd.Sum).tolist()
        model = built(rank)
        cd.broadcast_variables(model.variables, 1)
        return caught.value, sums, cd.allgather([rank]).tolist(), float(model.layers[0].kernel[0, 0])

    results = ranks.each(body)
    assert [result[1:] for result in results] == [([1.0, 1.0], [0, 1], 2.0)] * 2
    return [result[0] for result in results]


def compressed(how):
    return lambda: cd.DistributedOptimizer(keras.optimizers.SGD(0.1), compression=how)


ONE = [1.0]
CALLS = {
    "allreduce": (lambda: cd.allreduce(ONE), lambda: cd.allreduce(None)),
    "allreduce, op": (lambda: cd.allreduce(ONE), lambda: cd.allreduce(ONE, op="sum")),
    "allreduce, compression": (lambda: cd.allreduce(ONE), lambda: cd.allreduce(ONE, compression="zip")),
    "allreduce, keyword": (lambda: cd.allreduce(ONE), lambda: cd.allreduce(ONE, bogus=1)),
    "allreduce, set": (lambda: cd.allreduce(ONE), lambda: cd.allreduce(ONE, process_set=None)),
    "allgather": (lambda: cd.allgather(ONE), lambda: cd.allgather(1.0)),
    "broadcast": (lambda: cd.broadcast(ONE, 0), lambda: cd.broadcast(ONE, 2)),
    "reducescatter": (lambda: cd.reducescatter(ONE), lambda: cd.reducescatter(object())),
    "object": (lambda: cd.broadcast_object(1), lambda: cd.broadcast_object(1, bogus=1)),
    "objects": (lambda: cd.allgather_object(1), cd.allgather_object),
    "variables": (lambda: cd.broadcast_variables([], 0), lambda: cd.broadcast_variables(None, 0)),
    "no variables": (lambda: cd.broadcast_variables([], 0), lambda: cd.broadcast_variables([1.0], 0)),
    "root of variables": (lambda: cd.broadcast_variables([], 0), lambda: cd.broadcast_variables([], 0, 0, 0)),
    "global variables": (lambda: cd.broadcast_global_variables(0, built()), lambda: cd.broadcast_global_variables(0)),
    "optimizer": (
        lambda: cd.DistributedOptimizer(keras.optimizers.SGD(0.1)),
        lambda: cd.DistributedOptimizer("sgd"),
    ),
    "local layers": (
        lambda: cd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=built().layers[0]),
        lambda: cd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=["only"]),
    ),
    "layers that are not built": (
        lambda: cd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1)),
        lambda: cd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=keras.layers.Dense(1)),
    ),
}


@pytest.mark.parametrize("what", CALLS)
def test_whatever_is_refused_is_heard_by_all_who_wait_for_it(two, what):
    heard(two, *CALLS[what])


def test_other_compressions_are_told_to_all(two):
    wanted = "compression=none on rank 0 only"
    heard(two, compressed(cd.Compression.none), compressed(cd.Compression.fp16), wanted)


@pytest.fixture
def saved(tmp_path):
    model = built()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.save(path := tmp_path / "model.keras")
    return path


def test_a_model_is_loaded_by_all_ranks_or_by_none(two, saved):
    def load():
        return cd.load_model(saved)

    heard(two, load, lambda: cd.load_model(saved.with_name("absent.keras")), "rank 1 refused load_model .*absent.keras")
    heard(two, load, lambda: cd.load_model(saved, compression=7), "rank 1 refused load_model")

    def body(rank):
        other = saved.with_name("other.keras")
        if rank:
            built().save(other)
        with pytest.raises(cd.MismatchError, match="different parameters to load_model"):
            cd.load_model(other if rank else saved)
        return type(load().optimizer).__mro__[1].__name__

    assert two.each(body) == ["_Distributed"] * 2


def test_a_state_that_cannot_be_read_is_told_to_all(two, tmp_path):
    path = tmp_path / "state.npz"
    path.write_bytes(b"this is no state")
    models = [built(rank) for rank in range(2)]
    for model in models:
        model.compile(keras.optimizers.SGD(0.1), "mse")

    def body(rank):
        state = cd.KerasState(models[rank], path)
        with pytest.raises(Exception, match="rank 0 refused KerasState.restore" if rank else ".") as caught:
            state.restore()
        return caught.value, cd.allreduce([float(rank)], op=cd.Sum).tolist()

    assert [result[1] for result in two.each(body)] == [[1.0]] * 2


def test_variables_that_differ_are_not_copied(two):
    def body(rank):
        variables = built(rank).variables
        with pytest.raises(cd.MismatchError, match="different parameters to broadcast_variables"):
            cd.broadcast_variables(variables if rank else variables[:1], 0)
        cd.barrier()
        return float(variables[0][0, 0])

    assert two.each(body) == [1.0, 2.0]


LOGS = {
    "names": ({"loss": 1.0, "accuracy": 0.5}, {"loss": 1.0, "mae": 0.5}),
    "numbers": ({"loss": 1.0}, {"loss": 1.0, "val_loss": 2.0}),
    "nothing": ({}, {"loss": 1.0}),
    "no logs": (None, {"loss": 1.0}),
    "kinds": ({"loss": 1.0}, {"loss": "low"}),
}


@pytest.mark.parametrize("what", LOGS)
@pytest.mark.parametrize("turned", [False, True])
def test_other_metrics_are_told_to_all(two, what, turned):
    def body(rank):
        logs = LOGS[what][rank != turned]
        before = None if logs is None else dict(logs)
        with pytest.raises(cd.MismatchError, match="different parameters to MetricAverageCallback"):
            cd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
        assert logs == before
        fine = {"loss": float(rank), "name": "x", "lr": np.float32(rank)}
        cd.callbacks.MetricAverageCallback().on_epoch_end(1, fine)
        return fine

    assert two.each(body) == [{"loss": 0.5, "name": "x", "lr": 0.5}] * 2


def test_no_metrics_anywhere_are_no_problem(two):
    def body(_):
        cd.callbacks.MetricAverageCallback().on_epoch_end(0, None)
        cd.callbacks.MetricAverageCallback().on_epoch_end(0, {})
        return cd.allreduce(ONE).tolist()

    assert two.each(body) == [[1.0]] * 2


def test_a_metric_that_some_ranks_do_not_have_picks_no_best_model(two, tmp_path):
    models = [built(rank) for rank in range(2)]

    def body(rank):
        best = cd.callbacks.BestModelCheckpoint(tmp_path / "best.keras", "val_loss", mode="min")
        best.set_model(models[rank])
        with pytest.raises(cd.MismatchError, match="different parameters to BestModelCheckpoint"):
            best.on_epoch_end(0, {"loss": 1.0} | ({"val_loss": 1.0} if rank else {}))
        best.on_epoch_end(0, {"val_loss": float(rank)})
        return best.best

    assert two.each(body)[0] == 0.5
    assert (tmp_path / "best.keras").exists()


class Summing(keras.layers.Layer):
    """A layer that refuses."""

    def call(self, rows):
        return cd.allreduce(rows, process_set=None)


def test_errors_keep_their_class_in_layers(two):
    def body(rank):
        with pytest.raises(cd.CoorddError) as caught:
            Summing()(np.ones((2, 2 + rank)))
        cd.barrier()
        return type(caught.value).__name__

    assert {*two.each(body)} <= {"ArgumentError", "RefusedError"}


def stepped(optimizer, passes, variables, way):
    """Gives an optimizer gradients of several passes: for each of them pairs of a gradient and a variable's place."""

    def applied(chosen):
        return lambda *given: optimizer.apply(list(given), chosen)

    for gradients, places in passes:
        one = applied([variables[place] for place in places])
        one = one if way == "at once" else tf.function(one, autograph=False)
        one(*(None if each is None else tf.constant(each) for each in gradients))
    return [float(variable.numpy()[0]) for variable in variables]


def distributed(rank, **details):
    variables = [keras.Variable(np.zeros(1), name=f"weight{place}", dtype="float32") for place in range(2)]
    optimizer = cd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2, **details)
    optimizer.build(variables)
    return optimizer, variables, float(rank)


def test_a_gradient_of_only_some_passes_belongs_to_their_step(two):
    """Else it would be left out of this step, and be added to a later one."""

    def body(rank):
        optimizer, variables, mine = distributed(rank)
        both = [0, 1]
        first = stepped(optimizer, [([[mine], [mine]], both), ([[mine], None], both)], variables, "at once")
        second = stepped(optimizer, [([[mine], None], both), ([[mine], None], both)], variables, "at once")
        return first, second

    assert two.each(body) == [([-1.0, -0.5], [-2.0, -0.5])] * 2


def test_passes_for_other_variables_make_one_step_together(two):
    def body(rank):
        optimizer, variables, mine = distributed(rank)
        passes = [([[mine]], [0]), ([[mine + 1.0]], [1])]
        first = stepped(optimizer, passes, variables, "at once")
        return first, stepped(optimizer, [passes[1], passes[1]], variables, "at once")

    assert two.each(body) == [([-0.5, -1.5], [-0.5, -4.5])] * 2


def test_a_later_graph_with_gradients_for_other_variables_is_refused(two):
    def body(rank):
        optimizer, variables, mine = distributed(rank)
        both = [0, 1]
        stepped(optimizer, [([[mine], None], both)], variables, "graph")
        with pytest.raises(cd.ArgumentError, match="only some have them for weight1"):
            stepped(optimizer, [([[mine], [mine]], both)], variables, "graph")
        return cd.allreduce(ONE).tolist()

    assert two.each(body) == [[1.0]] * 2


def test_passes_in_graphs_are_added_up(two):
    def body(rank):
        optimizer, variables, mine = distributed(rank, average_aggregated_gradients=True)
        both = [0, 1]
        passes = [([[mine], [2.0]], both), ([[mine], [4.0]], both)] * 2
        return stepped(optimizer, passes, variables, "graph")

    assert two.each(body) == [[-1.0, -6.0]] * 2
