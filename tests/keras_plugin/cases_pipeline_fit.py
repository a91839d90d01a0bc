"""``fit`` of a Keras model in stages is Keras's, and what cannot be done is said on all ranks."""

from __future__ import annotations

import functools
import itertools
import re
import tempfile
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers, ops

import coordd.keras as cd
from tests.keras_plugin.stages import (
    chain,
    cross_entropy,
    data,
    doubles,
    plain,
    same,
    seeded,
    sgd,
    staged,
    tied,
)
from tests.mpi.cases import ranks


@ranks(2, deadline=60)
def case_averages_take_the_place_of_weights_at_the_end() -> None:
    x, y = data("chain", 12)
    details = {"use_ema": True, "ema_momentum": 0.5}
    pipe, model = staged(seeded(chain), sgd(**details)), plain(seeded(chain), sgd(**details))
    seen: list[list[np.ndarray]] = []

    class Last(keras.callbacks.Callback):
        def on_train_end(self, logs=None) -> None:
            seen.append((pipe.whole() if self.model is pipe else model).get_weights())

    for each in (pipe, model):
        each.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[Last()])
    same(pipe.whole(), model, 1e-4)
    for mine, expected in zip(*seen, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-4)
    before = model.get_weights()
    pipe = staged(model, keras.optimizers.SGD(use_ema=True))
    pipe.fit(x, y, epochs=0, verbose=0)  # without a step there are no averages
    for mine, expected in zip(pipe.whole().get_weights(), before, strict=True):
        np.testing.assert_array_equal(mine, expected)


@ranks(2, deadline=60)
def case_no_rank_averages_weights_if_training_fails_on_one() -> None:
    x, y = data("chain", 12)
    details = {"use_ema": True, "ema_momentum": 0.5}
    pipe = staged(seeded(chain), sgd(**details))
    raw, model = plain(seeded(chain)), plain(seeded(chain), sgd(**details))

    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None) -> None:
            raise KeyError("the disk is full")

    for each, failing in ((pipe, [Fails()] * cd.rank()), (model, [Fails()])):
        with pytest.raises((KeyError, cd.RefusedError), match="the disk is full"):
            each.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=failing)
    raw.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    same(pipe.whole(), raw, 1e-4)
    same(pipe.whole(), model, 1e-4)
    for each in (pipe, model):
        each.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    same(pipe.whole(), model, 1e-4)


@ranks(2, deadline=60)
def case_rows_are_shuffled_alike_after_a_fit_that_fails_on_one_rank() -> None:
    """Also if it fails there before its first step."""
    x, y = data("chain", 12)

    class Accuracy(keras.metrics.SparseCategoricalAccuracy):
        def reset_state(self) -> None:
            if armed and cd.rank():
                raise KeyError("not now")
            super().reset_state()

    armed = False
    pipe, other = (
        cd.Pipeline(
            seeded(chain),
            cd.Config(microbatches=4, split="layers"),
            optimizer=sgd(),
            loss=cross_entropy(),
            metrics=[Accuracy()],
        )
        for _ in range(2)
    )
    for each in (pipe, other):
        each.fit(x, y, batch_size=4, verbose=0)
    armed = True
    with pytest.raises((KeyError, cd.RefusedError), match="not now"):
        pipe.fit(x, y, batch_size=4, verbose=0)
    armed = False
    for each in (pipe, other):
        each.fit(x, y, batch_size=4, verbose=0)
    same(pipe.whole(), other.whole())


@ranks(2, deadline=60)
def case_an_evaluation_in_a_callback_leaves_the_metrics_of_training_alone() -> None:
    x, y = data("chain", 12)
    pipe, alone = staged(seeded(chain)), plain(seeded(chain))

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None) -> None:
            results.append(pipe.evaluate(x, y, batch_size=4))
            pipe.predict(x)

        def on_epoch_end(self, epoch, logs=None) -> None:
            pipe.test_on_batch(x[:4], y[:4])  # counts in no epoch, as in Keras, which resets metrics before each

    results: list[list[float]] = []
    mine = pipe.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[Looks()])
    expected = alone.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    for name, values in expected.history.items():
        np.testing.assert_allclose(mine.history[name], values, rtol=1e-4)
    np.testing.assert_allclose(results[-1], alone.evaluate(x, y, batch_size=4, verbose=0), rtol=1e-4)
    same(pipe.whole(), alone, 1e-4)


