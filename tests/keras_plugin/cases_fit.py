"""``model.compile`` and ``fit`` on several ranks, as on one with all their batches; on every backend, and on two."""

import itertools
import logging
import os
import tempfile
from pathlib import Path
from unittest import mock

import keras
import numpy as np
import pytest

import coordd.keras as cd
from tests.keras_plugin.models import alone, compiled, data, mine, model, same, together
from tests.mpi.cases import ranks

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=1.0),
    "adamw": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=1.0),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, use_ema=True, ema_overwrite_frequency=2),
}


@ranks(1, 2, deadline=60)
def case_fit_equals_one_process_with_all_batches() -> None:
    for make in OPTIMIZERS.values():
        same(together(cd.DistributedOptimizer(make()), 5), alone(make(), 5))


def case_sparse_gradients_beside_dense_ones_train_alike() -> None:
    """In TensorFlow the gradient of an embedding is sparse."""
    x = np.arange(24).reshape(4, 6) % 5 + cd.rank()
    found = []
    alike = len({*cd.allgather_object(keras.backend.backend())}) == 1  # PyTorch's gradients are dense
    for dense in (not alike, True):
        keras.utils.set_random_seed(1)
        layers = keras.layers.Embedding(9, 4), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(2)
        net = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
        net.compile(cd.DistributedOptimizer(keras.optimizers.SGD(0.1), sparse_as_dense=dense), "mse")
        begin = [cd.callbacks.BroadcastGlobalVariablesCallback(0)]  # backends draw other numbers from the same seed
        net.fit(x, np.ones((4, 2)), batch_size=2, epochs=5, shuffle=False, verbose=0, callbacks=begin)
        found.append(net.get_weights())
    for sparse, dense in zip(found[0], found[-1], strict=True):
        np.testing.assert_allclose(sparse, dense, rtol=1e-5)
    for theirs in cd.allgather_object(found[0]):
        for one, other in zip(found[0], theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5)


def case_every_optimizer_takes_sparse_gradients_in_a_graph() -> None:
    """Some add to them, for which they look at the shapes of what has arrived."""
    x = np.arange(24).reshape(4, 6) % 5 + cd.rank()
    for kind in ("RMSprop", "Nadam", "Ftrl", "Lion", "Adafactor", "Adadelta"):
        keras.utils.set_random_seed(1)
        layers = keras.layers.Embedding(9, 4), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(2)
        net = keras.Sequential([keras.Input((6,), dtype="int32"), *layers])
        mixed = len({*cd.allgather_object(keras.backend.backend())}) > 1
        optimizer = getattr(keras.optimizers, kind)(0.01)
        net.compile(cd.DistributedOptimizer(optimizer, sparse_as_dense=mixed), "mse")
        begin = [cd.callbacks.BroadcastGlobalVariablesCallback(0)]
        net.fit(x, np.ones((4, 2)), batch_size=2, epochs=1, shuffle=False, verbose=0, callbacks=begin)
        found = net.get_weights()
        for theirs in cd.allgather_object(found):
            for one, other in zip(found, theirs, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-6)  # backends divide in other orders


def case_the_optimizer_stays_what_it_was() -> None:
    plain = keras.optimizers.Adam(0.5, name="mine")
    found = cd.DistributedOptimizer(plain)
    assert found is plain
    assert isinstance(found, keras.optimizers.Adam)
    assert type(found).__name__ == "Adam"
    assert found.get_config() == keras.optimizers.Adam(0.5, name="mine").get_config()
    with pytest.raises(cd.ArgumentError, match="DistributedOptimizer already"):
        cd.DistributedOptimizer(found)
    with pytest.raises(cd.ArgumentError, match="wants an optimizer of Keras"):
        cd.DistributedOptimizer("adam")
    with pytest.raises(cd.ArgumentError, match="must be > 0"):
        cd.DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=0)


