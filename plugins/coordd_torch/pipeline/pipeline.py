"""Pipeline-parallel training of a model, each stage on its own ranks: ``cd.Pipeline``."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from coordd import api
from coordd.errors import ArgumentError
from coordd.ops.messages import ReduceOp
from coordd.ops.process_sets import ProcessSet
from coordd.parallel.collective_calls import CollectiveCall, collective_method
from coordd.parallel.objects import allgather_object
from coordd.pipeline.batch import Batch, Weigh
from coordd.pipeline.batch_check import ALIKE, Accord, settings
from coordd.pipeline.config import PipelineConfig
from coordd.pipeline.engine import Engine
from coordd.pipeline.microbatch import cut
from coordd.pipeline.plan import Plan
from coordd.pipeline.plans import Plans
from coordd.pipeline.profile import Profile
from coordd.pipeline.record import Run, latest, record
from coordd.pipeline.recording import Recording
from coordd.pipeline.replica_values import ReplicaValues
from coordd.pipeline.simulate import Span
from coordd.pipeline.versions import Versions
from coordd_torch.consistency import trained
from coordd_torch.gradient import check_unreduced
from coordd_torch.pipeline.alike import materialised, structure, title, values
from coordd_torch.pipeline.boundary import Boundary
from coordd_torch.pipeline.buffers import borrowed, copies, every
from coordd_torch.pipeline.build import outline
from coordd_torch.pipeline.capture import capture
from coordd_torch.pipeline.codec import TorchCodec
from coordd_torch.pipeline.cpu_offload import Attic
from coordd_torch.pipeline.fingerprint import told
from coordd_torch.pipeline.fitting import History, fit, screen
from coordd_torch.pipeline.gradient_finalisation import Settling
from coordd_torch.pipeline.layout import Layout
from coordd_torch.pipeline.loss_check import LossCheck
from coordd_torch.pipeline.malloc_trim import give_back
from coordd_torch.pipeline.parity import distance, gradients
from coordd_torch.pipeline.replica_settings import ReplicaSettings, check_defaults
from coordd_torch.pipeline.rng_and_autocast import autocast_text
from coordd_torch.pipeline.rng_state import untouched
from coordd_torch.pipeline.rows import joined, rows_of, taken
from coordd_torch.pipeline.saving import Saving
from coordd_torch.pipeline.scaling import Scaling
from coordd_torch.pipeline.sharing import Sharing, align
from coordd_torch.pipeline.stage import Loss, TorchStage, check_fixed, check_makes_optimizer, check_step, check_weight
from coordd_torch.pipeline.stage_module import StageModule
from coordd_torch.pipeline.tying import check_statistics, tied
from coordd_torch.pipeline.weights import Weights
from coordd_torch.wrappers import check_plain

__all__ = ["Pipeline"]

log = logging.getLogger("coordd")

_CHANGED = (
    "hyperparameters of the pipeline stages of %s have changed since the last train_batch, those of %s have not: if it "
    "is a scheduler, all ranks step one on their own stages' optimizers"
)

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@contextmanager
def _fitting(pipeline: Pipeline) -> Iterator[Callable[[], bool]]:
    """Sets the number of epochs back if `fit` fails, because ranks may have completed a different number of them."""
    epochs = pipeline.epochs
    with pipeline._accord.several("fit") as known:  # noqa: SLF001 - private to this module
        try:
            yield known
        except BaseException:
            pipeline.epochs = epochs
            raise


def _verifying(pipeline: Pipeline) -> AbstractContextManager[Callable[[], bool]]:
    return pipeline._accord.several("verify_parity")  # noqa: SLF001 - as above


class Pipeline:
    """A model whose layers are distributed over the ranks for training.

    All ranks create it with the same arguments, and call its methods together with the same batches.

    Attributes:
        layout: the layers of each stage.
        stages: this rank's stages, by number.
        epochs: number of epochs run by `fit`, including those before a loaded checkpoint was saved, without those of a
            `fit` that has failed.
        spans: the actions of this rank in the last run, with start and end in seconds since the run began.
    """

    _warned = False

    @collective_method("Pipeline", namespace=True)
    def __init__(
        self,
        _call: CollectiveCall,
        model: nn.Module | Callable[[], nn.Module],
        config: PipelineConfig | None = None,
        *,
        optimizer: MakeOptimizer,
        loss: Loss,
        example: Any = None,
        example_targets: Any = None,
        scaler: torch.amp.GradScaler | None = None,
        weight: Weigh | None = None,
    ) -> None:
        """Splits a model.

        Args:
            model: unchanged; or a function that builds it, so that no rank ever holds the whole model in memory.
            config: how it is split and trained.
            optimizer: makes the optimizer of a stage's parameters, frozen ones included; it receives no parameter
                names.
            loss: of an output and targets, the mean over their rows, or as ``loss_reduction`` and `weight` define; the
                first steps check that. It must not have trainable parameters.
            example: inputs as in `train_batch`, for models that need them to be captured or measured.
            example_targets: their targets, so that the loss is measured, too.
            scaler: of losses, for training in fp16; owned by the pipeline from now on, with equal settings on all
                ranks.
            weight: returns the weight of a microbatch's loss from its inputs and targets: the number of items that it
                is the mean of, such as the valid tokens; by default the number of rows.

        Raises:
            ArgumentError: the model cannot be split like this.
            MismatchError: on all ranks: they have different models, initial values, losses or weights of microbatches;
                it lists the differences.
            RefusedError: another rank has raised an error here.
            NotInitializedError: `init` was not called.
        """
        given = (example, example_targets)
        self._make(_call, model, config, optimizer=optimizer, loss=loss, given=given, scaler=scaler, weight=weight)

    def _make(
        self,
        call: CollectiveCall,
        model: nn.Module | Callable[[], nn.Module],
        config: PipelineConfig | None,
        *,
        optimizer: MakeOptimizer,
        loss: Loss,
        given: tuple[Any, Any],
        scaler: torch.amp.GradScaler | None,
        weight: Weigh | None,
    ) -> None:
        """Splits a model, as part of a collective call."""
        self.config = config or PipelineConfig()
        check_fixed(loss)
        check_makes_optimizer(optimizer)
        check_weight(self.config, weight)
        if scaler is not None:
            self.config.check_one_step("a scaler")
        self._operations = api.operations()
        world = self._operations.daemon.world
        self._rank = world.rank
        self._name = f"{call.prefix}pipeline"
        self._accord = Accord(self._operations, name=f"{self._name}.given")
        self._accord.check("Pipeline", settings(self.config), advice=ALIKE)
        self._plans = Plans(self.config, world.size)
        self._sketch = self._plans.sketch
        self._model = model = tied(model, self.config.reuse)
        self._criterion = loss
        self._weigh = weight
        self._scaling = None if scaler is None else Scaling(scaler)
        outlined = model if isinstance(model, nn.Module) else outline(model)
        check_plain(outlined)
        self._captured = capture(outlined, given[0], cuts=self.config.cuts)
        call.advice = (
            "make the same model on all ranks, with torch.manual_seed before it, or broadcast its state_dict()"
        )
        weighed = "rows" if weight is None else title(weight)
        call.lines += [*structure(self._captured), f"the loss {title(loss)}", f"weights of microbatches by {weighed}"]
        self._profile: Profile | None = None
        memory = None
        if self.config.measured:
            from coordd_torch.pipeline.profiling_driver import budget, measured

            name = f"{self._name}.profile"
            self._profile = measured(self._captured, given, self.config, loss=loss, name=name)
            memory = budget(self.config, self._plans, optimizer)
        self.layout = Layout.of(self._captured, self._sketch.stages, self.config, profile=self._profile, memory=memory)
        if len(self.layout.spans) != self._sketch.stages:
            raise ArgumentError(
                f"layers_per_proc has {len(self.layout.spans)} stages, but {self._plans.ranks} ranks have "
                f"{self._sketch.stages} under {self.config.schedule!r}: give as many numbers, or 'auto'"
            )
        check_statistics(self._captured.model, self.layout.holders)
        self.epochs = 0
        self.spans: list[Span] = []
        self._ran: Run | None = None
        names = self.layout.names(self._sketch.held[self._rank])
        if isinstance(model, nn.Module):
            built = model
            call.lines += values(model)
        else:
            built = materialised(model, names, self._operations, name=self._name, lines=call.lines)
        self.stages = self._made(built, optimizer, loss)
        self._saving = Saving(self.stages, self.layout, self._sketch, self._operations, name=f"{self._name}.loading")
        self._flows: tuple[tuple[int, int], ...] = ()
        self._engine = Engine(self.stages, self._operations, name=self._name, fail=self._operations.daemon.fail)
        give_back()

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of this rank's stages."""
        return [stage.optimizer for stage in self.stages.values() if stage.optimizer is not None]

    def train_batch(self, x: Any, y: Any) -> float:
        """Runs one optimizer step, or one per microbatch for a schedule with stale weights (``pipedream``).

        Args:
            x: inputs of the model: one argument, a tuple of them, or a dict of keyword arguments; all tensors have the
                same number of rows.
            y: targets of the loss.

        Returns:
            the loss, on every rank: its mean over all rows, or weighted by `weight`; with ``loss_reduction="sum"`` its
                sum.

        Raises:
            ArgumentError: ranks were given different batches, inputs and targets have different numbers of rows, or the
                losses of microbatches do not add up to that of the batch; the message suggests a fix.
            PeerError: another rank's stage failed.
        """
        self._run(x, y, training=True)
        return self._loss()

    def eval_batch(self, x: Any, y: Any) -> float:
        """Computes the loss without training, on every rank."""
        self._run(x, y, training=False)
        return self._loss()

    def predict(self, x: Any) -> Any:
        """Returns the model's output for all rows, on every rank.

        Raises:
            ArgumentError: the row dimension of an output tensor is unknown or has the wrong size.
        """
        mine = self._run(x, None, training=False, keep=True)
        found: dict[int, Any] = {}
        for outputs in allgather_object(mine, name=f"{self._name}.outputs"):
            found |= outputs
        sizes = [part.stop - part.start for part in cut(rows_of(x), len(found))]
        dimensions = self._captured.row_dimensions(x)
        return joined([found[microbatch] for microbatch in sorted(found)], sizes, dimensions)

    @collective_method("fit", steady=True, around=_fitting)
    def fit(
        self,
        _: CollectiveCall,
        x: Any,
        y: Any,
        *,
        epochs: int = 1,
        batch_size: int = 32,
        validation_data: tuple[Any, Any] | None = None,
        shuffle: bool = True,
        leave: bool = False,
        verbose: bool = True,
    ) -> History:
        """Trains over epochs, and shows the progress on rank 0.

        Args:
            x: inputs of all rows, on all ranks the same.
            y: targets of all rows.
            epochs: number of passes over the rows.
            batch_size: rows of a step.
            validation_data: inputs and targets whose loss is computed after each epoch.
            shuffle: whether each epoch uses a new row order.
            leave: whether to stop after the step in which a rank receives SIGTERM, even the first one; `leaving` then
                still returns True.
            verbose: whether progress is shown.

        Returns:
            the losses of each complete epoch.

        Raises:
            ArgumentError: inputs and targets do not match, or have too few rows.
        """
        given = {"batch size": batch_size, "epochs": epochs, "shuffle": shuffle, "leave": leave}

        def compare() -> None:
            held_out = told(validation_data, None)
            validation = {"validation data": f"{held_out['shapes']} {held_out['inputs']}"}
            self._accord.check("fit", {**told(x, y), **given, **validation})

        return fit(
            self,
            x,
            y,
            epochs=epochs,
            batch_size=batch_size,
            validation_data=validation_data,
            shuffle=shuffle,
            seed=self.config.seed or 0,
            least=self._plans.least,
            least_evaluated=self.config.least,
            compare=compare,
            ended=api.leaving if leave else lambda: False,
            console=screen() if verbose and self._rank == 0 else None,
            summed=self.config.loss_reduction == "sum",
        )

    @collective_method("save")
    def save(self, _: CollectiveCall, folder: str | Path) -> None:
        """Saves weights and optimizer state, to be loaded with any number of stages or into the plain model.

        Args:
            folder: shared by all ranks; use a different one for each step.
        """
        self._saving.save(Path(folder), epochs=self.epochs)

    @collective_method("load")
    def load(self, _: CollectiveCall, folder: str | Path, *, optimizer: bool = True) -> None:
        """Loads a checkpoint of `save`, written with any number of stages; either all ranks load it or none does.

        Args:
            folder: of the checkpoint.
            optimizer: whether the optimizer state is loaded, too; the optimizers must then be of the same type.

        Raises:
            ArgumentError: on all ranks: the checkpoint is incomplete, or of another model or optimizer. Any other
                error, such as one of an optimizer's ``load_state_dict``, ends the job, because weights have changed.
        """
        checkpoint = self._saving.read(Path(folder), optimizer=optimizer)
        with self._engine.telling("while a checkpoint was loaded, in part", self._rank):
            self.epochs = self._saving.apply(checkpoint)
        self._replica_values.forget()

    @collective_method("record")
    def record(self, _: CollectiveCall, path: str | Path | None = None) -> Recording:
        """Gathers the actions of all ranks in the last training step, and a prediction; all ranks call it.

        If no training step was run yet, it takes the last run of another kind.

        The prediction uses the measured times of the layers, if the split measured them. Otherwise it assumes that each
        pass takes the mean time of its stage's passes, and that messages take no time.

        Args:
            path: where rank 0 writes it: a picture (``.svg``, ``.png``), or a ``.json`` for ``coordd plan --measured``.

        Returns:
            the recording; its text form is one line with the measurement and the prediction.

        Raises:
            ArgumentError: nothing was run yet, or the file has another suffix.
            RefusedError: another rank has raised an error here.
        """
        costs = None if self._profile is None else self._profile.costs(self.layout.spans)
        return record(path, self._ran, costs, self._operations, name=f"{self._name}.record")

    @collective_method("verify_parity", steady=True, around=_verifying)
    @untouched()
    def verify_parity(self, _: CollectiveCall, x: Any, y: Any) -> float:
        """Returns the largest difference between the stages' gradients and those of the unsplit model on all rows.

        Nothing is changed, but each rank temporarily holds the whole model in memory. Dropout should be off. A model
        with batch normalisation, whose statistics are those of a microbatch, runs microbatch by microbatch instead.

        Args:
            x: as in `train_batch`.
            y: as in `train_batch`.
        """
        mine: dict[str, torch.Tensor | None] = {}
        try:
            with borrowed(copies(every(nn.ModuleList(stage.module for stage in self.stages.values())))):
                self._run(x, y, training=True, step=False)
                self._sharing.finish()
                for stage in self.stages.values():
                    mine |= stage.gradients
            found = np.array([distance(mine, self._gradients_of_whole(x, y))], np.float64)
        finally:
            for stage in self.stages.values():
                stage.forget()
        return float(self._operations.allreduce(found, name=f"{self._name}.parity", op=ReduceOp.MAX).result()[0])

    def _gradients_of_whole(self, x: Any, y: Any) -> Mapping[str, torch.Tensor | None]:
        """Returns the gradients of the unsplit model with the weights of all ranks, on all rows."""
        weights: dict[str, torch.Tensor] = {}
        for part in allgather_object(self.state_dict(), f"{self._name}.weights"):
            weights |= part
        model = copy.deepcopy(self._model) if isinstance(self._model, nn.Module) else self._model()
        model.load_state_dict(weights, strict=False)
        microbatches = self.config.fitting(rows_of(x)) * self.config.widest
        shares = self._batch(x, y, microbatches, weigh=self._weigh).shares
        return gradients(model, x, y, run=self._captured.outcome, loss=self._criterion, shares=shares)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns the parameters and buffers of this rank's stages, by their names in the model."""
        found: dict[str, torch.Tensor] = {}
        for stage in self.stages.values():
            found |= stage.module.state_dict()
        return found

    def _run(self, x: Any, y: Any, *, training: bool, step: bool = True, keep: bool = False) -> dict[int, Any]:
        call = ("train_batch" if step else "verify_parity") if training else "predict" if keep else "eval_batch"
        prepared: list[tuple[Batch, Plan]] = []

        def prepare(given: dict[str, Any]) -> None:
            if training and step:
                self._replica_values.check()
            scale = self._scaling.scale if self._scaling else 1.0
            given.update(told(x, y), **{"the scale of the loss": scale, "autocast": autocast_text()})
            prepared.append(self._prepared(x, y, training=training, step=step, keep=keep))

        settings = self._replica_settings
        where = "before or after the passes of the pipeline"
        # Once the ranks have agreed, other ranks may be waiting to receive from this one, so any error here must be
        # reported.
        with self._engine.telling(where, self._rank, known=self._accord.has_told):
            if training and step:
                changed = settings.changed()
                apart = self._accord.check(call, prepare, parts=settings.texts(), changed=changed)
                settings.settle()
                self._replica_values.begin()
                self._note_change(changed, on_some_ranks_only=apart)
            else:
                self._accord.check(call, prepare)
            [(batch, plan)] = prepared
            self._settling.begin()
            for number, stage in self.stages.items():
                scaling = self._scaling if step else None
                stage.begin(batch, plan.halved[number], training=training, keep=keep, scaling=scaling, checked=step)
            self.spans = self._engine.run(plan, self._rank)
            self._ran = latest(self._ran, Run(plan, self.spans, self._engine.since, training))
            return {microbatch: output for stage in self.stages.values() for microbatch, output in stage.end().items()}

    def _note_change(self, changed: bool | None, *, on_some_ranks_only: bool) -> None:
        """Warns, once, if hyperparameters have changed on some ranks only."""
        if on_some_ranks_only and changed is not None and not self._warned:
            self._warned = True
            log.warning(_CHANGED, *(("this rank", "another rank") if changed else ("another rank", "this rank")))

    def _prepared(self, x: Any, y: Any, *, training: bool, step: bool, keep: bool) -> tuple[Batch, Plan]:
        """Cuts a batch, and plans its passes."""
        if training and not torch.is_grad_enabled():
            raise ArgumentError(
                "gradients are switched off here (torch.no_grad()), so nothing can be trained or verified"
            )
        each = self.config.fitting(rows_of(x))
        batch = self._batch(
            x,
            y,
            each * self.config.widest,
            steps=each if self.config.schedule == "pipedream" and step else 1,
            weigh=None if keep else self._weigh,
        )
        self._flows = self.layout.flows(map(batch.inputs, range(batch.count)), training=training)
        return batch, self._plans.lowered(each, self._flows, self.layout.shared, training=training, step=step)

    def _batch(self, x: Any, y: Any, microbatches: int, *, steps: int = 1, weigh: Weigh | None) -> Batch:
        parts = cut(rows_of((x, y)), microbatches)
        summed = self.config.loss_reduction == "sum"
        return Batch(x, y, parts, take=taken, steps=steps, named=self._captured.inputs, weigh=weigh, summed=summed)

    def _loss(self) -> float:
        mine = np.array([sum(stage.loss for stage in self.stages.values())], np.float64)
        return float(self._operations.allreduce(mine, name=f"{self._name}.loss", op=ReduceOp.SUM).result()[0])

    def _made(self, model: nn.Module, optimizer: MakeOptimizer, loss: Loss) -> dict[int, TorchStage]:
        modules = {number: self.layout.module(number, model) for number in self._sketch.held[self._rank]}
        held = {number: dict(module.named_parameters()) for number, module in modules.items()}
        tensors = {
            key: value for each in modules.values() for key, value in (*each.named_parameters(), *each.named_buffers())
        }
        placed = self._sketch.placement
        owners = {
            key: sorted({rank for stage in self.layout.holders[key] for rank in placed[stage]}) for key in tensors
        }
        align(tensors, owners, self._operations, name=self._name)
        self._sharing = Sharing(held, owners, self._operations, name=self._name)
        optimizers: dict[int, torch.optim.Optimizer | None] = {}
        known: set[str] = set()
        for number, mine in held.items():
            own = {key: value for key, value in mine.items() if key not in known}
            known |= own.keys()
            optimizers[number] = made = optimizer(own.values()) if own else None
            if own:
                check_step(made)
                check_unreduced(own)
        self._replica_settings = ReplicaSettings(placed, list(self.layout.tied), held, optimizers)
        shared = {key: value for mine in held.values() for key, value in mine.items() if len(owners[key]) > 1}
        self._replica_values = ReplicaValues(
            self._operations,
            lambda: (
                (owners[key], trained(key, value)) for key, value in sorted(shared.items()) if value.requires_grad
            ),
            framework="PyTorch",
            name=f"{self._name}.replicas",
            remedy="load(...) with a checkpoint of save(...)",
        )
        shared_parts = self._replica_settings.texts()
        self._accord.parts = len(shared_parts)
        if shared_parts:
            self._accord.check("Pipeline", {}, parts=shared_parts)
        check_defaults(optimizers, self._operations, name=self._name)
        whose = {value: owners[key][0] for mine in held.values() for key, value in mine.items()}
        self._settling = Settling(
            self._sharing.finish,
            [value for value, owner in whose.items() if owner == self._rank],
            [value for value, owner in whose.items() if owner != self._rank],
            optimizers=[each for each in optimizers.values() if each is not None],
            clip_norm=self.config.clip_norm,
            scaling=self._scaling,
            operations=self._operations,
            name=f"{self._name}.norm",
        )
        return {number: self._stage(number, module, optimizers[number], loss) for number, module in modules.items()}

    def _stage(
        self, number: int, module: StageModule, optimizer: torch.optim.Optimizer | None, loss: Loss
    ) -> TorchStage:
        config = self.config
        boundary = Boundary(
            module,
            codec=TorchCodec.of(module, self._operations.daemon.blank),
            compress=config.compression,
            recompute=config.recompute,
            split=config.schedule.startswith("zb-"),
            seed=config.seed,
            stage=number,
            attic=Attic(module) if config.offload else None,
        )
        keep = {"pipedream": self._sketch.stages - number, "2bw": 2}.get(config.schedule, 1)
        last = number == self._sketch.stages - 1
        return TorchStage(
            module,
            boundary,
            optimizer=optimizer,
            loss=loss if last else None,
            route=lambda inputs: self.layout.route(number, inputs, self._flows, training=module.training),
            versions=Versions(Weights(list(module.parameters())), keep) if keep > 1 else None,
            reduce=lambda: self._sharing.start(number),
            settle=self._settling.settle,
            gather=lambda rows: self._gathered(number, rows),
            compress=config.compression,
            check=LossCheck(
                loss,
                reduction=config.loss_reduction,
                weighted=self._weigh is not None,
                dimensions=self._captured.row_dimensions,
            )
            if last
            else None,
        )

    def _gathered(self, stage: int, rows: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        """Gathers the batch statistics of all replicas of a stage."""
        ranks = self._sketch.placement[stage]
        if len(ranks) == 1 or not rows:
            return [rows]
        return allgather_object(rows, f"{self._name}.{stage}.statistics", ProcessSet(ranks))