@ranks(2, deadline=60)
def case_averages_include_variables_without_gradients() -> None:
    """All variables of the first rank are behind `stop_gradient`, or were frozen in an earlier pipeline's steps."""
    x, y = data("chain", 12)
    for frequency in (None, 3):
        details = {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": frequency}
        pipe, model = (
            staged(seeded(stopped), sgd(**details), layers_per_proc=[3, 1]),
            plain(seeded(stopped), sgd(**details)),
        )
        for each in (pipe, model):
            each.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        same(pipe.whole(), model, 1e-4)
    model = seeded(chain)
    for layer in model.layers[:4]:
        layer.trainable = False
    optimizer = keras.optimizers.SGD(0.0, use_ema=True)  # the averages are the values, which do not change
    found = []
    for _ in range(2):
        pipe = staged(model, optimizer, layers_per_proc=[4, 4])
        pipe.fit(x, y, batch_size=12, epochs=2, verbose=0)
        found.append(pipe.whole().get_weights())
        for layer in model.layers:
            layer.trainable = True
    for mine, expected in zip(*found, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-6)


@ranks(2, deadline=60)
def case_averages_of_a_compiled_model_go_on() -> None:
    """Its optimizer has the variables of the whole model, in another order than the stages."""
    x, y = data("chain", 12)
    for settings in ({"layers_per_proc": [8], "data_parallel": 2}, {"layers_per_proc": [4, 4]}):
        models = [plain(seeded(branches), sgd(use_ema=True, ema_momentum=0.5)) for _ in range(2)]
        for model in models:
            model.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0)
        pipe = staged(models[0], models[0].optimizer, **settings)
        for each in (pipe, models[1]):
            each.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
        same(pipe.whole(), models[1], 1e-4)


@ranks(2, deadline=60)
def case_whole_models_have_no_part_of_the_state_of_an_optimizer() -> None:
    x, y = data("chain", 12)
    for settings, whole in (({"layers_per_proc": [8], "data_parallel": 2}, True), ({"layers_per_proc": [4, 4]}, False)):
        model = plain(seeded(chain), keras.optimizers.Adam(0.01))
        model.fit(x, y, shuffle=False, verbose=0)
        pipe = staged(model, model.optimizer, **settings)
        pipe.fit(x, y, batch_size=12, verbose=0)
        found = pipe.whole()
        assert (found.optimizer is pipe.optimizer) == whole
        assert found.optimizer.built == whole
        assert float(found.optimizer.learning_rate) == pytest.approx(0.01)
        found.fit(x, y, shuffle=False, verbose=0)
        pipe.fit(x, y, batch_size=12, verbose=0)

    class Silent(keras.optimizers.SGD):
        def get_config(self):
            raise NotImplementedError

    model = plain(seeded(chain), Silent(0.1))
    pipe = staged(model, model.optimizer, layers_per_proc=[4, 4])
    pipe.fit(x, y, batch_size=12, verbose=0)
    assert pipe.whole().optimizer is None
    np.testing.assert_allclose(pipe.whole().evaluate(x, y, verbose=0), pipe.evaluate(x, y), rtol=1e-4)


@ranks(2, deadline=60)
def case_an_optimizer_serves_one_split() -> None:
    x, y = data("chain", 12)
    model, optimizer = seeded(chain), keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    staged(model, optimizer, layers_per_proc=[5, 3]).predict(x)  # takes no step
    for _ in range(2):
        pipe = staged(model, optimizer, layers_per_proc=[4, 4])
        pipe.fit(x, y, batch_size=12, verbose=0)
        with pytest.raises(cd.MismatchError, match="call whole\\(\\) of an earlier pipeline of it"):
            staged(model, optimizer, layers_per_proc=[4, 4]).fit(x, y, batch_size=12, verbose=0)
        pipe.whole()
    with pytest.raises(cd.CoorddError, match="has trained other layers on this rank in an earlier pipeline, and has"):
        staged(model, optimizer, layers_per_proc=[5, 3]).fit(x, y, batch_size=12, verbose=0)
    staged(model, keras.optimizers.Adam(0.01), layers_per_proc=[5, 3]).fit(x, y, batch_size=12, verbose=0)


