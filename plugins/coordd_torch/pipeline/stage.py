"""One stage of a model on this rank: what the engine has it do, done with PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from coordd.pipeline.frame import pack, unpack
from coordd_torch.pipeline.batch import Batch
from coordd_torch.pipeline.boundary import Boundary
from coordd_torch.pipeline.codec import TorchCodec
from coordd_torch.pipeline.stage_module import OUTPUT, StageModule
from coordd_torch.pipeline.versions import Versions

__all__ = ["Loss", "TorchStage"]

Loss = Callable[[Any, Any], torch.Tensor]
Rows = dict[str, torch.Tensor]
Route = Callable[[Mapping[str, Any]], dict[int, Sequence[str]]]
"""Says for a microbatch's inputs the names of the values that each later stage gets."""


class TorchStage:
    """What `coordd.pipeline.engine.Stage` asks for.

    Attributes:
        module: the stage's layers.
        optimizer: of its parameters; None if it has none.
        loss: the sum of the microbatches' weighted losses of this run; of the last stage only.
        outputs: what the last stage has made of each microbatch, if it is asked to keep it.
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
        settle: Callable[[], None],
        gather: Callable[[Rows], Sequence[Rows]],
    ) -> None:
        """Puts the parts together.

        Args:
            module: the stage's layers.
            boundary: their part of each microbatch's graph.
            reduce: starts to add its gradients up over the ranks that share them.
            optimizer: of their parameters.
            loss: of the last stage: of a microbatch's output and targets, its mean.
            route: which later stage gets what.
            versions: of the weights, where there are several.
            settle: is called before a step, and completes the gradients.
            gather: makes of statistics of batch normalisation those of all replicas.
        """
        self.module = module
        self.optimizer = optimizer
        self.loss = 0.0
        self.outputs: dict[int, Any] | None = None
        self._boundary = boundary
        self._reduce = reduce
        self._criterion = loss
        self._route = route
        self._versions = versions
        self._settle = settle
        self._gather = gather
        self._codec = TorchCodec()
        self._batch: Batch | None = None
        self._frames: dict[tuple[int, int], np.ndarray] = {}
        self._losses: dict[int, torch.Tensor] = {}

    def begin(self, batch: Batch, *, training: bool, keep: bool = False) -> None:
        """Prepares a run.

        Args:
            batch: that is gone through.
            training: whether it is gone back.
            keep: whether the last stage keeps its outputs, and finds no loss.
        """
        self._batch = batch
        self._training = training
        self.loss = 0.0
        self.outputs = {} if keep else None
        self._losses.clear()
        self._frames.clear()
        self.module.train(training)
        if self._versions is not None:
            self._versions.restart()

    def forward(self, microbatch: int, given: Mapping[int, np.ndarray]) -> None:
        """Takes a microbatch through; the last stage finds its loss."""
        batch = self._batch
        assert batch is not None  # noqa: S101 - begun
        inputs = batch.inputs(microbatch)
        parcels = {stage: unpack(frame, self._codec) for stage, frame in given.items()}
        with nullcontext() if self._training else torch.no_grad():
            outputs = self._boundary.forward(microbatch, parcels, inputs)
            if OUTPUT in outputs:
                self._conclude(microbatch, outputs[OUTPUT], batch)
            else:
                frames = self._boundary.frames(microbatch, self._route(inputs))
                self._frames |= {(microbatch, taker): frame for taker, frame in frames.items()}
        if not self._training:
            self._boundary.forget()

    def output(self, microbatch: int, taker: int) -> np.ndarray:
        """The frame that a later stage gets."""
        return self._frames.pop((microbatch, taker))

    def backward(self, microbatch: int, given: Mapping[int, np.ndarray]) -> None:
        """Takes a microbatch back."""
        self._return(microbatch, self._boundary.backward(microbatch, self._gradients(microbatch, given)))

    def backward_input(self, microbatch: int, given: Mapping[int, np.ndarray]) -> None:
        """Does the part of it that earlier stages wait for."""
        self._return(microbatch, self._boundary.backward_input(microbatch, self._gradients(microbatch, given)))

    def backward_weight(self, microbatch: int) -> None:
        """Does the rest."""
        self._boundary.backward_weight(microbatch)

    def gradient(self, microbatch: int, giver: int) -> np.ndarray:
        """The frame of gradients that an earlier stage gets."""
        return self._frames.pop((microbatch, giver))

    def recall(self, version: int) -> None:
        """Computes with an older version of the weights, or with the newest again."""
        if self._versions is not None:
            self._versions.show(version)

    def reduce(self) -> None:
        """Starts to add gradients up over the ranks that share parameters."""
        self._reduce()

    def step(self) -> None:
        """Lets the optimizer step, and forgets the gradients."""
        if self._versions is not None:
            self._versions.advance()
        self._settle()
        self._boundary.statistics.update(self._gather(self._boundary.statistics.take()))
        self._boundary.step += 1
        if self.optimizer is not None:
            parameters = list(self.module.parameters())
            # Graphs of other microbatches are gone back with the weights that they were made with, which are kept.
            with _unsafe_preserve_version_counter(tuple(parameters)):
                self.optimizer.step()
            self.optimizer.zero_grad()

    def surrender(self) -> dict[str, torch.Tensor | None]:
        """Gives the gradients of a run that has not stepped away, and all else that it has collected up."""
        self._boundary.statistics.take()
        found = {name: parameter.grad for name, parameter in self.module.named_parameters()}
        self.module.zero_grad()
        return found

    def _conclude(self, microbatch: int, output: Any, batch: Batch) -> None:
        if self.outputs is not None:
            self.outputs[microbatch] = output
        elif self._criterion is not None:
            loss = self._criterion(output, batch.targets(microbatch))
            self.loss += float(loss.detach()) * batch.share(microbatch)
            if self._training:
                self._losses[microbatch] = loss * batch.weight(microbatch)

    def _gradients(self, microbatch: int, given: Mapping[int, np.ndarray]) -> Any:
        if microbatch in self._losses:
            return self._losses.pop(microbatch)
        return {stage: unpack(frame, self._codec)[0] for stage, frame in given.items()}

    def _return(self, microbatch: int, gradients: Mapping[int, Any]) -> None:
        for giver, found in gradients.items():
            self._frames[microbatch, giver] = pack(found, self._codec)[0]
