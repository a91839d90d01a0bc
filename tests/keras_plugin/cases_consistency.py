"""Ranks whose models part while they train are told, on every backend and on two; usual training is left alone."""

import functools
import os

import keras
import numpy as np
import pytest

import coordd.keras as cd
from tests.keras_plugin.models import BATCH, compiled, mine, model
from tests.mpi.cases import ranks

APART = "no longer have the same values of "
LOSS = functools.partial(keras.losses.SparseCategoricalCrossentropy, from_logits=True)


class At(keras.callbacks.Callback):
    """Does something before a batch, counted from 0 over all epochs."""

    def __init__(self, batch: int, action) -> None:
        super().__init__()
        self._batch, self._action = batch, action
        self.count = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.count += 1
        if self.count == self._batch + 1:
            self._action(self.model)


def assigned(model: keras.Model) -> None:
    weight = model.layers[0].kernel
    weight.assign(weight.value * 1.5)


def rated(model: keras.Model) -> None:
    model.optimizer.learning_rate = 0.3


def clipped(model: keras.Model) -> None:
    model.optimizer.clipnorm = 1e-3


FAULTS = {assigned: "first/kernel|small/first/kernel", rated: "learning_rate", clipped: "clipnorm"}


def parts(found: keras.Model, told: str, *callbacks, steps: int = 12, **details) -> str:
    """Trains until all ranks have heard, and goes on together."""
    x, y = mine(steps)
    with pytest.raises(Exception, match=f"{APART}.*({told})") as caught:
        found.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[*callbacks], **details)
    assert cd.allreduce(np.array([float(cd.rank())])).tolist() == [(cd.size() - 1) / 2]
    return str(caught.value)


def heard(**details) -> None:
    """Trains with each fault, which all ranks hear of in the fifth step."""
    for fault, told in FAULTS.items():
        found = compiled(cd.DistributedOptimizer(keras.optimizers.SGD(0.1, clipnorm=5.0)), **details)
        action = fault if cd.rank() == 1 else lambda _: None
        begun = At(-1, lambda _: None)
        assert "on rank 1" in parts(found, told, At(2, action), begun)
        assert begun.count == 5


@ranks(2, deadline=90)
def case_ranks_that_part_are_told_in_fit() -> None:
    heard()


@ranks(2, deadline=60)
def case_ranks_that_part_are_told_in_fit_step_by_step() -> None:
    heard(run_eagerly=True)


@ranks(2, deadline=60)
def case_a_rank_with_another_schedule_is_told() -> None:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.9 - 0.1 * cd.rank())
    parts(
        compiled(cd.DistributedOptimizer(keras.optimizers.SGD(schedule))), r"learning_rate \(.*on rank 0; .*on rank 1\)"
    )


@ranks(2, deadline=60)
def case_a_plateau_of_one_rank_is_told() -> None:
    found = compiled(cd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=100.0 * cd.rank())
    parts(found, "learning_rate", plateau, steps=2, epochs=10)


@ranks(2, deadline=60)
def case_ranks_that_part_are_told_behind_a_loss_scale_and_with_several_passes() -> None:
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
    change = rated_inside if cd.rank() else lambda _: None
    parts(compiled(cd.DistributedOptimizer(scaled)), "learning_rate", At(2, change))
    several = cd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    parts(compiled(several), "learning_rate", At(3, rated if cd.rank() else lambda _: None))


def rated_inside(model: keras.Model) -> None:
    model.optimizer.inner_optimizer.learning_rate = 0.3


@ranks(2, deadline=60)
def case_ranks_that_part_are_told_in_a_loop() -> None:
    found = model()
    optimizer = cd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    gradients = [keras.ops.ones(variable.shape) for variable in found.trainable_variables]
    with pytest.raises(cd.MismatchError, match=f"{APART}.*last/bias"):  # noqa: PT012 - some step is the one
        for number in range(12):
            if number == 2 and cd.rank():
                found.layers[1].bias.assign(np.ones(3))
            optimizer.apply(gradients, found.trainable_variables)
    assert number == 4
    assert cd.allreduce(np.array([float(cd.rank())])).tolist() == [0.5]


@ranks(2, deadline=120)
def case_usual_training_is_left_alone() -> None:
    """Past the 128th step, with all that changes values and hyperparameters on all ranks alike."""
    decay = keras.optimizers.schedules.CosineDecay(0.1, 130, warmup_target=0.2, warmup_steps=10)
    rate = 0.1 * cd.size()
    optimizers = {
        "cosine": lambda: keras.optimizers.SGD(decay, momentum=0.9),
        "adamw": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=1.0),
        "ema": lambda: keras.optimizers.RMSprop(rate, use_ema=True, ema_overwrite_frequency=3),
        "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(decay)),
        "plain": lambda: keras.optimizers.SGD(rate, momentum=0.9),
    }
    graphs = keras.backend.backend() == "tensorflow" and "TEST_KERAS_BACKENDS" not in os.environ
    x, y = mine(6)
    for name, make in optimizers.items():
        found = compiled(cd.DistributedOptimizer(make()), steps_per_execution=2 if graphs and name == "adamw" else 1)
        callbacks = [cd.callbacks.BroadcastGlobalVariablesCallback(0), cd.callbacks.MetricAverageCallback()]
        if name in {"plain", "ema"}:
            callbacks += [
                cd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=3),
                keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.1),
            ]
        found.fit(
            x, y, batch_size=BATCH, epochs=22 if name in {"cosine", "plain"} else 4, verbose=0, callbacks=callbacks
        )


@ranks(2, deadline=60)
def case_layers_that_are_thawed_and_models_that_are_loaded_are_left_alone() -> None:
    found = compiled(cd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    found.layers[0].trainable = False
    x, y = mine(7)
    for trainable in (False, True, False):
        found.layers[0].trainable = trainable
        found.compile(cd.DistributedOptimizer(keras.optimizers.SGD(0.1)), LOSS())
        found.fit(x, y, batch_size=BATCH, verbose=0)
    found.set_weights([weight + 1 for weight in found.get_weights()])
    found.optimizer.learning_rate = 0.01
    found.fit(x, y, batch_size=BATCH, verbose=0)


@ranks(2, deadline=60)
def case_what_only_one_rank_has_by_itself_is_left_alone() -> None:
    """Local layers, names that Keras numbers, and a rate that is computed by a function."""
    found = model()
    if cd.rank():
        keras.optimizers.SGD(0.1)
    optimizer = cd.PartialDistributedOptimizer(keras.optimizers.SGD(lambda: 0.1), local_layers=found.layers[0])
    found.compile(optimizer, LOSS())
    x, y = mine(12)
    found.fit(x, y, batch_size=BATCH, verbose=0)
    assert not np.array_equal(*[weights[0] for weights in cd.allgather_object(found.get_weights())])