@ranks(2)
def case_functions_compile_no_model() -> None:
    x, y = data("chain", 12)
    with pytest.raises(cd.ArgumentError, match="compile nothing in it, and call load_model"):
        staged(lambda: plain(seeded(chain))).fit(x, y, verbose=0)


@ranks(2, deadline=60)
def case_callbacks_are_told_of_validation() -> None:
    x, y = data("chain", 12)
    seen: list[str] = []

    class Told(keras.callbacks.Callback):
        def on_test_begin(self, logs=None) -> None:
            seen.append("begin")

        def on_test_end(self, logs=None) -> None:
            seen.append(" ".join(sorted(logs)))

    pipe = staged(seeded(chain))
    pipe.fit(x, y, batch_size=12, epochs=2, verbose=0, validation_data=(x, y), callbacks=[Told()])
    assert seen == ["begin", "accuracy loss"] * 2


def branches() -> keras.Model:
    seen = keras.Input((2, 3))
    flat = layers.Flatten()(seen)
    one, other = (layers.Dense(6, activation="tanh")(flat) for _ in range(2))
    one = layers.Dense(6, activation="tanh")(one)
    for _ in range(2):
        other = layers.Dense(6, activation="tanh")(other)
    return keras.Model(seen, layers.Dense(3)(layers.Add()([other, one])))


def stopped() -> keras.Model:
    seen = keras.Input((2, 3))
    hidden = layers.Dense(6, activation="tanh")(layers.Flatten()(seen))
    return keras.Model(seen, layers.Dense(3)(layers.Lambda(ops.stop_gradient)(hidden)))


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
def case_callbacks_know_whether_a_metric_should_be_large_or_small() -> None:
    x, y = data("chain", 40)
    x = x.astype("float32")
    measures = {"loss": cross_entropy(), "metrics": ["accuracy", "sparse_categorical_crossentropy"]}

    def fitted(of):
        stopping = keras.callbacks.EarlyStopping("val_accuracy", patience=4)
        crossed = keras.callbacks.EarlyStopping("val_sparse_categorical_crossentropy", patience=20)
        slower = keras.callbacks.ReduceLROnPlateau("accuracy", factor=0.5, patience=1)
        history = of.fit(
            x,
            y,
            batch_size=8,
            epochs=9,
            shuffle=False,
            verbose=0,
            callbacks=[stopping, crossed, slower],
            validation_data=(x[:10], y[:10]),
        )
        return history.history, [stopping.stopped_epoch, stopping.best, crossed.best, slower.best]

    pipe = cd.Pipeline(seeded(chain), cd.Config(microbatches=4, split="layers"), optimizer=sgd(), **measures)
    model = seeded(chain)
    model.compile(sgd(), **measures)
    (mine, found), (expected, looked) = fitted(pipe), fitted(model)
    assert looked[0]  # training stops early, after epochs that were better than the first
    np.testing.assert_allclose(found, looked, rtol=1e-3)
    for name, values in expected.items():
        np.testing.assert_allclose(mine[name], values, rtol=1e-3, atol=1e-4, err_msg=name)


class Stops(keras.callbacks.Callback):
    """Ends training in one of Keras's calls."""

    def __init__(self, call: str, number: int) -> None:
        super().__init__()
        self._calls = 0

        def stop(*_args: object, **_details: object) -> None:
            self.model.stop_training = self._calls == number
            self._calls += 1

        setattr(self, call, stop)


@ranks(2, deadline=60)
def case_callbacks_end_training_after_the_step() -> None:
    x, y = data("chain", 20)
    for stop in (("on_train_batch_end", 5), ("on_epoch_begin", 1), ("on_train_begin", 0), ("on_epoch_end", 0)):
        pipe, model = staged(seeded(chain)), plain(seeded(chain))
        held = (x[:8], y[:8])
        both = [
            each.fit(
                x, y, batch_size=5, epochs=3, shuffle=False, verbose=0, validation_data=held, callbacks=[Stops(*stop)]
            )
            for each in (pipe, model)
        ]
        same(pipe.whole(), model, 1e-5)
        mine, expected = (found.history for found in both)
        assert list(mine) == list(expected), stop
        for name, values in expected.items():
            np.testing.assert_allclose(mine[name], values, rtol=1e-4)