def case_choices_of_the_optimizer() -> None:
    expected = alone(keras.optimizers.SGD(0.1), 4)
    for details, exact in [
        ({"num_groups": 2}, 1e-5),
        ({"gradient_predivide_factor": 2.0}, 1e-5),
        ({"compression": cd.Compression.fp16}, 1e-2),
        ({"compression": cd.Compression.bf16}, 3e-2),
    ]:
        same(together(cd.DistributedOptimizer(keras.optimizers.SGD(0.1), **details), 4), expected, exact)
    summed = cd.DistributedOptimizer(keras.optimizers.SGD(0.1 / cd.size()), op=cd.Sum)
    same(together(summed, 4), expected)


def case_several_backward_passes_make_one_step() -> None:
    """Two batches of a rank and one step are one batch of twice as many."""
    for average, rate in [(True, 0.1), (False, 0.05)]:
        optimizer = cd.DistributedOptimizer(
            keras.optimizers.SGD(rate), backward_passes_per_step=2, average_aggregated_gradients=average
        )
        found = together(optimizer, 6)
        assert int(optimizer.iterations) == 3
        expected = compiled(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
        x, y = data(6)
        expected.fit(x, y, batch_size=len(x) // 6, shuffle=False, verbose=0)
        same(found, expected)


def case_a_step_may_be_run_eagerly() -> None:
    same(
        together(cd.DistributedOptimizer(keras.optimizers.SGD(0.1)), 3, run_eagerly=True),
        alone(keras.optimizers.SGD(0.1), 3),
    )


def case_what_xla_compiles_is_refused() -> None:
    optimizer = cd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    if keras.backend.backend() == "tensorflow":
        with pytest.raises(cd.ArgumentError, match=r"set jit_compile=False in tf.function\(\) or model.compile\(\)"):
            together(optimizer, 1, jit_compile=True)


def case_a_loss_scale_goes_inside() -> None:
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
    same(together(cd.DistributedOptimizer(scaled), 4), alone(keras.optimizers.SGD(0.1), 4))
    outside = keras.optimizers.LossScaleOptimizer(cd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    with pytest.raises(cd.ArgumentError, match=r"use DistributedOptimizer\(keras.optimizers.LossScaleOptimizer"):
        together(outside, 1)


def case_local_layers_stay_local() -> None:
    found = model()
    optimizer = cd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=found.layers[0])
    found.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = mine(1)
    found.fit(x, y, batch_size=len(x), verbose=0)
    everyones = cd.allgather_object(found.get_weights())
    for theirs in everyones[1:]:
        assert not np.array_equal(theirs[0], everyones[0][0])
        np.testing.assert_allclose(theirs[2], everyones[0][2], rtol=1e-6)


def case_variables_are_broadcast_after_the_first_batch() -> None:
    found = compiled(cd.DistributedOptimizer(keras.optimizers.SGD(0.0, momentum=0.9)))
    for variable in found.variables:
        variable.assign(np.full(variable.shape, cd.rank()))
    x, y = mine(2)
    found.fit(x, y, batch_size=4, verbose=0, callbacks=[cd.callbacks.BroadcastGlobalVariablesCallback(1)])
    assert all((weight == 1).all() for weight in found.get_weights())


def case_metrics_are_averaged() -> None:
    class Ends(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append(dict(logs))

    seen: list[dict] = []
    found = compiled(cd.DistributedOptimizer(keras.optimizers.SGD(0.0)))
    x, y = mine(3)
    callbacks = [Ends(), cd.callbacks.MetricAverageCallback(), Ends()]
    found.fit(x, y, batch_size=4, verbose=0, callbacks=callbacks, validation_data=(x, y))
    own, averaged = seen
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        assert averaged[name] == pytest.approx(np.mean([each[name] for each in cd.allgather_object(own)]), rel=1e-5)


def case_the_rate_is_warmed_up() -> None:
    class Rates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    rates: list[float] = []
    found = compiled(cd.DistributedOptimizer(keras.optimizers.SGD(0.1 * cd.size(), momentum=0.9)))
    x, y = mine(4)
    warm = cd.callbacks.LearningRateWarmupCallback(0.1 * cd.size(), warmup_epochs=2)
    later = cd.callbacks.LearningRateScheduleCallback(0.1 * cd.size(), 0.1, start_epoch=2)
    found.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=[warm, later, Rates()])
    expected = np.linspace(0.1, 0.1 * cd.size(), 9)[1:]
    np.testing.assert_allclose(rates[:8], expected, rtol=1e-5)
    np.testing.assert_allclose(rates[8:], 0.01 * cd.size(), rtol=1e-5)
    with pytest.raises(cd.ArgumentError, match="a constant multiplier"):
        cd.callbacks.LearningRateScheduleCallback(0.1, 0.5, staircase=False)


def case_models_are_saved_and_loaded() -> None:
    folder = Path(cd.broadcast_object(tempfile.mkdtemp() if cd.rank() == 0 else None))
    optimizer = cd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    callbacks = [cd.callbacks.BestModelCheckpoint(str(folder / "best.keras"), monitor="loss")]
    found = together(optimizer, 4, callbacks)
    if cd.rank() == 0:
        found.save(folder / "model.keras")
    cd.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["best.keras", "model.keras"]
    plain = keras.models.load_model(folder / "model.keras")
    assert type(plain.optimizer).__mro__[1:] == keras.optimizers.Adam.__mro__[1:] or isinstance(
        plain.optimizer, keras.optimizers.Adam
    )
    again = cd.load_model(folder / "model.keras")
    x, y = mine(2)
    for trained in (found, again):
        trained.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    same(again, found, 1e-6)
    everyones = cd.allgather_object(again.get_weights())
    for theirs in everyones:
        np.testing.assert_allclose(theirs[0], everyones[0][0], rtol=1e-5, atol=1e-6)


def case_a_model_is_loaded_after_it_has_been_saved() -> None:
    """Rank 0 saves it only when the other ranks are about to load it."""
    folder = Path(cd.broadcast_object(tempfile.mkdtemp() if cd.rank() == 0 else None))
    found = together(cd.DistributedOptimizer(keras.optimizers.Adam(0.01)), 2)
    (folder / f"{cd.rank()}.ready").touch()
    if cd.rank() == 0:
        while len(list(folder.glob("*.ready"))) < cd.size():
            pass
        found.save(folder / "model.keras")
    again = cd.load_model(folder / "model.keras")
    same(again, found, 1e-6)


def case_a_loaded_model_accumulates_as_before() -> None:
    """The file holds the plain optimizer, so saving says what `load_model` must be given again."""
    folder = Path(cd.broadcast_object(tempfile.mkdtemp() if cd.rank() == 0 else None))
    optimizer = cd.DistributedOptimizer(
        keras.optimizers.SGD(0.01), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    found = together(optimizer, 2)
    with mock.patch.object(logging.getLogger("coordd"), "warning") as warn:
        for name in ("first.keras", "second.keras"):
            found.save(folder / f"{cd.rank()}.{name}")
    told, *_ = warn.call_args.args
    assert warn.call_count == 1, warn.call_args_list
    assert told % warn.call_args.args[1:] == (
        "a saved model does not hold backward_passes_per_step=2, average_aggregated_gradients=True: give it to "
        "load_model, too"
    )
    cd.barrier()
    again = cd.load_model(folder / "0.second.keras", backward_passes_per_step=2, average_aggregated_gradients=True)
    x, y = mine(2)
    for trained in (found, again):
        trained.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    same(again, found, 1e-6)
    assert int(again.optimizer.iterations) == int(found.optimizer.iterations)


def case_operations_on_values() -> None:
    value = keras.ops.convert_to_tensor([1.0 + cd.rank(), 2.0])
    assert cd.allreduce(value).tolist() == [(1 + cd.size()) / 2, 2.0]
    assert cd.allreduce(3.0, op=cd.Sum) == 3.0 * cd.size()
    for compression in (cd.Compression.fp16, cd.Compression.bf16):
        found = cd.allreduce(value, compression=compression)
        assert (found.dtype, found.tolist()) == (np.float32, [(1 + cd.size()) / 2, 2.0])
    assert cd.allgather(value[:1]).tolist() == list(range(1, cd.size() + 1))
    assert cd.broadcast(value, 1).tolist() == [2.0, 2.0]
    assert len(cd.reducescatter(np.arange(4.0))) == len(np.array_split(range(4), cd.size())[cd.rank()])


def case_every_rank_has_the_backend_that_the_job_gives_it() -> None:
    found = cd.allgather_object(keras.backend.backend())
    wanted = os.environ.get("TEST_KERAS_BACKENDS", os.environ["KERAS_BACKEND"]).split(",")
    assert found == [wanted[rank % len(wanted)] for rank in range(cd.size())]


def case_every_rank_has_a_part_of_equal_length() -> None:
    tf = pytest.importorskip("tensorflow")
    numbers = tf.data.Dataset.range(2 * cd.size() + 1)

    def parts(**details) -> list[list[int]]:
        return cd.allgather_object([int(each) for each in cd.shard(numbers, **details)])

    dropped, repeated = parts(), parts(uneven="repeat")
    assert {len(part) for part in dropped} == {2 if cd.size() > 1 else 3}
    assert sorted(itertools.chain(*dropped)) == list(range(2 * cd.size() + (cd.size() == 1)))
    assert {len(part) for part in repeated} == {3}
    assert set(itertools.chain(*repeated)) == set(range(2 * cd.size() + 1))
    with pytest.raises(cd.ArgumentError, match="is not known"):
        cd.shard(numbers.filter(lambda _: True))
    with pytest.raises(cd.ArgumentError, match='"drop" or "repeat"'):
        cd.shard(numbers, uneven="pad")
    if cd.size() > 1:
        with pytest.raises(cd.ArgumentError, match="too few"):
            cd.shard(numbers.take(1))
    with pytest.raises(cd.ArgumentError, match="0 elements are too few"):
        cd.shard(numbers.take(0), uneven="repeat")


def case_all_variables_of_a_model_are_broadcast() -> None:
    found = compiled(keras.optimizers.SGD(0.1))
    for variable in found.variables:
        variable.assign(np.full(variable.shape, cd.rank() + 1))
    cd.broadcast_global_variables(0, found)
    assert all((weight == 1).all() for weight in found.get_weights())
    with pytest.raises(TypeError, match="give the model"):
        cd.broadcast_global_variables(0)


def case_a_job_that_is_started_anew_goes_on() -> None:
    path = Path(cd.broadcast_object(tempfile.mkdtemp() if cd.rank() == 0 else None)) / "state.npz"

    def job(epochs: int) -> tuple[keras.Model, bool, int]:
        found = compiled(cd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
        state = cd.KerasState(found, path, note="mine")
        restored, first = state.restore(), state.epoch
        callbacks = [
            cd.callbacks.UpdateEpochStateCallback(state),
            cd.callbacks.UpdateBatchStateCallback(state),
            cd.callbacks.CommitStateCallback(state, batches_per_commit=2),
        ]
        x, y = mine(3)
        found.fit(x, y, batch_size=4, shuffle=False, verbose=0, epochs=epochs, initial_epoch=first, callbacks=callbacks)
        assert (state.epoch, state.batch, state.note) == (epochs, 0, "mine")
        return found, restored, first

    _, *first = job(2)
    cd.barrier()
    again, *second = job(3)
    assert (first, second) == ([False, 0], [True, 2])
    straight = compiled(cd.DistributedOptimizer(keras.optimizers.Adam(0.01)))
    x, y = mine(3)
    straight.fit(x, y, batch_size=4, shuffle=False, verbose=0, epochs=3)
    same(again, straight)
    with pytest.raises(cd.ArgumentError, match="is of another model"):
        cd.KerasState(compiled(keras.optimizers.SGD()), path).restore()
    with pytest.raises(cd.ArgumentError, match="wants a compiled model"):
        cd.KerasState(model(), path)


def case_a_state_is_that_of_rank_0_also_before_the_first_commit() -> None:
    path = Path(cd.broadcast_object(tempfile.mkdtemp() if cd.rank() == 0 else None)) / "state.npz"
    state = cd.KerasState(compiled(keras.optimizers.SGD()), path, seed=cd.rank(), note=["mine"])
    assert not state.restore()
    assert (state.seed, state.note, state.epoch) == (0, ["mine"], 0)


def case_a_model_in_bfloat16_is_restored() -> None:
    path = Path(cd.broadcast_object(tempfile.mkdtemp() if cd.rank() == 0 else None)) / "state.npz"

    def made() -> tuple[keras.Model, cd.KerasState]:
        found = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, dtype="bfloat16")])
        found.compile(keras.optimizers.Adam(0.01), "mse")
        return found, cd.KerasState(found, path)

    first, state = made()
    for variable in first.variables:
        variable.assign(np.arange(np.prod(variable.shape)).reshape(variable.shape) / 3)
    state.commit()
    cd.barrier()
    second, state = made()
    assert state.restore()
    assert [variable.dtype for variable in second.variables] == ["bfloat16"] * 2
    for one, other in zip(first.variables, second.variables, strict=True):
        np.testing.assert_array_equal(
            *(keras.ops.convert_to_numpy(keras.ops.cast(each, "float32")) for each in (one, other))
        )


@ranks(2)
def case_a_second_pass_adds_to_the_average_of_the_first() -> None:
    """Also on a rank that does not use a variable in it; the trainer's own loop makes one pass a step."""
    if keras.backend.backend() != "torch" or "TEST_KERAS_BACKENDS" in os.environ:
        return
    held = [keras.Variable([1.0, 1.0], name=name) for name in ("some", "all")]
    optimizer = cd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(held)
    some, every = (variable.value for variable in held)
    factor = cd.rank() + 1.0
    for _ in range(3):
        some.grad = every.grad = None
        ((some.sum() + every.sum()) * factor).backward()
        assert some.grad.tolist() == [1.5, 1.5]
        loss = every.sum() * factor
        (loss + 10 * some.sum() if cd.rank() else loss).backward()
        assert (some.grad.tolist(), every.grad.tolist()) == ([6.5, 6.5], [3.0, 3.0])
        optimizer.apply([some.grad, every.grad], held)


@ranks(2)
def case_after_a_pass_that_fails_sums_are_made_anew() -> None:
    """All ranks forget it; only what was not cleared is added up again, and refused."""
    if keras.backend.backend() != "torch" or "TEST_KERAS_BACKENDS" in os.environ:
        return
    import torch

    def fail(_: torch.Tensor) -> None:
        raise MemoryError

    held = [keras.Variable([1.0, 1.0], name=name) for name in ("first", "second")]
    optimizer = cd.DistributedOptimizer(keras.optimizers.SGD(0.1), op=cd.Sum)
    optimizer.build(held)
    first, second = (variable.value for variable in held)

    def passed(*, fails: bool = False) -> None:
        last = torch.zeros((), requires_grad=True) * 1.0
        if fails:
            last.register_hook(fail)
        (last + (first.sum() + second.sum()) * (cd.rank() + 1.0)).backward()

    for number in range(5):
        with pytest.raises(MemoryError if cd.rank() else cd.DiscardedStepError):
            passed(fails=cd.rank() == 1)
        first.grad = second.grad = None
        passed()
        assert first.grad.tolist() == second.grad.tolist() == [3.0, 3.0]
        if number != 1:  # that step is left out
            optimizer.apply([first.grad, second.grad], held)
        first.grad = second.grad = None
    passed()
    first.grad = None
    with pytest.raises(cd.CoorddError, match="another backward pass before the step"):
        passed()


@ranks(2)
def case_gradients_of_another_function_are_reduced_after_a_pass_that_is_left_out() -> None:
    if keras.backend.backend() != "torch" or "TEST_KERAS_BACKENDS" in os.environ:
        return
    import torch

    held = keras.Variable([1.0, 1.0], name="held")
    optimizer = cd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([held])
    for number in range(1, 4):
        (held.value.sum() * 100.0).backward()
        held.value.grad = None
        found = torch.autograd.grad(held.value.sum() * (cd.rank() + 1.0), [held.value])
        optimizer.apply(found, [held])
        assert held.numpy().tolist() == [1.0 - 1.5 * number] * 2


@ranks(2)
def case_a_model_that_is_compiled_anew_leaves_its_optimizer() -> None:
    """Its gradients are reduced as the new optimizer says, also if the script has kept the one before."""
    for kind in ("plain", "passes", "partial"):
        held = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dense(1)])
        held.set_weights([np.ones_like(value) for value in held.get_weights()])
        x = np.full((4, 3), cd.rank() + 1.0, "float32")
        y = np.zeros((4, 1), "float32")
        kept = cd.DistributedOptimizer(keras.optimizers.SGD(0.0), op=cd.Sum)
        held.compile(optimizer=kept, loss="mse")
        held.train_on_batch(x, y)
        optimizer = keras.optimizers.SGD(0.01)
        if kind == "passes":
            optimizer = cd.DistributedOptimizer(optimizer, op=cd.Sum, backward_passes_per_step=2)
        elif kind == "partial":
            optimizer = cd.PartialDistributedOptimizer(
                optimizer, op=cd.Sum, local_layers=held.layers[0], scale_local_gradients=False
            )
        held.compile(optimizer=optimizer, loss="mse")
        for _ in range(2 if kind == "passes" else 1):
            held.train_on_batch(x, y)
        # The output is 2 (3 x + 1) + 1, and the gradient of the last bias twice that; of the first bias, too.
        mine, both = 2 * (6 * (cd.rank() + 1.0) + 3), 2 * (9 + 15)
        first, last = {"plain": (mine, mine), "passes": (2 * both, 2 * both), "partial": (mine, both)}[kind]
        assert held.get_weights()[1] == pytest.approx(1 - 0.01 * first, rel=1e-4)
        assert held.get_weights()[3] == pytest.approx(1 - 0.01 * last, rel=1e-4)
        assert kept is not held.optimizer


