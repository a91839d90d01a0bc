"""Keras models in stages train as in one piece: on every backend, and with ranks on different ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers, ops

import coordd.keras as cd
from tests.mpi.cases import ranks

FLUSHING = ("gpipe", "interleaved", "zb-h1", "zb-v")


@contextmanager
def doubles() -> Iterator[None]:
    policy, kind = keras.config.dtype_policy(), keras.config.floatx()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(kind)
        keras.config.set_dtype_policy(policy)


def chain() -> keras.Model:
    tanh = [layers.Dense(6, activation="tanh") for _ in range(6)]
    return keras.Sequential([layers.Flatten(), *tanh, layers.Dense(3)])


def skips() -> keras.Model:
    """Two inputs, a value that skips stages, an addition, and a layer without weights."""
    one, other = keras.Input((2, 3), name="one"), keras.Input((4,), name="other")
    start = layers.Flatten()(one)
    hidden = layers.Dense(6, activation="tanh")(start)
    for _ in range(3):
        hidden = layers.Dense(6, activation="tanh")(hidden)
    joined = layers.Concatenate()([hidden, start, other]) * 2.0
    return keras.Model([one, other], layers.Dense(3)(layers.Dense(5, activation="tanh")(joined) + 1.0))


def tied() -> keras.Model:
    """A layer that is called at both ends, and one that has another's weights."""
    seen = keras.Input((2, 3))
    again = layers.Dense(6, activation="tanh", name="again")
    hidden = again(layers.Flatten()(seen))
    for _ in range(4):
        hidden = layers.Dense(6, activation="tanh")(hidden)
    return keras.Model(seen, layers.Dense(3)(again(hidden)))


def shared() -> keras.Model:
    """Layers with and without weights whose first call is read behind the cut as well as their second."""
    seen = keras.Input((2, 3))
    bent, again = layers.Activation("tanh"), layers.Dense(6, name="again")
    first = bent(again(layers.Flatten()(seen)))
    return keras.Model(seen, layers.Dense(3)(layers.Add()([bent(again(layers.Dense(6)(first))), first])))


MODELS = {"chain": chain, "skips": skips, "tied": tied, "shared": shared}


def seeded(make) -> keras.Model:
    """Weights that are equal on all ranks and backends."""
    model = make()
    if not model.built:
        model.build((None, 2, 3))
    random = np.random.default_rng(1)
    model.set_weights([random.normal(size=weight.shape) / 2 for weight in model.weights])
    return model


def data(name: str, rows: int) -> tuple:
    random = np.random.default_rng(2)
    x = random.normal(size=(rows, 2, 3))
    y = random.integers(0, 3, rows)
    return ([x, random.normal(size=(rows, 4))] if name == "skips" else x), y


def cross_entropy() -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)  # in the precision of this moment


def sgd(**details) -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.3, momentum=0.9, **details)


def staged(model, optimizer=None, **settings) -> cd.Pipeline:
    settings = {"microbatches": 4, "split": "layers", **settings}
    return cd.Pipeline(
        model, cd.Config(**settings), optimizer=optimizer or sgd(), loss=cross_entropy(), metrics=["accuracy"]
    )


def plain(model: keras.Model, optimizer=None) -> keras.Model:
    model.compile(optimizer or sgd(), cross_entropy(), metrics=["accuracy"])
    return model


def same(one: keras.Model, other: keras.Model, exact: float = 0.0) -> None:
    close(one.get_weights(), other.get_weights(), exact)


def close(mine: list, expected: list, exact: float = 0.0) -> None:
    """By default as close as Keras computes in float64: on PyTorch it takes sums in float32."""
    exact = exact or (1e-6 if "torch" in cd.allgather_object(keras.backend.backend()) else 1e-11)
    for one, other in zip(mine, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=exact, atol=exact)


