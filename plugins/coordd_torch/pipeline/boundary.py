"""Boundary of a stage's autograd graph: the stage has its own part of each microbatch's graph.

Values received from other stages enter as leaves; the gradients of these leaves are sent back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from coordd.errors import ArgumentError
from coordd.pipeline.frame import joined, pack, parted
from coordd_torch.pipeline.buffers import Held, WrittenBuffers, borrowed
from coordd_torch.pipeline.codec import TorchCodec, leaf
from coordd_torch.pipeline.cpu_offload import Attic
from coordd_torch.pipeline.deferred_weight_gradients import Ledger, pay
from coordd_torch.pipeline.rng_and_autocast import Surroundings, seed_for, seeded
from coordd_torch.pipeline.saved_tensors import Shelf
from coordd_torch.pipeline.split import SplitBackward, obstacle, walk
from coordd_torch.pipeline.statistics import DeferredStatistics
from coordd_torch.pipeline.views import aliased

__all__ = ["Boundary", "Gradients", "Parcel"]

log = logging.getLogger("coordd")

Parcel = tuple[Mapping[str, Any], Sequence[Tensor]]
"""A frame unpacked by `unpack`: values by name, and their tensors in order."""

Gradients = Mapping[int, Sequence[Tensor | None]] | Tensor
"""For each stage that received values, one gradient or None for each of their tensors in order; or the loss."""


@dataclass
class _Passage:
    """State of a microbatch that is kept between its forward and its backward pass."""

    microbatch: int
    entered: dict[int, list[Tensor]]
    outputs: dict[str, Any] | None = None
    sent: dict[int, list[str]] = field(default_factory=dict)
    edges: dict[int, list[GradientEdge | None]] = field(default_factory=dict)
    again: Callable[[], dict[str, Any]] | None = None
    shelf: Shelf | None = None
    left: Callable[[], None] | None = None

    @property
    def owing(self) -> list[Tensor]:
        """The leaves whose gradients are sent to other stages."""
        return [tensor for tensors in self.entered.values() for tensor in tensors if tensor.requires_grad]


class Boundary:
    """Forward and backward passes of one stage, in any order and with any number of microbatches in flight.

    Dropout draws from the process's generator, in the order of the microbatches: a run is reproducible, but draws other
    numbers than a run with another schedule, split or number of microbatches. With a ``seed`` the numbers depend only
    on seed, step, stage and microbatch, not on the schedule or the data-parallel degree. Neither mode draws the numbers
    of a plain run, which has one stream for the whole batch; a plain run that takes the same microbatches through the
    same stages under `seed_for` draws the same numbers.

    Attributes:
        statistics: of the stage's batch normalisation, updated once per step.
        step: the number of the training step, for the seed.
        codec: converts tensors to frames; knows the stage's device.
        attic: CPU offload of activations and of the optimizer's state; None if they stay in place.
        undivided: number of backward passes that could not be split as requested: `backward_input` did all the work.
        halved: the microbatches whose backward pass is split; None for all. The others skip the cost of preparing for
            it.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        codec: TorchCodec | None = None,
        compress: str | None = None,
        recompute: bool = False,
        split: bool = False,
        seed: int | None = None,
        stage: int = 0,
        attic: Attic | None = None,
    ) -> None:
        """Creates the boundary of a stage.

        Args:
            module: the stage: takes and returns a dictionary of values by name.
            codec: knows the stage's device; by default the CPU.
            compress: storage form of tensors with gradients, ``"bf16"`` or ``"int8"``; all other tensors, such as
                masks, are sent unchanged.
            recompute: keeps only the stage's inputs, and recomputes the activations for the backward pass.
            split: frees between `backward_input` and `backward_weight` the tensors that only the former needs.
            seed: of the random numbers of each microbatch.
            stage: its number, for the seed.
            attic: where activations are kept until the backward pass; None if they stay in place.

        Raises:
            ArgumentError: a layer needs several ranks at a time, or this PyTorch version cannot run backward from the
                middle of a graph.
        """
        if torch.__version__ < "2.5":
            text = f"pipelines need PyTorch 2.5 or newer, this is {torch.__version__}"
            raise ArgumentError(text)
        self.statistics = DeferredStatistics(module)
        self.step = 0
        self.undivided = 0
        self.halved: Collection[int] | None = None
        self._module = module
        self._buffers = WrittenBuffers(module)
        self.codec = codec or TorchCodec()
        self._compress = compress
        self._recompute = recompute
        self._split = split
        ledger = Ledger(module) if split else None
        self._ledger = ledger if ledger is not None and ledger.suffices else None
        self._seed = seed
        self._stage = stage
        self.attic = attic
        self._passages: dict[int, _Passage] = {}

    @property
    def held(self) -> tuple[int, ...]:
        """The microbatches that have stored state."""
        return tuple(self._passages)

    def forward(self, microbatch: int, parcels: Mapping[int, Parcel], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Runs a microbatch through the stage; without gradients, where these are disabled.

        Args:
            microbatch: its number; no state of this microbatch may be stored.
            parcels: values received from other stages, by stage number.
            inputs: of the model, by name.

        Returns:
            the outputs by name. A loss may be computed from them for `backward`.
        """
        values = {name: value for parcel, _ in parcels.values() for name, value in parcel.items()}
        entered = {stage: [leaf(tensor) for tensor in tensors] for stage, (_, tensors) in parcels.items()}
        passage = self._passages[microbatch] = _Passage(microbatch, entered)
        with self.statistics.microbatch(), self._chance(microbatch):
            if self._recompute and torch.is_grad_enabled():
                with self._buffers.kept() as found:
                    passage.again = self._replay(passage, {**inputs, **values}, found)
                    passage.outputs = self._forgetful({**inputs, **_copied(values, self.codec)})
            else:
                passage.outputs = self._built(passage, {**inputs, **values})
        return dict(passage.outputs)

    def forget(self) -> None:
        """Drops all microbatches, after an abandoned step or one that only computed outputs."""
        self._passages.clear()

    def frames(self, microbatch: int, sends: Mapping[int, Sequence[str]]) -> dict[int, np.ndarray]:
        """Packs a microbatch's outputs and releases them: memory that backward does not need is freed.

        Args:
            microbatch: its number.
            sends: the names of the values that each stage receives.

        Returns:
            a frame for each stage.
        """
        passage = self._passages[microbatch]
        outputs, passage.outputs = passage.outputs, None
        assert outputs is not None  # noqa: S101 - packed once
        frames = {}
        for stage, names in sends.items():
            value = {name: outputs[name] for name in names}
            value |= aliased(value)
            frames[stage], tensors = pack(value, self.codec, compress=self._form)
            passage.sent[stage] = list(names)
            if passage.again is None:
                passage.edges[stage] = [_edge(tensor) for tensor in tensors]
        if not torch.is_grad_enabled():
            del self._passages[microbatch]
        return frames

    def backward(self, microbatch: int, gradients: Gradients) -> dict[int, list[Tensor | None]]:
        """Accumulates the gradients of the parameters.

        Returns:
            for each stage that sent values, one gradient or None for each of their tensors in order.
        """
        passage = self._passages.pop(microbatch)
        edges, given = self._roots(passage, gradients)
        if edges:
            with self._buffers.spared():
                torch.autograd.backward(edges, given)
        return _taken(passage)

    def backward_input(self, microbatch: int, gradients: Gradients) -> dict[int, list[Tensor | None]]:
        """Computes the gradients that other stages wait for; `backward_weight` does the rest if the graph can be split.

        Returns:
            as `backward`.
        """
        passage = self._passages[microbatch]
        edges, given = self._roots(passage, gradients)
        if edges:
            with self._buffers.spared():
                self._begin_backward(passage, edges, given)
        return _taken(passage)

    def backward_weight(self, microbatch: int) -> None:
        """Accumulates the parameter gradients that `backward_input` has deferred."""
        passage = self._passages.pop(microbatch)
        if passage.left is not None:
            with self._buffers.spared():
                passage.left()

    def _begin_backward(self, passage: _Passage, edges: list[GradientEdge], given: list[Tensor]) -> None:
        if not (inputs := passage.owing):
            passage.left = partial(torch.autograd.backward, edges, given)
        elif self._ledger is not None:
            with self._ledger.noting() as debts:
                torch.autograd.backward(edges, given)
            passage.left = partial(pay, debts)
        elif reason := obstacle(graph := walk(edges)):
            self._note(reason)
            torch.autograd.backward(edges, given)
        else:
            split = SplitBackward(edges, given, inputs, shelf=passage.shelf, graph=graph)
            split.first()
            passage.left = split.second

    def _note(self, reason: str) -> None:
        self.undivided += 1
        if self.undivided == 1:
            log.warning("backward passes of stage %d are not split, as under 1f1b: it has %s", self._stage, reason)

    def _form(self, tensor: Tensor) -> str | None:
        return self._compress if tensor.requires_grad else None

    @contextmanager
    def _chance(self, microbatch: int) -> Iterator[None]:
        if self._seed is None:
            yield
        else:
            with seeded(seed_for(self._seed, self.step, self._stage, microbatch), self.codec.device):
                yield

    def _built(self, passage: _Passage, values: dict[str, Any]) -> dict[str, Any]:
        """Computes the outputs and their graph."""
        split = self._split and (self.halved is None or passage.microbatch in self.halved)
        halved = bool(split and passage.owing)
        passage.shelf = Shelf(self.attic) if self.attic or (halved and self._ledger is None) else None
        with (
            passage.shelf.filling() if passage.shelf else nullcontext(),
            self._ledger.able() if halved and self._ledger else nullcontext(),
        ):
            outputs: dict[str, Any] = self._module(values)
        return outputs

    def _forgetful(self, values: dict[str, Any]) -> dict[str, Any]:
        """Computes the outputs as leaves that record which of them have gradients; their graph is not kept.

        The graph exists until all outputs are computed, because layers may compute gradients themselves (forces,
        penalties).
        """
        structure, tensors = parted(self._module(values), self.codec)
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        found: dict[str, Any] = joined(structure, leaves)
        return found

    def _replay(self, passage: _Passage, values: dict[str, Any], found: list[Held]) -> Callable[[], dict[str, Any]]:
        surroundings = Surroundings(self.codec.device)

        def again() -> dict[str, Any]:
            with surroundings.again(), borrowed(found), torch.enable_grad():
                return self._built(passage, values)

        return again

    def _roots(self, passage: _Passage, gradients: Gradients) -> tuple[list[GradientEdge], list[Tensor]]:
        """Returns the graph edges that receive gradients, and these gradients.

        The edges are in the order of autograd on one graph, which visits consumers from the last to the first.
        """
        if passage.again is not None:
            gradients = self._recomputed(passage, gradients)
        elif isinstance(gradients, Tensor):
            return [get_gradient_edge(gradients)], [torch.ones_like(gradients)]
        passage.outputs = None
        pairs: list[tuple[GradientEdge, Tensor]] = []
        for stage in sorted(gradients, reverse=True):
            if len(gradients[stage]) != len(passage.edges[stage]):
                text = f"stage {stage} was sent {len(passage.edges[stage])} tensors, and has sent back gradients for "
                raise ArgumentError(text + str(len(gradients[stage])))
            found = zip(passage.edges[stage], gradients[stage], strict=True)
            pairs += [(edge, given) for edge, given in found if edge is not None and given is not None]
        return [edge for edge, _ in pairs], [given for _, given in pairs]

    def _recomputed(self, passage: _Passage, gradients: Gradients) -> Mapping[int, Sequence[Tensor | None]]:
        """Recomputes the graph, and returns the gradients of the sent values, or of the outputs used by the loss."""
        assert passage.again is not None  # noqa: S101 - the caller has checked it
        outputs = passage.again()
        passage.again = None
        if isinstance(gradients, Tensor):
            assert passage.outputs is not None  # noqa: S101 - the loss was computed of them
            passage.sent = {0: list(passage.outputs)}
            _, leaves = parted(passage.outputs, self.codec)
            torch.autograd.backward(gradients, inputs=[leaf for leaf in leaves if leaf.requires_grad])
            gradients = {0: [leaf.grad for leaf in leaves]}
        for stage, names in passage.sent.items():
            _, tensors = parted({name: outputs[name] for name in names}, self.codec)
            passage.edges[stage] = [_edge(tensor) for tensor in tensors]
        return gradients


def _edge(tensor: Tensor) -> GradientEdge | None:
    # With gradients disabled a view of a parameter still reports requires_grad, but has no edge to send them to.
    return get_gradient_edge(tensor) if tensor.requires_grad and torch.is_grad_enabled() else None


def _taken(passage: _Passage) -> dict[int, list[Tensor | None]]:
    """Returns the gradients of the leaves that entered, and drops these leaves."""
    found = {stage: [tensor.grad for tensor in tensors] for stage, tensors in passage.entered.items()}
    for tensors in passage.entered.values():
        for tensor in tensors:
            tensor.grad = None
    passage.entered, passage.edges, passage.outputs = {}, {}, None
    return found


def _copied(values: dict[str, Any], codec: TorchCodec) -> dict[str, Any]:
    """Copies values, as the module may change them in place."""
    structure, tensors = parted(values, codec)
    found: dict[str, Any] = joined(structure, [tensor.clone() for tensor in tensors])
    return found