@ranks(2, deadline=60)
def case_checkpoints_are_of_the_whole_model() -> None:
    x, y = data("chain", 12)
    folder = Path(cd.broadcast_object(tempfile.mkdtemp() if cd.rank() == 0 else ""))
    checkpoints = [
        keras.callbacks.ModelCheckpoint(folder / "{epoch}.keras", monitor="loss", save_best_only=True),
        keras.callbacks.ModelCheckpoint(folder / "last.weights.h5", save_weights_only=True),
    ]
    pipe = staged(seeded(chain))
    pipe.fit(x, y, batch_size=12, epochs=2, verbose=0, callbacks=checkpoints)
    saved = keras.models.load_model(folder / "2.keras", compile=False)
    same(pipe.whole(), saved)
    again = chain()
    again.build((None, 2, 3))
    again.load_weights(folder / "last.weights.h5")
    same(pipe.whole(), again)
    assert (folder / "1.keras").exists()


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


class Several(keras.metrics.Metric):
    """Gives several results by name."""

    def __init__(self) -> None:
        super().__init__(name="several")
        self.sum = self.add_variable((), "zeros", name="sum")
        self.rows = self.add_variable((), "zeros", name="rows")

    def update_state(self, truth, guess, sample_weight=None) -> None:
        self.sum.assign_add(ops.sum(ops.cast(guess, self.sum.dtype)))
        self.rows.assign_add(ops.cast(ops.shape(guess)[0], self.rows.dtype))

    def result(self):
        return {"mean": self.sum / self.rows, "rows": ops.convert_to_tensor(self.rows)}


@ranks(2, deadline=60)
def case_metrics_may_have_several_results() -> None:
    x, y = data("chain", 12)
    config = cd.Config(layers_per_proc=[4, 4], microbatches=3)
    pipe = cd.Pipeline(seeded(chain), config, optimizer=sgd(), loss=cross_entropy(), metrics=[Several()])
    model = seeded(chain)
    model.compile(sgd(), cross_entropy(), metrics=[Several()])
    details = {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0, "validation_data": (x, y)}
    found, expected = pipe.fit(x, y, **details).history, model.fit(x, y, **details).history
    assert found.keys() == expected.keys() >= {"mean", "val_rows"}
    np.testing.assert_allclose(pipe.evaluate(x, y), model.evaluate(x, y, verbose=0), rtol=1e-4)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, err_msg=name)


@ranks(2, deadline=60)
def case_losses_of_several_outputs_are_those_of_keras() -> None:
    """A check of the loss, and a second forward pass, must not count in them."""
    x, y = data("chain", 16)
    x = x.astype("float32")
    targets = [np.eye(3)[y], np.eye(3)[y] * 5]

    def made() -> keras.Model:
        seen = keras.Input((2, 3))
        hidden = layers.Dense(6, activation="tanh")(layers.Flatten()(seen))
        return keras.Model(seen, [layers.Dense(3, name="early")(hidden), layers.Dense(3, name="late")(hidden)])

    details = {"batch_size": 8, "epochs": 3, "shuffle": False, "verbose": 0, "validation_data": (x, targets)}
    model = seeded(made)
    metrics = [["mse", "mae"], ["mae"]]
    model.compile(keras.optimizers.SGD(0.1), ["mse", "mae"], metrics=metrics)
    expected = model.fit(x, targets, **details).history
    for recompute in (False, True):
        config = cd.Config(split="layers", microbatches=4, recompute=recompute)
        pipe = cd.Pipeline(
            seeded(made), config, optimizer=keras.optimizers.SGD(0.1), loss=["mse", "mae"], metrics=metrics
        )
        found = pipe.fit(x, targets, **details).history
        assert found.keys() == expected.keys()
        listed, given = pipe.evaluate(x, targets), model.evaluate(x, targets, verbose=0)
        np.testing.assert_allclose(listed, given, rtol=1e-4)  # in the same order
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-4, err_msg=name)