def trained(name: str, **settings) -> None:
    """Two steps with batches whose microbatches have different numbers of rows."""
    x, y = data(name, 18)
    reuse = ["again"] if name in {"tied", "shared"} else ()
    pipe = staged(seeded(MODELS[name]), reuse=reuse, **settings)
    model = plain(seeded(MODELS[name]))
    for _ in range(2):
        expected = model.train_on_batch(x, y)[0]
        model.reset_metrics()
        np.testing.assert_allclose(pipe.train_on_batch(x, y), expected, rtol=1e-6)  # metrics are in float32
    same(pipe.whole(), model)
    close([pipe.predict(x)], [model.predict(x, verbose=0)])


@ranks(1, 2, deadline=100)
def case_every_schedule_and_model_trains_as_in_one_piece() -> None:
    with doubles():
        for name in MODELS:
            for schedule in FLUSHING if name == "chain" else ("1f1b",):
                trained(name, schedule=schedule)
        if cd.size() == 2:
            for counts in ([3, 5], [4, 4], [5, 3]):
                trained("shared", layers_per_proc=counts)


@ranks(4, deadline=100)
def case_replicas_train_as_in_one_piece() -> None:
    with doubles():
        for name in MODELS:
            trained(name, data_parallel=2)
        trained("chain", data_parallel=[2, 1, 1], schedule="1f1b")
        x, y = data("chain", 17)
        pipe, model = staged(seeded(chain), data_parallel=2), plain(seeded(chain))
        close([pipe.predict(x, batch_size=8)], [model.predict(x, verbose=0)])
        np.testing.assert_allclose(pipe.evaluate(x, y, batch_size=8), model.evaluate(x, y, verbose=0), rtol=1e-5)


@ranks(2, deadline=60)
def case_activations_may_be_computed_anew() -> None:
    with doubles():
        trained("skips", recompute=True)


@ranks(2)
def case_gradients_are_clipped_together() -> None:
    with doubles():
        x, y = data("chain", 12)
        for scale in (None, 64.0):
            pipe = staged(seeded(chain), sgd(global_clipnorm=0.05, loss_scale_factor=scale))
            model = plain(seeded(chain), sgd(global_clipnorm=0.05))
            for _ in range(2):
                pipe.train_on_batch(x, y)
                model.train_on_batch(x, y)
            same(pipe.whole(), model, 1e-6)


@ranks(2, deadline=60)
def case_averages_take_the_place_of_weights_at_the_end() -> None:
    x, y = data("chain", 12)
    details = {"use_ema": True, "ema_momentum": 0.5}
    pipe, model = staged(seeded(chain), sgd(**details)), plain(seeded(chain), sgd(**details))
    for each in (pipe, model):
        each.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    same(pipe.whole(), model, 1e-4)


@ranks(2)
def case_stale_weights_follow_their_closed_forms() -> None:
    """2BW's gradients are those of the weights before the last step."""
    with doubles():
        x, y = data("chain", 12)
        pipe = staged(seeded(chain), keras.optimizers.SGD(0.3), schedule="2bw")
        now = before = seeded(chain).get_weights()
        for _ in range(4):
            pipe.train_on_batch(x, y)
            gradient = _gradient(before, x, y)
            before, now = now, [value - 0.3 * each for value, each in zip(now, gradient, strict=True)]
        close(pipe.whole().get_weights(), now)


@ranks(2)
def case_each_microbatch_may_be_a_step() -> None:
    """PipeDream: microbatch ``t`` meets the weights after ``t - 1`` steps in the first of two stages."""
    with doubles():
        x, y = data("chain", 8)
        pipe = staged(seeded(chain), keras.optimizers.SGD(0.3), schedule="pipedream", layers_per_proc=[4, 4])
        pipe.train_on_batch(x, y)
        now = stale = seeded(chain).get_weights()
        for first in range(0, 8, 2):
            gradient = _gradient([*stale[:6], *now[6:]], x[first : first + 2], y[first : first + 2])
            stale, now = now, [value - 0.3 * each for value, each in zip(now, gradient, strict=True)]
        close(pipe.whole().get_weights(), now)


def _gradient(weights, x, y) -> list:
    model = plain(seeded(chain), keras.optimizers.SGD(1.0))
    model.set_weights(weights)
    model.train_on_batch(x, y)
    return [before - after for before, after in zip(weights, model.get_weights(), strict=True)]