def case_other_backends_are_refused() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keras.backend, "backend", lambda: "jax")
        with pytest.raises(cd.ArgumentError, match="Keras runs on 'jax' here"):
            cd.DistributedOptimizer(keras.optimizers.SGD())


def case_an_optimizer_may_make_several_steps_in_one_graph() -> None:
    """As GANs do, and those that train parts of a model in turn."""

    class Twice(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.layer = keras.layers.Dense(2, kernel_initializer="ones")
            self.other = keras.layers.Dense(2, kernel_initializer="ones")

        def call(self, x):
            return self.other(self.layer(x))

        def train_step(self, data):
            import tensorflow as tf

            x, y = data
            for part in (self.layer, self.other, self.layer):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((self(x) - y) ** 2)
                own = part.trainable_variables
                self.optimizer.apply_gradients(zip(tape.gradient(loss, own), own, strict=True))
            return {"loss": loss}

    def trained(optimizer, x, y) -> list[np.ndarray]:
        found = Twice()
        found(x[:1])
        optimizer.build(found.trainable_variables)
        found.compile(optimizer)
        found.fit(x, y, batch_size=len(x), epochs=3, shuffle=False, verbose=0)
        return found.get_weights()

    if keras.backend.backend() == "tensorflow" and "TEST_KERAS_BACKENDS" not in os.environ:
        x, _ = data(1)
        part, _ = mine(1)
        one = trained(cd.DistributedOptimizer(keras.optimizers.SGD(0.1)), part, part[:, :2])
        other = trained(keras.optimizers.SGD(0.1), x, x[:, :2])
        for mine_, expected in zip(one, other, strict=True):
            np.testing.assert_allclose(mine_, expected, rtol=1e-5, atol=1e-6)


def case_a_weight_without_a_dimension() -> None:
    class Scaled(keras.layers.Layer):
        def build(self, shape) -> None:
            self.factor = self.add_weight(shape=(), initializer="ones")

        def call(self, x):
            return x * self.factor

    found = keras.Sequential([keras.Input((8,)), Scaled()])
    found.compile(cd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    x, _ = mine(1)
    found.fit(x, 2 * x, batch_size=len(x), verbose=0)
    whole, _ = data(1)
    expected = 1 + 0.1 * 2 * float((whole**2).mean())
    assert float(found.get_weights()[0]) == pytest.approx(expected, rel=1e-5)


def case_what_is_made_of_a_distributed_optimizers_config_is_plain() -> None:
    optimizer = cd.DistributedOptimizer(keras.optimizers.Adam(0.01), backward_passes_per_step=2)
    clone = type(optimizer).from_config(optimizer.get_config())
    assert isinstance(clone, keras.optimizers.Adam)
    cd.DistributedOptimizer(clone)
    found = compiled(optimizer)
    optimizer.build(found.trainable_variables)
    plain = keras.optimizers.Adam(0.01)
    plain.build(found.trainable_variables)
    assert [each.shape for each in optimizer.variables] == [each.shape for each in plain.variables]


def case_compressions_with_a_way_of_their_own_are_refused() -> None:
    """Ranks of both backends make the same number of calls, else one's second would be another's first."""
    wrong: object = "fp8"
    if keras.backend.backend() == "torch":
        import coordd.torch

        wrong = coordd.torch.Compression.int8
    with pytest.raises((cd.ArgumentError, AttributeError), match=r"is for coordd|no attribute"):
        cd.DistributedOptimizer(keras.optimizers.SGD(), compression=wrong)
    with pytest.raises(cd.ArgumentError, match="is no compression"):
        cd.DistributedOptimizer(keras.optimizers.SGD(), compression=3)


DIFFERENT = "start with different values of (first|last|small)"


@ranks(2, deadline=60)
def case_models_with_other_seeds_are_told_to_all_in_fit() -> None:
    """On each backend, and on ranks with different ones; afterwards the ranks still work together."""
    for details in ({}, {"run_eagerly": True}):
        found = model(seed=cd.rank())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        found.compile(cd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss, **details)
        x, y = mine(4)
        with pytest.raises(Exception, match=DIFFERENT):
            found.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        assert cd.allreduce(np.array([float(cd.rank())])).tolist() == [0.5]


@ranks(2, deadline=60)
def case_models_whose_layers_have_other_numbers_are_told_how_to_have_the_same() -> None:
    """As where one rank has made another model before."""
    x, y = mine(4)

    def fit() -> None:
        found = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Dense(3, kernel_initializer="ones")])
        found.compile(cd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "sparse_categorical_crossentropy")
        found.fit(x, y, batch_size=4, verbose=0)

    keras.backend.clear_session()
    if cd.rank():
        keras.layers.Dense(2)
    told = "only names differ, which Keras numbers in each process: give the layers names"
    with pytest.raises(Exception, match=told):
        fit()
    keras.backend.clear_session()
    fit()


@ranks(2, deadline=60)
def case_models_with_other_seeds_are_told_to_all_in_a_loop() -> None:
    found = model(seed=cd.rank())
    optimizer = cd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    gradients = [keras.ops.ones(variable.shape) for variable in found.trainable_variables]
    with pytest.raises(cd.MismatchError, match=DIFFERENT):  # noqa: PT012 - the check comes with the second step
        for _ in range(3):
            optimizer.apply(gradients, found.trainable_variables)
    assert cd.allreduce(np.array([float(cd.rank())])).tolist() == [0.5]