@ranks(2, deadline=60)
def case_losses_of_several_outputs_count_by_weight() -> None:
    """As in the unsplit model."""
    random = np.random.default_rng(5)
    x, y = random.normal(size=(30, 5, 4)), random.integers(0, 3, (30, 5))
    y[:, 1:][random.random((30, 4)) < 0.6] = -1
    y[:4, 1:] = -1
    y[20:] = -1  # in the last batch nothing counts

    def made() -> keras.Model:
        seen = keras.Input((5, 4))
        hidden = layers.Dense(6, activation="tanh")(seen)
        return keras.Model(seen, [layers.Dense(3, name="early")(hidden), layers.Dense(3, name="late")(hidden)])

    losses = [keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1) for _ in range(2)]
    # Equal batches: in a compiled graph of TensorFlow, Keras counts each batch once, whatever its rows.
    details = {"batch_size": 10, "epochs": 2, "shuffle": False, "verbose": 0, "validation_data": (x, [y, y])}
    model = seeded(made)
    model.compile(keras.optimizers.SGD(0.1), losses)
    expected = model.fit(x, [y, y], **details).history
    for counts, replicas, recompute in (([1, 2], 1, False), ([1, 2], 1, True), ([3], 2, False)):
        config = cd.Config(layers_per_proc=counts, data_parallel=replicas, microbatches=3, recompute=recompute)
        pipe = cd.Pipeline(
            seeded(made),
            config,
            optimizer=keras.optimizers.SGD(0.1),
            loss=losses,
            weight=lambda _, truth: (truth[0] >= 0).sum(),
        )
        found = pipe.fit(x, [y, y], **details).history
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-4, err_msg=name)


class Largest(keras.metrics.Metric):
    """The largest value that the first replica has had."""

    def __init__(self, name: str = "largest") -> None:
        super().__init__(name=name)
        self.most = self.add_variable((), "zeros", aggregation="only_first_replica", name="most")

    def update_state(self, values) -> None:
        self.most.assign(ops.maximum(self.most, ops.max(values)))

    def result(self):
        return ops.convert_to_tensor(self.most)


class Sizes(layers.Layer):
    """Has metrics hear of the sizes of its inputs."""

    def __init__(self, **details) -> None:
        super().__init__(**details)
        self.mean, self.largest, self.sum = keras.metrics.Mean("size"), Largest(), keras.metrics.Sum("sum")

    def call(self, inputs):
        for metric in (self.mean, self.largest, self.sum):
            metric.update_state(ops.abs(inputs))
        return inputs


@ranks(2, deadline=60)
def case_metrics_of_layers_are_heard_of() -> None:
    x = np.arange(-12.0, 12.0, dtype="float32").reshape(12, 2)
    for counts, replicas, recompute in (([2, 1], 1, False), ([2, 1], 1, True), ([3], 2, False), ([3], 2, True)):
        model = keras.Sequential([Sizes(), layers.Dense(1), layers.Dense(1)])
        config = cd.Config(layers_per_proc=counts, data_parallel=replicas, microbatches=3, recompute=recompute)
        pipe = cd.Pipeline(model, config, optimizer="sgd", loss="mse", metrics=["mae"])
        history = pipe.fit(x, x[:, :1], batch_size=12, epochs=2, shuffle=False, verbose=0).history
        assert set(history) == {"loss", "mae", "size", "largest", "sum"}
        np.testing.assert_allclose(history["size"], np.abs(x).mean(), rtol=1e-6)
        np.testing.assert_allclose(history["largest"], 12.0)
        np.testing.assert_allclose(history["sum"], np.abs(x).sum(), rtol=1e-6)
        assert list(pipe.evaluate(x, x[:, :1], return_dict=True)) == ["loss", "mae", "size", "largest", "sum"]