@ranks(2, 4, deadline=60)
def case_statistics_are_alike_on_all_replicas() -> None:
    model = keras.Sequential([keras.Input((2, 3)), layers.BatchNormalization(), layers.Flatten(), layers.Dense(3)])
    pipe = staged(model, data_parallel=cd.size() // 2, layers_per_proc=[2, 1])
    x, y = data("chain", 16)
    for _ in range(3):
        pipe.train_on_batch(x, y)
    pipe.whole()
    found = cd.allgather(model.layers[0].moving_mean.numpy()[None])
    assert np.abs(found[0]).max() > 0
    np.testing.assert_array_equal(found, np.repeat(found[:1], cd.size(), 0))


@ranks(2, deadline=60)
def case_fit_is_that_of_keras() -> None:
    x, y = data("chain", 40)
    x = x.astype("float32")

    class Halves(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None) -> None:
            self.model.optimizer.learning_rate = self.model.optimizer.learning_rate * 0.5
            assert set(logs) == {"loss", "accuracy", "val_loss", "val_accuracy"}

    def fitted(of, **more):
        callbacks = [Halves(), keras.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0, start_from_epoch=2)]
        held_out = (x[:10], y[:10])
        return of.fit(
            x, y, batch_size=16, epochs=9, shuffle=False, callbacks=callbacks, validation_data=held_out, **more
        )

    pipe, model = staged(seeded(chain)), plain(seeded(chain))
    mine, expected = fitted(pipe, verbose=0).history, fitted(model, verbose=0).history
    assert mine.keys() == expected.keys()
    for name, values in expected.items():
        assert 1 < len(values) < 9
        np.testing.assert_allclose(mine[name], values, rtol=1e-4, atol=1e-4)
    same(pipe.whole(), model, 1e-4)
    np.testing.assert_allclose(pipe.evaluate(x, y), model.evaluate(x, y, verbose=0), rtol=1e-4)
    assert pipe.evaluate(x, y, return_dict=True).keys() == {"loss", "accuracy"}


@ranks(2, deadline=60)
def case_dropout_depends_on_the_seed_alone() -> None:
    def dropping() -> keras.Model:
        return keras.Sequential(
            [
                layers.Flatten(),
                layers.Dense(6),
                layers.Dropout(0.5),
                layers.Dense(6),
                layers.Dropout(0.5),
                layers.Dense(3),
            ]
        )

    x, y = data("chain", 16)
    found = []
    for settings in ({}, {"recompute": True}, {"layers_per_proc": [5, 1]}, {"seed": 5}):
        pipe = staged(seeded(dropping), **{"seed": 4, "layers_per_proc": [3, 3], **settings})
        for _ in range(2):
            pipe.train_on_batch(x, y)
        found.append(np.concatenate([np.ravel(weight) for weight in pipe.whole().get_weights()]))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5, atol=1e-6)
    if "torch" not in cd.allgather_object(keras.backend.backend()):  # whose layers draw from one generator
        np.testing.assert_allclose(found[0], found[2], rtol=1e-5, atol=1e-6)
    assert np.abs(found[0] - found[3]).max() > 1e-3


@ranks(2, deadline=60)
def case_masks_and_integers_travel() -> None:
    def sequence() -> keras.Model:
        words = keras.Input((5,), dtype="int32")
        hidden = layers.Dense(4)(layers.Embedding(9, 4, mask_zero=True)(words))
        later = ops.cast(words + 1, "float32")
        return keras.Model(
            words, layers.Dense(3)(layers.Concatenate()([layers.GlobalAveragePooling1D()(hidden), later]))
        )

    x = np.random.default_rng(0).integers(0, 3, (12, 5))
    y = np.arange(12) % 3
    model, pipe = plain(seeded(sequence)), staged(seeded(sequence), layers_per_proc=[3, 5])
    for _ in range(2):
        model.train_on_batch(x, y)
        pipe.train_on_batch(x, y)
    same(pipe.whole(), model, 1e-5)


