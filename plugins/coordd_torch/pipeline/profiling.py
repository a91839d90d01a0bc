"""Measures the cost of a model's layers: each runs a few microbatches forward and backward, one layer after the other.

The model is not changed, and only one layer's weights are allocated at a time: random numbers of the same shapes
replace parameters on the meta device, as the time of a layer seldom depends on its weights. Values pass from layer to
layer as they do from stage to stage, so each layer has its own graph.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.func import functional_call
from torch.utils import _pytree as pytree

from coordd.pipeline import graph
from coordd.pipeline.config import PipelineConfig
from coordd.pipeline.frame import pack, unpack
from coordd.pipeline.load import Load
from coordd.pipeline.profile import Border, Profile
from coordd_torch.pipeline.capture import Captured, stage
from coordd_torch.pipeline.codec import TorchCodec, enter
from coordd_torch.pipeline.footprint import Footprint, address
from coordd_torch.pipeline.rng_and_autocast import seeded
from coordd_torch.pipeline.split import obstacle, walk
from coordd_torch.pipeline.stage_module import OUTPUT, StageModule
from coordd_torch.pipeline.tying import copied

__all__ = ["profile"]

_ROUNDS = 5
"""Number of measurements; the fastest counts, because disturbances can only slow down a run."""

Finish = Callable[[Any], Tensor]


class _Pace(NamedTuple):
    forward: float
    backward: float
    inward: float


def profile(
    captured: Captured, given: Mapping[str, Any], config: PipelineConfig, *, finish: Finish | None = None
) -> Profile:
    """Measures all layers.

    Args:
        captured: the model, with or without data.
        given: the inputs of one microbatch, by name.
        config: the compression of values, and whether activations are recomputed.
        finish: computes the loss from the output, for the backward pass.

    Raises:
        Exception: any exception that a layer raises.
    """
    device = next((leaf.device for leaf in given.values() if isinstance(leaf, Tensor)), torch.device("cpu"))
    groups = graph.condense(captured.table, copied(captured.table, config.reuse))
    starts = {group.start for group in groups}
    sizes = {name: parameter.nbytes for name, parameter in captured.model.named_parameters()}
    loads: list[Load] = []
    packings: list[tuple[float, int]] = []
    with _training(captured.model), seeded(0, device), torch.enable_grad():
        modules = [stage(captured, at, at) for at in range(len(captured.layers))]
        footprint = Footprint([module.interface(given).reads for module in modules], pytree.tree_leaves(given))
        values: dict[str, Any] = {}
        for at, (module, layer) in enumerate(zip(modules, captured.table, strict=True)):
            bench = _Bench(module, device, finish)
            outputs, saved = bench.warm({**given, **values})
            kept = footprint.note(at, saved, outputs)
            pace = bench.pace({**given, **values})
            parameters = sum(sizes[key] for key in layer.parameters)
            again = pace.forward if config.recompute else 0.0
            loads.append(Load(pace.forward, again + pace.backward, parameters, kept, inward=again + pace.inward))
            values = {name: value for name, value in {**values, **outputs}.items() if footprint.crosses(name, at)}
            packings.append(_packing(values, config.compression) if at + 1 in starts else (0.0, 0))
    borders = [Border(seconds, volume, footprint.entering(at)) for at, (seconds, volume) in enumerate(packings[:-1])]
    return Profile(tuple(layer.name for layer in captured.table), tuple(loads), tuple(groups), tuple(borders))


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Puts all modules into training mode inside the block."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.train()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


class _Clocked(nn.Module):
    """Measures the time of a layer, without the time of replacing its tensors."""

    def __init__(self, layer: StageModule, finish: Finish | None) -> None:
        super().__init__()
        self.layer = layer.train()
        self.seconds = 0.0
        self._finish = finish

    def forward(self, values: Mapping[str, Any]) -> dict[str, Any]:
        begin = time.perf_counter()
        outputs: dict[str, Any] = self.layer(values)
        if OUTPUT in outputs and self._finish is not None:
            outputs = {OUTPUT: self._finish(outputs[OUTPUT])}
        self.seconds = time.perf_counter() - begin
        return outputs


class _Bench:
    """One layer, with copies of its tensors."""

    def __init__(self, layer: StageModule, device: torch.device, finish: Finish | None) -> None:
        self._module = _Clocked(layer, finish)
        own = (*layer.named_parameters(), *layer.named_buffers())
        self._tensors = {f"layer.{name}": _stand_in(tensor, device) for name, tensor in own}

    def warm(self, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[int, int]]:
        """Runs the layer before it is measured; returns its outputs, and the tensors it saves, in bytes by address."""
        saved: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            saved[address(tensor)] = tensor.untyped_storage().nbytes()
            return tensor

        self._run(_entered(values)[1])  # a stage's first run differs: it copies its inputs
        with saved_tensors_hooks(note, lambda tensor: tensor):
            outputs = self._run(_entered(values)[1])
        for tensor in self._tensors.values():
            saved.pop(address(tensor), None)
        left: dict[str, Any] = pytree.tree_map_only(Tensor, _leaf, outputs)
        return left, saved

    def pace(self, values: Mapping[str, Any]) -> _Pace:
        """Measures the time of the layer's passes."""
        return _Pace(*map(min, zip(*(self._once(values) for _ in range(_ROUNDS)), strict=True)))

    def _run(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return dict(functional_call(self._module, self._tensors, (values,)))

    def _once(self, values: Mapping[str, Any]) -> _Pace:
        entered, entering = _entered(values)
        outputs = self._run(entering)
        forward = self._module.seconds
        ends = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        del outputs
        given = [torch.ones_like(end) for end in ends]
        parts = bool(ends) and bool(entered) and obstacle(walk(map(get_gradient_edge, ends))) is None
        inward = 0.0
        if parts:
            begin = time.perf_counter()
            torch.autograd.grad(ends, entered, given, retain_graph=True, allow_unused=True)
            inward = time.perf_counter() - begin
        begin = time.perf_counter()
        if ends:
            torch.autograd.backward(ends, given)
        backward = time.perf_counter() - begin
        return _Pace(forward, backward, min(inward, backward) if parts or not entered else backward)


def _entered(values: Mapping[str, Any]) -> tuple[list[Tensor], dict[str, Any]]:
    """Returns the leaves that receive gradients, and the values as they enter a stage."""
    leaves: list[Tensor] = []

    def entered(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        leaves.append(tensor.detach())
        return enter(leaves[-1])

    return leaves, pytree.tree_map_only(Tensor, entered, dict(values))


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor; for one without data, creates values that keep activations from growing or vanishing."""
    if not tensor.is_meta:
        return _leaf(tensor.detach().clone().requires_grad_(tensor.requires_grad))
    made = torch.ones_like(tensor, device=device, requires_grad=False)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return made if tensor.dtype is torch.bool else made.zero_()
    if tensor.dim() > 1:
        made.normal_(std=1 / math.sqrt(max(1, tensor[0].numel())))
    return made.requires_grad_(tensor.requires_grad)


def _packing(values: Mapping[str, Any], compress: str | None) -> tuple[float, int]:
    """Returns the time to pack values into a frame and unpack them, in seconds, and the size of the frame in bytes."""
    codec = TorchCodec()
    times = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        frame, _ = pack(dict(values), codec, compress=lambda tensor: compress if tensor.requires_grad else None)
        unpack(frame, codec)
        times.append(time.perf_counter() - begin)
    return min(times), frame.nbytes