@ranks(2, deadline=60)
def case_ranks_with_different_models_are_told() -> None:
    x, y = data("chain", 12)

    def refused(told: str, *, counts=(1, 2), activation="relu", units=4, rate=0.1) -> None:
        inner = keras.Sequential([layers.Dense(units, name=f"inner_{cd.rank()}")])
        model = keras.Sequential(
            [layers.Flatten(), layers.Dense(4, activation, name=f"outer_{cd.rank()}"), inner], name=f"model_{cd.rank()}"
        )
        config = cd.Config(layers_per_proc=counts, microbatches=2)
        pipe = cd.Pipeline(model, config, optimizer=keras.optimizers.SGD(rate), loss=cross_entropy())
        if not told:
            pipe.train_on_batch(x, y)
            return
        with pytest.raises(cd.ArgumentError, match="the ranks of a pipeline differ in ") as caught:
            pipe.train_on_batch(x, y)
        assert re.search(rf"differ in {told}: all of them must make the same pipeline", str(caught.value)), caught.value

    rank = cd.rank()
    refused("")
    refused(r"layers_per_proc \(\[2, 1\] on rank 0, \[1, 2\] on rank 1\)", counts=(1, 2) if rank else (2, 1))
    refused(r"Dense 1's activation \('relu' on rank 0, 'tanh' on rank 1\)", activation="tanh" if rank else "relu")
    refused(r"the optimizer's learning_rate \(0\.1\d* on rank 0, 0\.2\d* on rank 1\)", rate=0.2 if rank else 0.1)
    refused(r"Sequential 2's layers \(.*units: 4.* on rank 0, .*units: 5.* on rank 1\)", units=4 + rank)


@ranks(2, deadline=60)
def case_ranks_with_another_loss_weight_or_metric_are_told() -> None:
    x, y = data("chain", 12)
    mse, huber = keras.losses.MeanSquaredError, keras.losses.Huber

    def refused(told: str, **given) -> None:
        config = cd.Config(layers_per_proc=[4, 4], microbatches=2)
        pipe = cd.Pipeline(seeded(chain), config, optimizer=sgd(), **{"loss": cross_entropy(), **given})
        with pytest.raises(cd.ArgumentError, match=f"differ in {told}.*: all of them must make the same pipeline"):
            pipe.train_on_batch(x, y)

    rank = cd.rank()
    refused(r"loss \('mse' on rank 0, 'mae' on rank 1\)", loss=["mse", "mae"][rank])
    refused(r"loss \(MeanSquaredError\(.* on rank 0, Huber\(", loss=[mse, huber][rank]())
    refused(r"loss \(.*delta=1\.0.* on rank 0, .*delta=2\.0", loss=huber(delta=1.0 + rank))
    refused(r"loss \(chain on rank 0, data on rank 1\)", loss=[chain, data][rank])
    refused(r"loss \(.*\b1 on rank 0, .*\b2 on rank 1\)", loss=functools.partial(huber().fn, delta=1 + rank))
    refused(r"metrics \(None on rank 0, \['mae'\] on rank 1\)", metrics=["mae"] if rank else None)
    refused(r"weight \(None on rank 0, .*lambda> on rank 1\)", weight=(lambda _, y: len(y)) if rank else None)


@ranks(2, deadline=60)
def case_targets_of_another_shape_are_told() -> None:
    x, y = data("chain", 12)
    pipe = staged(seeded(chain))
    for _ in range(2):  # the second time in a pipeline that has trained
        with pytest.raises(
            cd.ArgumentError, match=r"shapes \(\(12, 2, 3\), \(12,\) on rank 0, .*\(12, 1\) on rank 1\)"
        ):
            pipe.train_on_batch(x, y[:, None] if cd.rank() else y)
        pipe.train_on_batch(x, y)
    with pytest.raises(
        cd.ArgumentError, match=r"validation data \(.* \(12,\) \w+ on rank 0, .* \(12, 1\) \w+ on rank 1\)"
    ):
        pipe.fit(x, y, batch_size=12, verbose=0, validation_data=(x, y[:, None] if cd.rank() else y))


@ranks(2, deadline=60)
def case_training_goes_on_after_different_calls() -> None:
    with doubles():
        x, y = data("chain", 12)
        pipe, alone = staged(seeded(chain)), plain(seeded(chain))

        def train() -> None:
            assert pipe.train_on_batch(x, y) == pytest.approx(alone.train_on_batch(x, y)[0], rel=1e-5)

        calls = [
            lambda: pipe.train_on_batch(x, y),
            lambda: pipe.evaluate(x, y),
            lambda: pipe.fit(x, y, verbose=0),
            lambda: pipe.predict(x),
        ]
        train()

        class Evaluates(keras.callbacks.Callback):
            def on_train_begin(self, logs: object = None) -> None:
                try:
                    pipe.evaluate(x, y)
                except cd.ArgumentError:
                    raise KeyError("no evaluation") from None

        with pytest.raises((cd.ArgumentError, KeyError), match=r"differ in what they call|no evaluation"):
            pipe.fit(x, y, verbose=0, callbacks=None if cd.rank() else [Evaluates()])
        for mine, other in itertools.permutations(calls, 2):
            with pytest.raises(cd.ArgumentError, match="the ranks of a pipeline differ in what they call"):
                (other if cd.rank() else mine)()
            train()
        assert pipe.evaluate(x, y) == pytest.approx(alone.evaluate(x, y, verbose=0), rel=1e-5)
        same(pipe.whole(), alone)
        assert np.isfinite(staged(seeded(chain)).train_on_batch(x, y))


