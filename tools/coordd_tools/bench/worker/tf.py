"""Trains each model in TensorFlow with each engine, in alternating blocks.

The models are Keras models. A step is a gradient tape in a `tf.function`; an SGD optimizer applies its gradients.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, Protocol

from coordd_tools.bench.blocks import Block
from coordd_tools.bench.jobs import TfJob
from coordd_tools.bench.order import turns
from coordd_tools.bench.progress import Progress
from coordd_tools.bench.worker import meter
from coordd_tools.bench.worker.rank import Rank

os.environ |= {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2"}
import keras  # after the environment is set
import numpy as np
import tensorflow as tf

__all__ = ["measure"]

_WARM_UP = 5
_RATE = 1e-3
_VOCABULARY, _WIDTH, _HEADS, _BLOCKS, _CONTEXT = 256, 256, 4, 6, 128
_STEPS = {"gpt": 3, "mlp": 12, "small": 50}
"""The number of steps that take about half a second on one core."""


class Trainer(Protocol):
    """An engine; ``exchanges`` is false for the baseline without communication."""

    name: str
    exchanges: bool

    def start(self, rank: Rank) -> None:
        """Initialises the engine, before TensorFlow does anything."""

    def stop(self) -> None:
        """Shuts the engine down."""

    def scope(self) -> AbstractContextManager[Any]:
        """Returns the context in which the model is created."""

    def optimizer(self) -> keras.optimizers.Optimizer:
        """Creates the optimizer of one model."""

    def step(self, replica: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the step: it runs ``replica``, the work of one rank."""


class _Nothing:
    """No communication: each rank trains on its own."""

    name = "none"
    exchanges = False

    def start(self, rank: Rank) -> None:
        pass

    def stop(self) -> None:
        pass

    def scope(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def optimizer(self) -> keras.optimizers.Optimizer:
        return keras.optimizers.SGD(_RATE)

    def step(self, replica: Callable[..., Any]) -> Callable[..., Any]:
        found: Callable[..., Any] = tf.function(replica)
        return found


class _Coordd(_Nothing):
    """The optimizer of `coordd.keras`."""

    name = "coordd"
    exchanges = True

    def start(self, rank: Rank) -> None:  # noqa: ARG002 - the protocol's
        import coordd.keras

        self._api = coordd.keras
        self._api.init()

    def stop(self) -> None:
        self._api.shutdown()

    def optimizer(self) -> keras.optimizers.Optimizer:
        found: keras.optimizers.Optimizer = self._api.DistributedOptimizer(super().optimizer())
        return found


class _MultiWorker(_Nothing):
    """TensorFlow's own engine: `tf.distribute.MultiWorkerMirroredStrategy`."""

    name = "mwms"
    exchanges = True

    def start(self, rank: Rank) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            addresses = rank.comm.allgather(f"127.0.0.1:{free.getsockname()[1]}")
        cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank.number}}
        os.environ["TF_CONFIG"] = json.dumps(cluster)
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def scope(self) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = self._strategy.scope()
        return found

    def step(self, replica: Callable[..., Any]) -> Callable[..., Any]:
        found: Callable[..., Any] = tf.function(lambda *batch: self._strategy.run(replica, args=batch))
        return found


_TRAINERS: dict[str, Callable[[], Trainer]] = {"none": _Nothing, "coordd": _Coordd, "mwms": _MultiWorker}


def _attention(x: Any) -> Any:
    """Adds a pre-norm transformer block."""
    layers = keras.layers
    y = layers.LayerNormalization()(x)
    y = layers.MultiHeadAttention(_HEADS, _WIDTH // _HEADS)(y, y, use_causal_mask=True)
    x = layers.Add()([x, y])
    y = layers.Dense(4 * _WIDTH, activation="gelu")(layers.LayerNormalization()(x))
    return layers.Add()([x, layers.Dense(_WIDTH)(y)])


def _gpt() -> keras.Model:
    tokens = keras.Input((_CONTEXT,), dtype="int32")
    x = keras.layers.Embedding(_VOCABULARY, _WIDTH)(tokens)
    for _ in range(_BLOCKS):
        x = _attention(x)
    return keras.Model(tokens, keras.layers.Dense(_VOCABULARY)(keras.layers.LayerNormalization()(x)))


def _stack(depth: int, width: int, activation: str) -> keras.Model:
    layers = [keras.layers.Dense(width, activation=activation) for _ in range(depth)]
    return keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(10)])