@ranks(2, deadline=60)
def case_models_may_have_several_outputs_and_regularisers() -> None:
    def made() -> keras.Model:
        seen = keras.Input((2, 3))
        hidden = layers.Dense(4, kernel_regularizer="l2", activation="tanh")(layers.Flatten()(seen))
        early = layers.Dense(3, name="early")(hidden)
        late = layers.Dense(3, name="late", kernel_regularizer="l2", activity_regularizer="l2")(layers.Dense(4)(hidden))
        return keras.Model(seen, {"late": late, "early": early})

    x, y = data("chain", 12)
    targets, losses = {"late": y, "early": y}, {"late": cross_entropy(), "early": cross_entropy()}
    model = seeded(made)
    model.compile(sgd(), losses)
    config = cd.Config(layers_per_proc=[3, 2], microbatches=3)
    pipe = cd.Pipeline(seeded(made), config, optimizer=sgd(), loss=losses)
    for _ in range(2):
        expected = model.train_on_batch(x, targets)
        found = pipe.train_on_batch(x, targets)
        model.reset_metrics()
        np.testing.assert_allclose(found, np.ravel(expected)[0], rtol=1e-3)
    same(pipe.whole(), model, 1e-3)
    found, expected = pipe.predict(x), model.predict(x, verbose=0)
    assert found.keys() == expected.keys()
    np.testing.assert_allclose(found["early"], expected["early"], rtol=1e-2, atol=1e-3)


@ranks(2, deadline=60)
def case_a_function_builds_only_what_is_needed() -> None:
    built: list[keras.Model] = []

    def build() -> keras.Model:
        keras.utils.set_random_seed(3)
        built.append(keras.Sequential([keras.Input((2, 3)), *chain().layers]))
        return built[-1]

    x, y = data("chain", 12)
    pipe = staged(build)
    pipe.train_on_batch(x, y)
    made = [variable._value is not None for variable in built[0].variables]
    assert any(made)
    assert not all(made)
    model = plain(build())
    model.train_on_batch(x, y)
    if len({*cd.allgather_object(keras.backend.backend())}) == 1:  # backends draw other numbers from the same seed
        same(pipe.whole(), model, 1e-5)


@ranks(2, deadline=60)
def case_layers_are_split_by_the_time_that_they_take() -> None:
    sizes = (8, 8, 8, 8, 1500, 1500)
    model = seeded(lambda: keras.Sequential([layers.Flatten(), *map(layers.Dense, sizes), layers.Dense(3)]))
    norm = keras.Sequential([keras.Input((2, 3)), layers.BatchNormalization(), layers.Flatten(), layers.Dense(3)])
    x, y = data("chain", 256)
    before = [each.copy() for each in norm.get_weights()]
    for each, wanted in ((model, 6), (norm, None)):
        pipe = staged(each, split="time", microbatches=2)
        pipe.predict(x)
        assert wanted is None or len(pipe.layout.spans[0]) == wanted
    close(norm.get_weights(), before)  # was measured, and not changed
    with pytest.raises(cd.ArgumentError, match="takes a model, and not a function that makes one"):
        staged(chain, split="time").train_on_batch(x, y)


@ranks(2, deadline=60)
def case_activations_may_travel_compressed() -> None:
    x, y = data("chain", 12)
    for compression in ("bf16", "int8"):
        model, pipe = plain(seeded(chain)), staged(seeded(chain), compression=compression)
        model.train_on_batch(x, y)
        pipe.train_on_batch(x, y)
        same(pipe.whole(), model, 2e-2)


@ranks(2, deadline=60)
def case_metrics_may_be_arrays() -> None:
    x, y = data("chain", 12)
    config, targets = cd.Config(layers_per_proc=[4, 4], microbatches=3), np.eye(3)[y]
    details = {"optimizer": "sgd", "loss": "mse", "metrics": [keras.metrics.F1Score(average=None)]}
    pipe, model = cd.Pipeline(seeded(chain), config, **details), seeded(chain)
    kinds = model.predict(x, verbose=0).argmax(1)
    found = pipe.evaluate(x, targets, return_dict=True)["f1_score"]
    for kind in range(3):
        guesses, truth = kinds == kind, y == kind
        expected = 2 * (guesses & truth).sum() / max(1, guesses.sum() + truth.sum())
        np.testing.assert_allclose(found[kind], expected, rtol=1e-5)