@ranks(2, deadline=60)
def case_training_goes_on_after_a_mistake_of_one_rank() -> None:
    """Before the ranks compare their calls, or in what they compare."""
    x, y = data("chain", 12)
    pipe = staged(seeded(chain))
    mistakes = [
        lambda: pipe.fit(x, y, validation_data=(x, y, y)),
        lambda: pipe.fit(x, y, epoch=1),
        pipe.evaluate,
        lambda: pipe.train_on_batch(x),
        lambda: pipe.train_on_batch(x, y[:3]),
    ]
    rights = [
        *[lambda: pipe.fit(x, y, verbose=0)] * 2,
        lambda: pipe.evaluate(x, y),
        *[lambda: pipe.train_on_batch(x, y)] * 2,
    ]
    for rank, (mistake, right) in itertools.product(range(2), zip(mistakes, rights, strict=True)):
        right()
        with pytest.raises((cd.CoorddError, TypeError)):
            (mistake if cd.rank() == rank else right)()
        right()


class Small(layers.Layer):
    """Has its inputs be small."""

    def call(self, inputs):
        self.add_loss(ops.mean(ops.square(inputs)))
        return inputs


@ranks(2, deadline=60)
@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
def case_the_only_loss_may_be_that_of_an_early_layer() -> None:
    x = np.linspace(-1.0, 1.0, 48, dtype="float32").reshape(12, 4)

    def made(*more: keras.Layer) -> keras.Model:
        return seeded(
            lambda: keras.Sequential([keras.Input((4,)), layers.Dense(4), *more, layers.Dense(3), layers.Dense(2)])
        )

    config = cd.Config(layers_per_proc=[2, 2], microbatches=3)
    pipe, model = cd.Pipeline(made(Small()), config, optimizer=sgd()), made(Small())
    model.compile(sgd())
    np.testing.assert_allclose(pipe.train_on_batch(x), model.train_on_batch(x), rtol=1e-5)
    same(pipe.whole(), model, 1e-5)
    beside = cd.Pipeline(made(Small()), config, optimizer=sgd(), metrics=["mae"])
    assert beside.fit(x, x[:, :2], batch_size=12, verbose=0).history.keys() == {"loss", "mae"}
    with pytest.raises(cd.ArgumentError, match="there is no loss: give loss= and targets, or let a layer call add_los"):
        cd.Pipeline(made(), cd.Config(layers_per_proc=[2, 1]), optimizer=sgd()).train_on_batch(x)


@ranks(2, deadline=60)
def case_a_run_is_recorded() -> None:
    x, y = data("chain", 12)
    pipe = staged(seeded(chain))
    with pytest.raises(cd.ArgumentError, match="not split before its first batch"):
        pipe.record()
    pipe.train_on_batch(x, y)
    pipe.evaluate(x, y)  # which is not what one wants to see
    with tempfile.TemporaryDirectory() as folder:
        path = Path(cd.broadcast_object(folder)) / "run.svg"
        assert re.match(r"1f1b: .* idle, predicted .*; \d+ ms to change the weights$", str(pipe.record(path)))
        assert cd.rank() or (path.read_text().startswith("<svg") and "backward" in path.read_text())
        cd.barrier()
    with pytest.raises(cd.ArgumentError if cd.rank() == 0 else cd.RefusedError, match=r"let run\.txt end in"):
        pipe.record("run.txt" if cd.rank() == 0 else None)
    pipe.train_on_batch(x, y)


