"""A Keras model trained in stages on different ranks: ``cd.Pipeline``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from coordd import api
from coordd.errors import ArgumentError
from coordd.ops.process_sets import global_process_set
from coordd.parallel.collective_calls import CollectiveCall, collective_method
from coordd.parallel.objects import gathered
from coordd.pipeline.batch import Batch, Weigh
from coordd.pipeline.batch_check import Accord
from coordd.pipeline.config import PipelineConfig
from coordd.pipeline.microbatch import cut
from coordd.pipeline.plans import Plans
from coordd.pipeline.record import record
from coordd.pipeline.recording import Recording
from coordd_keras.backend import check_backend
from coordd_keras.optimizer import is_distributed
from coordd_keras.pipeline.assembly import Assembly, Model
from coordd_keras.pipeline.fitting import batches, fit
from coordd_keras.pipeline.layout import Layout
from coordd_keras.pipeline.rows import arrays, joined, rows_of, taken, told
from coordd_keras.pipeline.stage import Work

__all__ = ["Pipeline"]


def _several(call: str) -> Callable[[Pipeline], AbstractContextManager[Callable[[], bool]]]:
    return lambda pipeline: pipeline._accord.several(call)  # noqa: SLF001 - private to this module


@contextmanager
def _fitting(pipeline: Pipeline) -> Iterator[Callable[[], bool]]:
    """Sets the number of calls of `fit`, which seeds the shuffle, back if one fails: it may have failed on one rank."""
    fits = pipeline._fits  # noqa: SLF001 - private to this module
    with pipeline._accord.several("fit") as known:  # noqa: SLF001 - as above
        try:
            yield known
        except BaseException:
            pipeline._fits = fits  # noqa: SLF001 - as above
            raise


class Pipeline:
    """Trains a model whose layers are split over the ranks.

    All ranks create it with equal arguments, and call its methods together with the same arrays.

    Attributes:
        config: how the model is split and trained.
        optimizer: of this rank's variables. Its learning rate may be set to another number, equal on all ranks. On
            TensorFlow its step is a graph, as in ``model.fit``, which sees no other change after the first step.
        stop_training: callbacks set it, equally on all ranks, to end `fit` after the step.
    """

    @collective_method("Pipeline", namespace=True)
    def __init__(
        self,
        _call: CollectiveCall,
        model: Model,
        config: PipelineConfig | None = None,
        *,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        metrics: Any = None,
        weight: Weigh | None = None,
    ) -> None:
        """Takes a model; the first batch, whose inputs give the shape, triggers the split.

        Args:
            model: a ``keras.Sequential`` or a functional model, unchanged; or a function that makes it, so that no rank
                ever has all of its weights in memory.
            config: how the model is split and trained.
            optimizer: a Keras optimizer, or its name; the pipeline owns it from now on.
            loss: as for ``model.compile``.
            metrics: as for ``model.compile``.
            weight: returns the weight of a microbatch's loss, given its inputs and targets: the number of elements that
                the loss is the mean of, such as tokens that are not masked; by default the number of rows.

        Raises:
            ArgumentError: the arguments are invalid or do not fit together.
            NotInitializedError: `init` was not called.
        """
        self._prepare(_call, model, config, optimizer=optimizer, loss=loss, metrics=metrics, weight=weight)

    def _prepare(
        self,
        call: CollectiveCall,
        model: Model,
        config: PipelineConfig | None,
        *,
        optimizer: Any,
        loss: Any,
        metrics: Any,
        weight: Weigh | None,
    ) -> None:
        """Takes a model, inside a collective call of all ranks."""
        operations = api.operations()
        check_backend()
        self.config = config or PipelineConfig()
        self.optimizer = keras.optimizers.get(optimizer)
        self.config = _checked(self.config, self.optimizer)
        _check_mean(loss)
        self.stop_training = False
        self._model = model
        self._compiled = {"loss": loss, "metrics": metrics}
        self._weigh = weight
        self._operations = operations
        self._rank = operations.daemon.world.rank
        self._name = f"{call.prefix}pipeline"
        self._accord = Accord(operations, name=f"{self._name}.given")
        self._plans = Plans(self.config, operations.daemon.world.size)
        self._made: Assembly | None = None
        self._fits = 0

    @property
    def layout(self) -> Layout:
        """Assignment of layers to stages.

        Raises:
            ArgumentError: the pipeline has seen no batch yet.
        """
        return self._assembly.layout

    @collective_method("fit", steady=True, around=_fitting)
    def fit(
        self,
        _: CollectiveCall,
        x: Any,
        y: Any = None,
        *,
        batch_size: int = 32,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None = None,
        validation_data: tuple[Any, Any] | None = None,
        shuffle: bool = True,
        initial_epoch: int = 0,
        validation_batch_size: int | None = None,
    ) -> keras.callbacks.History:
        """Trains over epochs; arguments and result are those of ``model.fit``.

        Args:
            x: inputs of all rows, the same on all ranks: an array, a list of arrays, or a dictionary by input.
            y: targets of all rows.
            batch_size: rows of a step, over all replicas; the last step drops rows if they are too few for all
                replicas.
            epochs: the number of the last epoch.
            verbose: 0 for no output, 1 or ``"auto"`` for a progress bar, 2 for a line for each epoch; on rank 0 only.
            callbacks: Keras callbacks; their model is this pipeline.
            validation_data: inputs and targets that are evaluated after each epoch.
            shuffle: whether each epoch permutes the rows.
            initial_epoch: the first epoch, to resume training.
            validation_batch_size: by default `batch_size`.

        Raises:
            ArgumentError: the arguments do not fit together or differ between ranks, or the model cannot be split.
            PeerError: another rank's stage failed.
        """
        return self._fit(
            x,
            y,
            batch_size=batch_size,
            epochs=epochs,
            verbose=verbose,
            callbacks=callbacks,
            validation_data=validation_data,
            shuffle=shuffle,
            initial_epoch=initial_epoch,
            validation_batch_size=validation_batch_size,
        )

    def _fit(
        self,
        x: Any,
        y: Any,
        *,
        batch_size: int,
        epochs: int,
        verbose: int | str,
        callbacks: Sequence[keras.callbacks.Callback] | keras.callbacks.Callback | None,
        validation_data: tuple[Any, Any] | None,
        shuffle: bool,
        initial_epoch: int,
        validation_batch_size: int | None,
    ) -> keras.callbacks.History:
        """Trains over epochs, inside a collective call of all ranks."""
        if validation_data is not None and len(validation_data) != 2:
            raise ArgumentError(
                f"validation_data is a pair of inputs and targets, and not {len(validation_data)} things"
            )
        x, y, held_out = arrays(x), arrays(y), arrays(validation_data)
        size = validation_batch_size or batch_size
        given = {"batch sizes": f"{batch_size}, {size}", "epochs": f"{initial_epoch} to {epochs}", "shuffle": shuffle}
        others = told(held_out, None)
        given["validation data"] = f"{others['shapes']} {others['inputs']}"
        self._accord.check("fit", {**told(x, y), **given})
        self._assemble(taken(x, slice(0, batch_size)))
        self._fits += 1
        with self._assembly.separate_metrics():
            return fit(
                self,
                (x, y),
                reset=self._assembly.reset,
                train=self.train_on_batch,
                conclude=self._assembly.metrics,
                directions=self._assembly.directions,
                finalize=self._finalize,
                evaluate=None if held_out is None else lambda: self._evaluated(held_out[0], held_out[1], size),
                batch_size=batch_size,
                least=self._plans.least,
                epochs=range(initial_epoch, epochs),
                shuffle=shuffle,
                seed=(self.config.seed or 0, self._fits),
                verbose=0 if self._rank else 1 if verbose == "auto" else int(verbose),
                callbacks=callbacks,
            )

    def _finalize(self) -> None:
        """Finalizes the optimizer when all ranks have trained to the end; a callback may have failed on one of them."""
        self._accord.check("the end of training", {})
        self._assembly.finalize()

    def train_on_batch(self, x: Any, y: Any = None) -> float:
        """Takes one step; with a schedule whose weights are stale (``pipedream``), one step for each microbatch.

        Returns:
            the loss, on every rank: its mean over all rows, or weighted by `weight`.
        """
        return self._run(arrays(x), arrays(y), "train_on_batch", training=True)

    def test_on_batch(self, x: Any, y: Any = None) -> float:
        """Returns the loss without training, on every rank."""
        return self._run(arrays(x), arrays(y), "test_on_batch")

    @collective_method("evaluate", steady=True, around=_several("evaluate"))
    def evaluate(
        self,
        _: CollectiveCall,
        x: Any,
        y: Any = None,
        *,
        batch_size: int = 32,
        verbose: int | str = 0,
        return_dict: bool = False,
    ) -> Any:
        """Returns loss and metrics, on every rank; arguments and result are those of ``model.evaluate``.

        Args:
            x: inputs of all rows, the same on all ranks.
            y: targets of all rows.
            batch_size: rows of a batch.
            verbose: has no effect: there is no progress bar.
            return_dict: whether to return a dictionary by name.
        """
        logs = self._evaluated(arrays(x), arrays(y), batch_size)
        found = list(logs.values())
        return logs if return_dict else found[0] if len(found) == 1 else found

    @collective_method("predict", steady=True, around=_several("predict"))
    def predict(self, _: CollectiveCall, x: Any, *, batch_size: int | None = None, verbose: int | str = 0) -> Any:
        """Returns the model's output for all rows, on every rank, in the model's output structure.

        Args:
            x: as for `fit`.
            batch_size: rows of a batch; by default all.
            verbose: has no effect: there is no progress bar.

        Raises:
            ArgumentError: an output does not have its rows in the first dimension.
        """
        return self._predicted(arrays(x), batch_size)

    def _predicted(self, x: Any, batch_size: int | None) -> Any:
        self._accord.check("predict", {**told(x, None), "batch size": batch_size})
        self._assemble(x)
        rows = rows_of(x)
        found: list[tuple[int, list[np.ndarray]]] = []
        for part in batches(rows, batch_size or rows, self.config.least, every=True):
            self._run(taken(x, part), None, "predict", judged=False)
            outputs = self._assembly.outputs()
            sizes = [each.stop - each.start for each in cut(part.stop - part.start, len(outputs))]
            found += zip(sizes, outputs, strict=True)
        whole, model = joined(found), self.layout.graph.model
        return whole[0] if isinstance(model, keras.Sequential) else keras.tree.pack_sequence_as(model.output, whole)

    @collective_method("whole")
    def whole(self, _: CollectiveCall) -> keras.Model:
        """Returns the whole model with the weights that all ranks trained, on every rank; all ranks call it.

        This is the model that the pipeline was given, to be saved or used; if it was given a function, a new model.
        """
        return self._assembly.whole()

    @collective_method("save")
    def save(self, _: CollectiveCall, /, filepath: str | Path, **details: Any) -> None:
        """Saves the whole model, as ``model.save`` does: all ranks call it, and rank 0 writes."""
        whole = self.whole()
        if self._rank == 0:
            whole.save(filepath, **details)

    @collective_method("save_weights")
    def save_weights(self, _: CollectiveCall, /, filepath: str | Path, **details: Any) -> None:
        """Saves the weights of the whole model, as ``model.save_weights`` does: all ranks call it, rank 0 writes."""
        whole = self.whole()
        if self._rank == 0:
            whole.save_weights(filepath, **details)

    @collective_method("record")
    def record(self, _: CollectiveCall, path: str | Path | None = None) -> Recording:
        """Gathers the times of all ranks' passes in the last training step, with the expected times; all ranks call it.

        If there was no training yet, it takes the last run of another kind.

        Args:
            path: where rank 0 writes it: a picture (``.svg``, ``.png``), or a ``.json`` for ``coordd plan --measured``.

        Raises:
            ArgumentError: there was no run yet, or the file has another suffix.
            RefusedError: another rank has raised an error here.
        """
        return record(path, self._assembly.ran, None, self._operations, name=f"{self._name}.record")

    @property
    def _assembly(self) -> Assembly:
        if self._made is None:
            raise ArgumentError("the model is not split before its first batch: call fit, evaluate or predict first")
        return self._made

    def _assemble(self, x: Any) -> None:
        if self._made is None:
            with CollectiveCall("Pipeline") as call:
                made = Assembly(
                    self._model,
                    x,
                    self.config,
                    plans=self._plans,
                    optimizer=self.optimizer,
                    compiled=self._compiled,
                    weight=self._weigh,
                    accord=self._accord,
                    operations=self._operations,
                    name=self._name,
                )
                if len(set(gathered(self._operations, keras.backend.backend(), None, global_process_set))) == 1:
                    call.lines += made.initial  # else one seed gives other values; `align` copies the first
                call.advice = (
                    "make the same model on all ranks, with keras.utils.set_random_seed before it, and call whole() of "
                    "an earlier pipeline of it"
                )
            self._made = made

    def _run(self, x: Any, y: Any, call: str, *, training: bool = False, judged: bool = True) -> float:
        prepared: list[tuple[Batch, int]] = []

        def prepare(given: dict[str, Any]) -> None:
            given.update(told(x, y))
            if self._made is not None:  # before the split, the ranks compare the whole optimizer
                if training:
                    self._made.check_trainable()
                    self._made.replica_values.check()
                    given["the learning rate"] = float(keras.ops.convert_to_numpy(self.optimizer.learning_rate))
                prepared.append(self._cut(x, y, training=training, judged=judged))

        # After the ranks agree, others may wait to receive from this rank, so any later error is reported to them.
        with self._made.telling(known=self._accord.has_told) if self._made is not None else nullcontext():
            self._accord.check(call, prepare)
            self._assemble(x)
            if training:
                self._assembly.replica_values.begin()
            [(batch, each)] = prepared or [self._cut(x, y, training=training, judged=judged)]
            with self._assembly.telling():
                self._assembly.run(Work(batch, training=training, judged=judged), each)
        return self._assembly.loss(needed=judged)

    def _cut(self, x: Any, y: Any, *, training: bool, judged: bool) -> tuple[Batch, int]:
        if judged and y is None and self._compiled["loss"] is not None:
            raise ArgumentError("loss= compares the output with targets, and there are none: give y")
        rows = rows_of((x, y))
        each = self.config.fitting(rows)
        found = Batch(
            x,
            y,
            cut(rows, each * self.config.widest),
            take=taken,
            steps=each if training and self.config.schedule == "pipedream" else 1,
            named=self._assembly.named,
            weigh=self._weigh if judged else None,
        )
        return found, each

    def _evaluated(self, x: Any, y: Any, batch_size: int) -> dict[str, Any]:
        self._accord.check("evaluate", {**told(x, y), "batch size": batch_size})
        self._assemble(taken(x, slice(0, batch_size)))
        rows, total = rows_of((x, y)), 0.0
        with self._assembly.separate_metrics():
            for part in batches(rows, batch_size, self.config.least, every=True):
                total += self._run(taken(x, part), taken(y, part), "evaluate") * (part.stop - part.start)
            return {"loss": total / rows, **self._assembly.metrics()}


def _check_mean(loss: Any) -> None:
    """Rejects a loss that is not a mean, because a pipeline adds the losses of microbatches weighted by their rows.

    Raises:
        ArgumentError: the loss is a sum.
    """
    for each in keras.tree.flatten(loss):
        if getattr(each, "reduction", None) == "sum":
            raise ArgumentError(
                f"the loss {each.name!r} is a sum over rows: let it be their mean, without reduction='sum'"
            )


def _checked(config: PipelineConfig, optimizer: Any) -> PipelineConfig:
    """Rejects settings that Keras pipelines do not support, and takes over the optimizer's clipping by global norm.

    Raises:
        ArgumentError: a setting is not supported; the text says what to do instead.
    """
    wrong = {
        "offload": (config.offload, "leave it out"),
        "loss_reduction": (config.loss_reduction in {"sum", "microbatch"}, "leave it out, and let the loss be a mean"),
        "cuts": (config.cuts is not None, "leave it out: a cut may be between any two layers"),
        "memory_cap": (config.memory_cap is not None, "leave it out, or set layers_per_proc"),
        "reuse": (
            isinstance(config.reuse, dict),
            "give the names of layers, and let layers share variables to tie them",
        ),
        "split": (config.split == "memory", "choose 'time', 'parameters' or 'layers', or set layers_per_proc"),
    }
    for name, (given, what) in wrong.items():
        if given:
            raise ArgumentError(f"{name}={getattr(config, name)!r} is not for Keras's pipelines: {what}")
    if is_distributed(optimizer):
        raise ArgumentError("a pipeline reduces gradients itself: give it the optimizer without DistributedOptimizer")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ArgumentError(
            "a LossScaleOptimizer would skip steps on some ranks only: use the optimizer in it, with "
            "loss_scale_factor, or the policy mixed_bfloat16, which needs no scale"
        )
    most = optimizer.global_clipnorm
    if (most is not None or config.clip_norm is not None) and optimizer.gradient_accumulation_steps:
        raise ArgumentError(
            "a pipeline clips the gradients of each batch by their global norm, and gradient_accumulation_steps="
            f"{optimizer.gradient_accumulation_steps} accumulates those of several batches first: give larger batches "
            "with more microbatches instead, or clip with clipnorm= or clipvalue="
        )
    if most is not None:
        config = replace(config, clip_norm=min(most, config.clip_norm or most))
    return config