@ranks(2, deadline=60)
def case_replicas_draw_different_numbers() -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2, 3)), layers.Flatten(), layers.GaussianNoise(1.0), layers.Dense(3)])
    pipe = staged(model, data_parallel=2)
    pipe.train_on_batch(*data("chain", 12))
    (state,) = (np.array(keras.ops.convert_to_numpy(each)) for each in model.layers[1].non_trainable_variables)
    assert len({int(each[0]) for each in cd.allgather_object(state)}) == 2


@ranks(2, deadline=60)
def case_a_run_is_recorded() -> None:
    x, y = data("chain", 12)
    pipe = staged(seeded(chain))
    with pytest.raises(cd.ArgumentError, match="not split before its first batch"):
        pipe.record()
    pipe.train_on_batch(x, y)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(cd.broadcast_object(folder)) / "run.svg"
        assert "1f1b" in str(pipe.record(path)) or pipe.record()
        assert cd.rank() or path.read_text().startswith("<svg")
        cd.barrier()


@ranks(2, deadline=60)
def case_what_cannot_be_done_is_said() -> None:
    class Own(keras.Model):
        def call(self, inputs):
            return inputs

    x, y = data("chain", 12)
    for wrong, settings in {
        "cannot be split, for only its own code knows": {"model": Own()},
        "wants a Keras model, or a function that makes one": {"model": lambda: 3},
        "places 3 layers, but the model has 8": {"layers_per_proc": [1, 2]},
        "that a cut may separate: use at most 8 stages": {"schedule": "interleaved", "chunks": 8},
    }.items():
        model = settings.pop("model", None) or seeded(chain)
        with pytest.raises(cd.ArgumentError, match=wrong):
            staged(model, **settings).train_on_batch(x, y)
    for name, value in {"offload": True, "cuts": ["a"], "memory_cap": "1GiB", "split": "memory"}.items():
        with pytest.raises(cd.ArgumentError, match=f"{name}=.* is not for Keras's pipelines"):
            staged(seeded(chain), **{name: value})
    with pytest.raises(cd.ArgumentError, match="without DistributedOptimizer"):
        staged(seeded(chain), cd.DistributedOptimizer(sgd()))
    with pytest.raises(cd.ArgumentError, match="would skip steps on some ranks only"):
        staged(seeded(chain), keras.optimizers.LossScaleOptimizer(sgd()))
    pipe = staged(seeded(chain))
    with pytest.raises(cd.ArgumentError, match="equally many rows"):
        pipe.train_on_batch(x, y[:3])
    with pytest.raises(cd.ArgumentError, match="wants arrays, not a"):
        pipe.fit(iter([(x, y)]))
    with pytest.raises(cd.ArgumentError, match="the ranks of a pipeline differ in inputs"):
        pipe.train_on_batch(x + cd.rank(), y)
    with pytest.raises(cd.ArgumentError, match="differ in epochs"):
        pipe.fit(x, y, epochs=1 + cd.rank())
    with pytest.raises(cd.ArgumentError, match="is a pair"):
        pipe.fit(x, y, validation_data=(x, y, y))
    with pytest.raises(cd.ArgumentError, match="is a sum over rows"):
        cd.Pipeline(chain(), loss=keras.losses.MeanSquaredError(reduction="sum"))
    assert np.isfinite(pipe.train_on_batch(x, y))


def case_layers_that_need_each_other_stay_together() -> None:
    x, y = data("chain", 12)
    with pytest.raises(cd.ArgumentError, match="again"):
        staged(seeded(tied), layers_per_proc=[4, 4]).train_on_batch(x, y)


@ranks(2)
def case_two_stages_do_not_share_what_each_would_change() -> None:
    seen = keras.Input((2, 3))
    norm = layers.BatchNormalization(name="norm")
    model = keras.Model(seen, layers.Dense(3)(layers.Flatten()(norm(ops.tanh(norm(seen))))))
    x, y = data("chain", 12)
    with pytest.raises(cd.ArgumentError, match="each of which would keep statistics of its own"):
        staged(model, layers_per_proc=[2, 3], reuse=["norm"]).train_on_batch(x, y)
