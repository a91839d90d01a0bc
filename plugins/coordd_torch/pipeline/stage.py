"""One stage of a model on this rank: implements the engine's stage interface with PyTorch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import _pytree as pytree

from coordd.errors import ArgumentError
from coordd.pipeline.batch import Batch
from coordd.pipeline.config import PipelineConfig
from coordd.pipeline.frame import pack, unpack
from coordd.pipeline.stage import BaseStage
from coordd.pipeline.versions import Versions
from coordd_torch.pipeline.boundary import Boundary
from coordd_torch.pipeline.loss_check import LossCheck
from coordd_torch.pipeline.rng_and_autocast import casting, uncast
from coordd_torch.pipeline.scaling import Scaling
from coordd_torch.pipeline.stage_module import OUTPUT, StageModule

__all__ = ["Loss", "TorchStage", "check_fixed", "check_step", "check_weight"]

Loss = Callable[[Any, Any], torch.Tensor]
Rows = dict[str, torch.Tensor]
Route = Callable[[Mapping[str, Any]], dict[int, Sequence[str]]]
"""Returns, for a microbatch's inputs, the names of the values that each later stage receives."""


class TorchStage(BaseStage):
    """PyTorch implementation of `coordd.pipeline.engine.Stage`.

    Attributes:
        module: the stage's layers.
        optimizer: of its parameters; None if it has none.
        loss: the sum of the microbatches' weighted losses of this run; of the last stage only.
    """

    def __init__(
        self,
        module: StageModule,
        boundary: Boundary,
        *,
        reduce: Callable[[], None],
        optimizer: torch.optim.Optimizer | None,
        loss: Loss | None,
        route: Route,
        versions: Versions | None,
        settle: Callable[[], bool],
        gather: Callable[[Rows], Sequence[Rows]],
        compress: str | None = None,
        check: LossCheck | None = None,
    ) -> None:
        """Creates the stage from its parts.

        Args:
            module: the stage's layers.
            boundary: their part of each microbatch's graph.
            reduce: starts to sum its gradients over the ranks that share them.
            optimizer: of their parameters.
            loss: of the last stage: of a microbatch's output and targets, its mean.
            route: which values each later stage receives.
            versions: of the weights, where there are several.
            settle: called before a step; completes the gradients, and returns whether the step is taken.
            gather: gathers the statistics of batch normalisation of all replicas.
            compress: the form in which gradients are sent, ``"bf16"`` or ``"int8"``; None for unchanged.
            check: of the loss.
        """
        super().__init__(reduce=reduce, versions=versions)
        self.module = module
        self.optimizer = optimizer
        self.loss = 0.0
        self._outputs: dict[int, Any] | None = None
        self._boundary = boundary
        self._criterion = loss
        self._route = route
        self._settle = settle
        self._gather = gather
        self._compress = compress
        self._check = check
        self._codec = boundary.codec
        self._batch: Batch | None = None
        self._checking: LossCheck | None = None
        self._losses: dict[int, torch.Tensor] = {}

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return self._boundary.step

    def resume(self, steps: int) -> None:
        """Continues with loaded weights, after this number of steps."""
        self._boundary.step = steps
        if self.versions is not None:
            self.versions.clear()

    def begin(
        self,
        batch: Batch,
        halved: Collection[int] = (),
        *,
        training: bool,
        keep: bool = False,
        scaling: Scaling | None = None,
        checked: bool = True,
    ) -> None:
        """Prepares a run.

        Args:
            batch: the batch of the run.
            halved: the microbatches whose backward pass is split.
            training: whether there is a backward pass.
            keep: whether the last stage keeps its outputs, and computes no loss.
            scaling: of the loss, before the backward pass.
            checked: whether the loss may be checked.
        """
        self._batch = batch
        self._boundary.halved = halved
        self._training = training
        self._scaling = scaling
        self.loss = 0.0
        self._outputs = {} if keep else None
        self._losses.clear()
        self._checking = self._check if checked and not keep else None
        if self._checking is not None:
            self._checking.begin(batch)
        self.restart()
        self.module.train(training)

    def end(self) -> dict[int, Any]:
        """Restores the modes of the layers, and releases the batch.

        Returns:
            the outputs that the last stage has kept, by microbatch.
        """
        self.module.restore()
        if self._checking is not None:
            self._checking.end()
        self._batch = None
        outputs, self._outputs = self._outputs, None
        return outputs or {}

    def forward(self, microbatch: int, given: Mapping[int, np.ndarray]) -> None:
        """Runs a microbatch forward; the last stage computes its loss.

        Raises:
            ArgumentError: the loss is not one number, or does not add up to that of the batch.
        """
        batch = self._batch
        assert batch is not None  # noqa: S101 - begun
        inputs = batch.inputs(microbatch)
        parcels = {stage: unpack(frame, self._codec) for stage, frame in given.items()}
        with nullcontext() if self._training else torch.no_grad(), casting():
            outputs = self._boundary.forward(microbatch, parcels, inputs)
            if OUTPUT in outputs:
                self._conclude(microbatch, outputs[OUTPUT], batch)
            else:
                frames = self._boundary.frames(microbatch, self._route(inputs))
                self.frames |= {(microbatch, taker): frame for taker, frame in frames.items()}
        if not self._training:
            self._boundary.forget()

    def backward(self, microbatch: int, given: Mapping[int, np.ndarray]) -> None:
        """Runs a microbatch backward."""
        with uncast(self._codec.device):
            self._return(microbatch, self._boundary.backward(microbatch, self._gradients(microbatch, given)))

    def backward_input(self, microbatch: int, given: Mapping[int, np.ndarray]) -> None:
        """Runs the part of the backward pass that earlier stages wait for."""
        with uncast(self._codec.device):
            self._return(microbatch, self._boundary.backward_input(microbatch, self._gradients(microbatch, given)))

    def backward_weight(self, microbatch: int) -> None:
        """Runs the rest of the backward pass."""
        with uncast(self._codec.device):
            self._boundary.backward_weight(microbatch)

    def step(self) -> None:
        """Runs the optimizer step, unless all ranks skip it, and clears the gradients."""
        self.advance()
        taken = self._settle()
        self._boundary.statistics.update(self._gather(self._boundary.statistics.take()))
        self._boundary.step += 1
        if self.optimizer is not None:
            parameters = list(self.module.parameters())
            # Graphs of other microbatches run backward with the weights of their forward pass, which are kept.
            with _unsafe_preserve_version_counter(tuple(parameters)):
                if taken:
                    attic = self._boundary.attic
                    with attic.emptied(self.optimizer) if attic else nullcontext():
                        self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def gradients(self) -> dict[str, torch.Tensor | None]:
        """The gradients of a run without step, by parameter."""
        return {name: parameter.grad for name, parameter in self.module.named_parameters()}

    def forget(self) -> None:
        """Drops the statistics and gradients of such a run; other stages of the rank may share these gradients."""
        self._boundary.statistics.take()
        self.module.zero_grad()

    def _conclude(self, microbatch: int, output: Any, batch: Batch) -> None:
        if self._outputs is not None:
            self._outputs[microbatch] = output
        elif self._criterion is not None:
            weight = batch.weight(microbatch)
            if self._checking is not None:
                self._checking.look(microbatch, output, batch)
            loss = _checked(self._criterion(output, batch.targets(microbatch))) if weight else _nothing(output)
            self.loss += float(loss.detach()) * batch.share(microbatch) if weight else 0.0
            if self._training:
                weighted = loss * weight
                self._losses[microbatch] = self._scaling.scaled(weighted) if self._scaling else weighted

    def _gradients(self, microbatch: int, given: Mapping[int, np.ndarray]) -> Any:
        if microbatch in self._losses:
            return self._losses.pop(microbatch)
        return {stage: unpack(frame, self._codec)[0] for stage, frame in given.items()}

    def _return(self, microbatch: int, gradients: Mapping[int, Any]) -> None:
        for giver, found in gradients.items():
            self.frames[microbatch, giver] = pack(found, self._codec, compress=lambda _: self._compress)[0]