_BUILD: dict[str, Callable[[], keras.Model]] = {
    "gpt": _gpt,
    "mlp": lambda: _stack(8, 1024, "relu"),
    "small": lambda: _stack(80, 64, "tanh"),
}


def _batch(name: str, seed: int) -> tuple[tf.Tensor, tf.Tensor]:
    random = np.random.default_rng(seed)
    if name == "gpt":
        text = random.integers(0, _VOCABULARY, (4, _CONTEXT + 1)).astype("int32")
        return tf.constant(text[:, :-1]), tf.constant(text[:, 1:])
    rows, width = (16, 1024) if name == "mlp" else (64, 64)
    x = random.normal(size=(rows, width)).astype("float32")
    return tf.constant(x), tf.constant(random.integers(0, 10, rows).astype("int32"))


class Training:
    """One engine's own copy of a model, with this rank's batch."""

    def __init__(self, name: str, engine: Trainer, rank: Rank, *, seed: int) -> None:
        keras.utils.set_random_seed(seed)
        self.engine = engine
        with engine.scope():
            self.model = _BUILD[name]()
            optimizer = engine.optimizer()
            optimizer.build(self.model.trainable_variables)
        self._inputs, self._labels = _batch(name, seed + 1 + rank.number)

        def replica(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            weights = self.model.trainable_variables
            with tf.GradientTape() as tape:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, self.model(x, training=True))
                loss = tf.reduce_mean(losses)
            optimizer.apply(tape.gradient(loss, [weight.value for weight in weights]), weights)
            return loss

        self._step = engine.step(replica)

    def step(self) -> None:
        """Trains on the same batch once more."""
        self._step(self._inputs, self._labels)

    def digest(self) -> str:
        """Returns a fingerprint of the parameters."""
        fingerprint = hashlib.blake2b(digest_size=8)
        for weight in self.model.get_weights():
            fingerprint.update(weight.tobytes())
        return fingerprint.hexdigest()


def measure(job: TfJob, directory: Path) -> None:
    """Measures all models on this rank.

    Raises:
        RuntimeError: an engine left the ranks with different parameters, so it did not do the work that was timed.
    """
    tf.config.threading.set_intra_op_parallelism_threads(1)
    rank = Rank.join(directory)
    blocks: list[Block] = []
    total = len(job.models) * job.rounds * len(job.engines)
    engines = {name: _TRAINERS[name]() for name in job.engines}
    with ExitStack() as running:
        for name in sorted(job.engines, key="mwms".__ne__):  # mwms has to start before TensorFlow does anything
            engines[name].start(rank)
            running.callback(engines[name].stop)
        for name in job.models:
            for block in _model(job, name, list(engines.values()), rank):
                blocks.append(block)
                rank.tell(Progress(len(blocks), total, f"{name} · {block.engine}"))
    rank.save(blocks)


def _model(job: TfJob, name: str, engines: Sequence[Trainer], rank: Rank) -> Iterator[Block]:
    """Yields the blocks of one model, all rounds."""
    trainings = [Training(name, engine, rank, seed=job.seed) for engine in engines]
    for training in trainings:
        for _ in range(_WARM_UP):
            training.step()
    for number in range(job.rounds):
        for training in turns(trainings, number):
            training.step()  # untimed: brings this copy back into the caches
            rank.barrier()
            yield meter.read(training.step, job.steps or _STEPS[name], subject=name, engine=training.engine.name)
    for training in trainings:
        if training.engine.exchanges:
            rank.agree(training.digest(), on=f"the parameters of '{name}' after training with {training.engine.name}")