@ranks(2, deadline=60)
def case_a_whole_model_that_one_rank_cannot_make_is_told() -> None:
    x, y = data("chain", 12)
    broken = False

    def made() -> keras.Model:
        if broken:
            raise ValueError("no second model")
        return seeded(chain)

    pipe = staged(made)
    pipe.train_on_batch(x, y)
    broken = cd.rank() == 0
    with pytest.raises(ValueError if cd.rank() == 0 else cd.RefusedError, match="no second model"):
        pipe.whole()
    pipe.train_on_batch(x, y)


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
    with pytest.raises(cd.ArgumentError, match="give larger batches with more microbatches"):
        staged(seeded(chain), sgd(global_clipnorm=1.0, gradient_accumulation_steps=2))
    with pytest.raises(cd.ArgumentError, match="give larger batches with more microbatches"):
        staged(seeded(chain), sgd(gradient_accumulation_steps=2), clip_norm=1.0)
    pipe = staged(seeded(chain))
    with pytest.raises(cd.ArgumentError, match="loss= compares the output with targets, and there are none: give y"):
        pipe.train_on_batch(x)
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


def overriding(name: str) -> keras.Model:
    """A functional model with a method or property of its own, which does what Keras's does."""
    own = getattr(keras.Model, name, None)
    if not isinstance(own, property):

        def own(self, *args: object, **details: object) -> object:
            return getattr(keras.Model, name)(self, *args, **details)

    made = type("Own", (keras.Model,), {name: own})
    seen = keras.Input((2, 3))
    return made(seen, layers.Dense(3)(layers.Dense(4)(layers.Flatten()(seen))))


@ranks(2)
def case_models_with_methods_of_their_own_are_refused() -> None:
    x, y = data("chain", 12)
    for name in ("call", "train_step", "test_step", "predict_step", "compute_loss", "compute_metrics", "metrics"):
        with pytest.raises(cd.ArgumentError, match=f"none of its methods, and Own has {name} of its own: give keras"):
            staged(overriding(name)).train_on_batch(x, y)
    model = overriding("build_from_config")  # not called in training
    model.train_step = lambda data: None
    with pytest.raises(cd.ArgumentError, match="Own has train_step of its own"):
        staged(model).evaluate(x, y)
    del model.train_step
    assert np.isfinite(staged(model).train_on_batch(x, y))


@ranks(2)
def case_layers_are_not_frozen_or_thawed_later() -> None:
    x, y = data("chain", 12)
    for before in (True, False):
        model = seeded(chain)
        model.layers[1].trainable = before
        pipe = staged(model, layers_per_proc=[4, 4])
        pipe.train_on_batch(x, y)
        model.layers[1].trainable = not before
        wanted = "had (True|False) when the pipeline was made: make a new Pipeline of whole()"
        with pytest.raises(cd.CoorddError, match=wanted):
            pipe.train_on_batch(x, y)
        assert np.isfinite(pipe.evaluate(x, y)[0])
        again = staged(pipe.whole(), layers_per_proc=[4, 4])
        kernel = keras.ops.convert_to_numpy(model.layers[1].kernel)
        again.train_on_batch(x, y)
        moved = bool((keras.ops.convert_to_numpy(again.whole().layers[1].kernel) != kernel).any())
        assert moved == (not before)


@ranks(2)
def case_policies_that_need_more_than_gradients_are_refused() -> None:
    x, y = data("chain", 12)
    keras.config.set_dtype_policy("mixed_float16")
    try:
        with pytest.raises(cd.ArgumentError, match="the policy mixed_float16 needs a scaled loss"):
            staged(seeded(chain)).train_on_batch(x, y)
        assert np.isfinite(staged(seeded(chain), sgd(loss_scale_factor=64.0)).train_on_batch(x, y))
    finally:
        keras.config.set_dtype_policy("float32")
    model = seeded(chain)
    model.quantize("float8")
    with pytest.raises(cd.ArgumentError, match="is a scale of float8 that is overwritten by its gradient"):
        staged(model).train_on_batch(x, y)


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
    hears = Sizes(name="hears")
    model = keras.Model(seen, layers.Dense(3)(layers.Flatten()(hears(ops.tanh(hears(seen))))))
    with pytest.raises(cd.ArgumentError, match="the metric 'size' is in stages 0, 1, each of which would hear of its"):
        staged(model, layers_per_proc=[2, 3]).train_on_batch(x, y)
