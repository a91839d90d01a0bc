"""Captures an unchanged model as layers; any run of consecutive layers can be a stage.

Three methods are tried in this order: a Sequential is a chain of its children, and nothing is traced; torch.fx traces
the code between the layers, which stay as they are; torch.export traces everything. `coordd_torch.pipeline.layers`
defines the layers of a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from coordd.errors import ArgumentError
from coordd.pipeline.graph import Layer
from coordd_torch.pipeline.chain import flattened, is_sequential
from coordd_torch.pipeline.cut import Cut
from coordd_torch.pipeline.inputs import Call, only
from coordd_torch.pipeline.layers import first_names
from coordd_torch.pipeline.rows import dimension_of
from coordd_torch.pipeline.stage_module import StageModule
from coordd_torch.pipeline.trace_cache import SEQUENTIAL, Traces

__all__ = ["Captured", "capture", "stage"]

_ROWS = (1031, 1033)
"""Two row counts that no other dimension is likely to have."""


def capture(model: nn.Module, example: Any = None, *, cuts: Sequence[str] | None = None, depth: int = 1) -> Captured:
    """Finds the layers of a model.

    Args:
        model: any model, on any device, `meta` included; it is not run, and not changed.
        example: a batch: a tuple of positional arguments, a dict of keyword arguments, or one argument. Without one,
            arguments with a default are assumed to be omitted, and torch.export cannot be used.
        cuts: names of modules; a stage may begin at each of them and nowhere else. A module that contains none of them
            is called as a whole, so its forward may use code that cannot be traced.
        depth: how many levels of ModuleLists, ModuleDicts and Sequentials are opened to find layers.

    The model's dtype and, with torch.export, its device must not change afterwards. Models of `transformers` need
    ``use_cache=False``: their caches cannot be traced.

    Raises:
        CaptureError: the model cannot be cut automatically; the message names the line that prevents it.
        ArgumentError: the model does not take this example, or no stage can begin at one of the `cuts`.
    """
    if cuts is not None:
        cuts = first_names(model, cuts)
    if is_sequential(model):
        parts = list(flattened(model))
        if not any(cut.startswith(part + ".") for cut in cuts or () for part in parts):
            return Captured(model, Traces.of_chain(model, parts, cuts=cuts))
    call = Call.assumed(model) if example is None else Call.bound(model, example)
    return Captured(model, Traces.of_model(model, call, example=example is not None, depth=depth, cuts=cuts))


def stage(captured: Captured, first: int, last: int) -> StageModule:
    """Returns the layers from `first` to `last`, both included, as a module.

    Raises:
        ArgumentError: there are no such layers.
    """
    count = len(captured.layers)
    if not 0 <= first <= last < count:
        raise ArgumentError(f"there are layers 0 to {count - 1}, so {first} to {last} are no stage")
    return StageModule(captured.model, captured.traces, first, last)


class Captured:
    """A model's layers.

    Attributes:
        model: the model itself; it can be released once the rank's stages are made.
        traces: the graphs.
    """

    def __init__(self, model: nn.Module, traces: Traces) -> None:
        self.model = model
        self.traces = traces
        self._row_dimensions: dict[Any, list[int | None] | None] = {}

    @property
    def way(self) -> str:
        """The capture method: ``sequential``, ``fx`` or ``export``."""
        return self.traces.way

    @cached_property
    def layers(self) -> list[tuple[str, list[fx.Node]]]:
        """Name and nodes of each layer."""
        trace = self.traces.first
        nodes: list[list[fx.Node]] = [[] for _ in self.traces.names]
        for node in trace.graph.nodes:
            if node in trace.layer:
                nodes[trace.layer[node]].append(node)
        return list(zip(self.traces.names, nodes, strict=True))

    @cached_property
    def table(self) -> list[Layer]:
        """The layers as the partitioner sees them."""
        return [self._row(index, name, nodes) for index, (name, nodes) in enumerate(self.layers)]

    def _row(self, index: int, name: str, nodes: list[fx.Node]) -> Layer:
        layer = self.traces.first.layer
        last = index == len(self.layers) - 1
        users = [*nodes, *(node for node in self.traces.first.graph.nodes if last and node.op == "output")]
        reads = {layer[each] for node in users for each in node.all_input_nodes if each in layer} - {index}
        used = Cut(self.traces.first, index, index).tensors(self.model)
        parameters = tuple(name for name, parameter in self.model.named_parameters() if id(parameter) in used)
        return Layer(name, tuple(sorted(reads)), self._called(index), parameters)

    def _called(self, index: int) -> str:
        """Returns the module with state that a layer calls, preferably one that other layers call, too."""
        mine: dict[str, None] = {}
        others: dict[str, None] = {}
        for layer, names in self.traces.calls.items():
            (mine if layer == index else others).update(dict.fromkeys(map(self._stateful, names)))
        shared = [name for name in mine if name in others]
        return next(iter([*filter(None, shared), *mine]), "")

    def _stateful(self, name: str) -> str:
        """Returns the first name of the module that a layer is named after, or an empty string if it has no state."""
        called = dict(self.model.named_modules(remove_duplicate=False)).get(name.partition("#")[0])
        if called is None or not any(True for _ in (*called.parameters(), *called.buffers())):
            return ""
        return next((path for path, module in self.model.named_modules() if module is called), "")

    def interface(
        self, first: int, last: int, *, values: Mapping[str, Any] | None = None, training: bool = True
    ) -> Cut:
        """Returns what the layers from `first` to `last` read and write, for these inputs or those of the example."""
        trace = self.traces.first if values is None else self.traces.find(values, training=training)
        return Cut(trace, first, last)

    def inputs(self, batch: Any) -> dict[str, Any]:
        """Returns a batch as the named values that stages take.

        Raises:
            ArgumentError: the model does not take it.
        """
        return self.traces.call(batch)

    def row_dimensions(self, batch: Any) -> list[int | None] | None:
        """Returns the row dimension of each leaf of the output, or None for a leaf without one; None if it is unknown.

        It is the dimension that grows with the rows of the inputs when the model runs without data in evaluation mode.
        """
        kind = tuple(
            (leaf.shape[1:], leaf.dtype, leaf.dim()) if isinstance(leaf, torch.Tensor) else repr(leaf)
            for leaf in pytree.tree_leaves(batch)
        )
        if kind not in self._row_dimensions:
            self._row_dimensions.clear()
            self._row_dimensions[kind] = self._found_dimensions(batch)
        return self._row_dimensions[kind]

    def _found_dimensions(self, batch: Any) -> list[int | None] | None:
        outputs = []
        for rows in _ROWS:
            try:
                outputs.append(self.traces.imagined(batch, rows, self.outcome))
            except Exception:  # noqa: BLE001 - a layer depends on its data
                return None
        leaves = [pytree.tree_leaves(output) for output in outputs]
        if len(leaves[0]) != len(leaves[1]):
            return None
        return [dimension_of(one, other, _ROWS) for one, other in zip(*leaves, strict=True)]

    def outcome(self, model: nn.Module, batch: Any) -> Any:
        """Calls the unsplit model, or one like it, with a batch."""
        if self.way == SEQUENTIAL:
            return model(only(model, batch))
        args, kwargs = Call.bound(model, batch).arguments()
        return model(*args, **kwargs)