def check_fixed(loss: Loss) -> None:
    """Rejects a loss with trainable parameters.

    Raises:
        ArgumentError: it has parameters that no optimizer has.
    """
    parameters = loss.named_parameters() if isinstance(loss, nn.Module) else ()
    if names := [name for name, value in parameters if value.requires_grad]:
        raise ArgumentError(
            f"loss= has parameters that no stage would train: {', '.join(names)}; compute with them in the model's "
            "last layer, or freeze them (requires_grad_(False))"
        )


def check_weight(config: PipelineConfig, weight: object) -> None:
    """Rejects weights of microbatches together with summed losses.

    Raises:
        ArgumentError: both are given.
    """
    if weight is not None and config.loss_reduction == "sum":
        raise ArgumentError(
            "weight= says of what number the loss is a mean, and loss_reduction='sum' that it is none: leave one of "
            "them out"
        )


def check_makes_optimizer(optimizer: Any) -> None:
    """Rejects an optimizer in place of a function that makes one.

    Raises:
        ArgumentError: it cannot be called.
    """
    if not callable(optimizer):
        raise ArgumentError(
            f"optimizer= is a function that makes one of a stage's parameters, such as lambda parameters: "
            f"torch.optim.SGD(parameters, lr=0.1), not a {type(optimizer).__name__}"
        )


def check_step(optimizer: Any) -> None:
    """Rejects what is no optimizer, and an optimizer that computes losses itself during a step.

    Raises:
        ArgumentError: it is none, or its `step` cannot be called without a closure.
    """
    if not callable(getattr(type(optimizer), "step", None)):
        returned = "None" if optimizer is None else f"a {type(optimizer).__name__}"
        raise ArgumentError(
            "the function optimizer= must return an optimizer of the parameters that it gets, such as lambda "
            f"parameters: torch.optim.SGD(parameters, lr=0.1), and it returned {returned}"
        )
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()  # schedulers wrap `step`
    if any(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters):
        raise ArgumentError(
            f"{type(optimizer).__name__} computes the loss several times in a step, by a closure, and a stage has only "
            "a part of it: use an optimizer that steps on gradients alone, such as SGD or AdamW"
        )


def _checked(loss: Any) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else repr(loss)
        raise ArgumentError(
            f"loss= must return one number, the mean over a microbatch's rows, not {found}: wrap it in a function that "
            "returns only what is to be minimised, such as lambda output, y: criterion(output, y)[0]"
        )
    return loss.reshape(())


def _nothing(output: Any) -> torch.Tensor:
    """Returns a loss with zero gradient, for a microbatch of weight zero, whose mean would be NaN."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack([leaf.mul(0).sum() for leaf in leaves]).sum() if leaves else torch.zeros((), device="cpu")
