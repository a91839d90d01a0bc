"""Keras models in stages train as in one piece: on every backend, and with ranks on different ones."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops

import coordd.keras as cd
from tests.keras_plugin.stages import (
    MODELS,
    chain,
    close,
    cross_entropy,
    data,
    doubles,
    plain,
    same,
    seeded,
    sgd,
    staged,
)
from tests.mpi.cases import ranks

FLUSHING = ("gpipe", "interleaved", "zb-h1", "zb-v")


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
            pipe = staged(pipe.whole(), pipe.optimizer)  # the optimizer still has its norm
            assert pipe.optimizer.global_clipnorm == 0.05
            pipe.train_on_batch(x, y)
            model.train_on_batch(x, y)
            same(pipe.whole(), model, 1e-6)


@ranks(2, deadline=60)
def case_frozen_layers_may_be_anywhere() -> None:
    """The check of the loss, and a second forward pass, must not assign to frozen weights that backward needs."""
    x, y = data("chain", 12)
    for place, recompute in ((-1, False), (-1, True), (4, True)):
        model, expected = seeded(chain), seeded(chain)
        model.layers[place].trainable = expected.layers[place].trainable = False
        pipe = staged(model, layers_per_proc=[3, 5], recompute=recompute)
        plain(expected)
        for _ in range(2):
            pipe.train_on_batch(x, y)
            expected.train_on_batch(x, y)
        same(pipe.whole(), expected, 1e-5)


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
def case_a_microbatch_without_weight_does_not_count() -> None:
    """The mean over its tokens, of which none counts, is NaN; its rows count in the losses of layers."""
    random = np.random.default_rng(3)
    x, y = random.normal(size=(12, 5, 4)), random.integers(-1, 3, (12, 5))
    y[3:6] = -1

    def tokens(truth, guess):
        counts = ops.cast(truth >= 0, guess.dtype)
        found = keras.losses.sparse_categorical_crossentropy(ops.maximum(truth, 0), guess, from_logits=True)
        return ops.sum(found * counts) / ops.sum(counts)

    def made() -> keras.Model:
        tanh = (layers.Dense(4, activation="tanh", activity_regularizer="l2") for _ in range(3))
        return keras.Sequential([keras.Input((5, 4)), *tanh])

    for recompute in (False, True):
        config = cd.Config(layers_per_proc=[1, 2], microbatches=4, recompute=recompute)
        pipe = cd.Pipeline(
            seeded(made), config, optimizer=sgd(), loss=tokens, weight=lambda _, truth: (truth >= 0).sum()
        )
        model = seeded(made)
        model.compile(sgd(), tokens)
        for _ in range(2):
            np.testing.assert_allclose(pipe.train_on_batch(x, y), np.ravel(model.train_on_batch(x, y))[0], rtol=1e-5)
            model.reset_metrics()
        same(pipe.whole(), model, 1e-5)
        assert np.isfinite(pipe.evaluate(x, y))


@ranks(2, deadline=60)
def case_a_schedule_goes_on_where_all_layers_of_a_rank_are_frozen() -> None:
    x, y = data("chain", 12)

    def made() -> keras.Model:
        model = chain()
        for layer in model.layers[:4]:
            layer.trainable = False
        return model

    def decaying() -> keras.optimizers.Optimizer:
        return keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5), use_ema=True)

    pipe = staged(seeded(made), decaying(), layers_per_proc=[4, 4])
    model = plain(seeded(made), decaying())
    for each in (pipe, model):
        each.fit(x, y, batch_size=12, epochs=4, shuffle=False, verbose=0)
    same(pipe.whole(), model, 1e-4)
    assert float(ops.convert_to_numpy(pipe.optimizer.learning_rate)) == pytest.approx(0.1 / 16)


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
def case_a_function_may_assign_weights() -> None:
    """For example by `load_weights`; the values are those that the ranks compare."""
    x, y = data("chain", 12)

    def made(factor: float = 1.0) -> keras.Model:
        model = keras.Sequential([layers.Normalization(axis=None), *chain().layers])
        model.build((None, 2, 3))
        model.layers[0].adapt(x)
        random = np.random.default_rng(7)
        for weight in model.trainable_variables:
            weight.assign(random.normal(size=weight.shape) * factor)
        return model

    pipe, model = staged(made), plain(made())
    np.testing.assert_allclose(pipe.predict(x), model.predict(x, verbose=0), rtol=1e-4, atol=1e-5)
    for each in (pipe, model):
        each.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
    same(pipe.whole(), model, 1e-4)
    if len(set(cd.allgather_object(keras.backend.backend()))) > 1:
        return  # initial values are not compared between backends
    for call in ("predict", "fit", "train_on_batch"):
        with pytest.raises(cd.MismatchError, match="initial values of variable 5 "):
            getattr(staged(lambda: made(1.0 + cd.rank())), call)(x, *([] if call == "predict" else [y]))


class Unnamed(layers.Layer):
    """Gives its variable no name, so Keras numbers it."""

    def build(self, shape) -> None:
        self.factor = self.add_weight(shape=shape[1:], initializer="ones")

    def call(self, inputs):
        return inputs * self.factor


@ranks(2, deadline=60)
def case_variables_need_no_names() -> None:
    x, y = data("chain", 12)

    def made() -> keras.Model:
        more = [layer for _ in range(3) for layer in (layers.Dense(6, activation="tanh"), Unnamed())]
        model = keras.Sequential([keras.Input((2, 3)), layers.Flatten(), *more, layers.Dense(3)])
        random = np.random.default_rng(1)
        for variable in model.trainable_variables:
            variable.assign(random.normal(size=variable.shape))
        return model

    for _ in range(cd.rank()):
        Unnamed()(np.ones((1, 6)))  # from here on the ranks count differently
    for settings in ({}, {"layers_per_proc": [8], "data_parallel": 2}):
        for model in (made(), made):
            pipe, whole = staged(model, **settings), plain(made())
            for each in (pipe, whole):
                each.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
            same(pipe.whole(), whole, 1e-4)


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
def case_replicas_draw_different_numbers() -> None:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2, 3)), layers.Flatten(), layers.GaussianNoise(1.0), layers.Dense(3)])
    pipe = staged(model, data_parallel=2)
    pipe.train_on_batch(*data("chain", 12))
    (state,) = (np.array(keras.ops.convert_to_numpy(each)) for each in model.layers[1].non_trainable_variables)
    assert len({int(each[0]) for each in cd.allgather_object(state)}) == 2


@ranks(2, deadline=60)
def case_replicas_that_become_different_are_told_of_it() -> None:
    x, y = data("chain", 16)
    pipe = staged(seeded(chain), data_parallel=2)
    pipe.train_on_batch(x, y)
    if cd.rank():
        for variable in pipe.optimizer._trainable_variables:
            variable.assign(variable * 1.1)
    pipe.train_on_batch(x, y)
    with pytest.raises(cd.MismatchError, match=r"no longer have the same values of .*on rank 0; .* on rank 1"):
        pipe.train_on_batch(x, y)
    pipe.train_on_batch(x, y)
