"""Where a stage's autograd graph ends, on either side: it has the stage's part of every microbatch's graph.

Values of other stages enter as leaves; gradients of what other stages got leave as the gradients of these leaves.
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
from coordd_torch.pipeline.attic import Attic
from coordd_torch.pipeline.buffers import Held, WrittenBuffers, borrowed
from coordd_torch.pipeline.codec import TorchCodec, leaf
from coordd_torch.pipeline.ledger import Ledger, pay
from coordd_torch.pipeline.shelf import Shelf
from coordd_torch.pipeline.split import SplitBackward, obstacle, walk
from coordd_torch.pipeline.statistics import DeferredStatistics
from coordd_torch.pipeline.surroundings import Surroundings, seed_for, seeded
from coordd_torch.pipeline.views import aliased

__all__ = ["Boundary", "Gradients", "Parcel"]

log = logging.getLogger("coordd")

Parcel = tuple[Mapping[str, Any], Sequence[Tensor]]
"""What `unpack` makes of a frame: values by name, and their tensors in order."""

Gradients = Mapping[int, Sequence[Tensor | None]] | Tensor
"""For each stage that was sent values, a gradient, or None, for each of their tensors in order; or the loss."""


@dataclass
class _Passage:
    """What is kept of a microbatch between its forward and its backward pass."""

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
        """The leaves whose gradients other stages wait for."""
        return [tensor for tensors in self.entered.values() for tensor in tensors if tensor.requires_grad]


class Boundary:
    """Takes microbatches through a stage, forward and backward, in any order and any number at a time.

    Dropout draws from the process's generator, as microbatches come: a run repeats itself exactly, but draws other
    numbers than another schedule, split or number of microbatches. With a ``seed`` what is drawn depends on seed, step,
    stage and microbatch alone: on no schedule and on no data-parallel degree. Neither draws what a plain run does,
    which has one stream for the whole batch; a plain run that takes the same microbatches through the same stages under
    `seed_for` does.

    Attributes:
        statistics: of the stage's batch normalisation, to be updated once a step.
        step: the number of the training step, for the seed.
        codec: knows the stage's device.
        attic: where activations, and the optimizer's state, wait; None for where they are.
        undivided: how many backward passes were to be split and could not be: `backward_input` did all of it.
        halved: the microbatches whose backward pass will be split; None for all of them. Others are spared the cost.
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
        """Makes the boundary of a stage.

        Args:
            module: the stage: gets and returns a dictionary of values by name.
            codec: knows the stage's device; by default it is the CPU.
            compress: the form in which tensors are stored that gradients flow through, ``"bf16"`` or ``"int8"``; all
                others, such as masks, travel as they are.
            recompute: keeps no activations but what came in, and computes the others anew for the backward pass.
            split: frees between `backward_input` and `backward_weight` what only the former needs.
            seed: of the random numbers of each microbatch.
            stage: its number, for the seed.
            attic: where activations wait for the backward pass, if not where they are.

        Raises:
            ArgumentError: a layer needs several ranks at a time, or this PyTorch cannot go back from the middle of a
                graph.
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
        """The microbatches that something is kept of."""
        return tuple(self._passages)

    def forward(self, microbatch: int, parcels: Mapping[int, Parcel], inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Takes a microbatch through the stage; without gradients, where these are disabled.

        Args:
            microbatch: its number, of which nothing is held.
            parcels: what other stages sent, by their numbers.
            inputs: of the model, by name.

        Returns:
            the outputs by name. A loss may be computed of them for `backward`.
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
        """Lets go of all microbatches, of a step that is given up, or that only wanted outputs."""
        self._passages.clear()

    def frames(self, microbatch: int, sends: Mapping[int, Sequence[str]]) -> dict[int, np.ndarray]:
        """Packs a microbatch's outputs, and lets go of them: what backward does not need is freed.

        Args:
            microbatch: its number.
            sends: the names of the values that each stage gets.

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
            for each stage that sent values, a gradient, or None, for each of their tensors in order.
        """
        passage = self._passages.pop(microbatch)
        edges, given = self._roots(passage, gradients)
        if edges:
            with self._buffers.spared():
                torch.autograd.backward(edges, given)
        return _taken(passage)

    def backward_input(self, microbatch: int, gradients: Gradients) -> dict[int, list[Tensor | None]]:
        """Does what other stages wait for, and leaves the rest to `backward_weight`, if the graph allows it.

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
        """Accumulates what gradients of parameters `backward_input` has left."""
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
        """Computes outputs, and the graph to them."""
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
        """Computes outputs that are leaves, and know which of them have gradients; the graph to them is not kept.

        It is there until all of them are computed: layers may ask for gradients of their own (forces, penalties).
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
        """Returns the edges of the graph that have gradients, with these.

        As in one graph, where consumers are gone through from the last to the first, so are they here.
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
        """Computes the graph, and returns the gradients of what was sent, or of what the loss was computed of."""
        assert passage.again is not None  # noqa: S101 - who calls has looked
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
    # Without gradients a view of a parameter says that it requires some, too, and has nowhere to send them.
    return get_gradient_edge(tensor) if tensor.requires_grad and torch.is_grad_enabled() else None


def _taken(passage: _Passage) -> dict[int, list[Tensor | None]]:
    """Takes the gradients off the leaves that entered, and lets go of these."""
    found = {stage: [tensor.grad for tensor in tensors] for stage, tensors in passage.entered.items()}
    for tensors in passage.entered.values():
        for tensor in tensors:
            tensor.grad = None
    passage.entered, passage.edges, passage.outputs = {}, {}, None
    return found


def _copied(values: dict[str, Any], codec: TorchCodec) -> dict[str, Any]:
    """Copies values, as who gets them may change them."""
    structure, tensors = parted(values, codec)
    found: dict[str, Any] = joined(structure, [tensor.clone() for tensor in tensors])
    return found
