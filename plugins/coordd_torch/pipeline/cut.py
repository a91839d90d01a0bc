"""Extracts consecutive layers of a trace as a separate graph."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from torch import fx, nn

from coordd_torch.pipeline.pure_nodes import attribute
from coordd_torch.pipeline.trace import Trace

__all__ = ["VALUE", "Cut"]

VALUE = "%"
"""Prefix of the names of all values that layers compute; inputs have none, as a layer and an input may share a name."""

_ANYWHERE = -1


class Cut:
    """The layers from `first` to `last` (included) of a trace, with their inputs and outputs."""

    def __init__(self, trace: Trace, first: int, last: int) -> None:
        self._trace = trace
        self.span = (first, last)
        layers = trace.layer
        self.is_last = last >= trace.layers - 1
        self._own = [node for node in trace.graph.nodes if first <= layers.get(node, _ANYWHERE) <= last]
        outputs = [node for node in trace.graph.nodes if node.op == "output"]
        self._result = outputs[0]
        ends = [*self._own, self._result] if self.is_last else self._own
        self._outside = self._reach(ends)
        later = {node for node in trace.graph.nodes if layers.get(node, _ANYWHERE) > last} | set(outputs)
        self._given = [] if self.is_last else [node for node in self._own if not later.isdisjoint(node.users)]

    def _reach(self, ends: list[fx.Node]) -> list[fx.Node]:
        """Returns the outside nodes that these nodes need, in graph order.

        A node that every stage can compute for itself is followed to its inputs.
        """
        own = set(self._own)
        found: set[fx.Node] = set()
        open_ = list(ends)
        while open_:
            node = open_.pop()
            writers = [] if node in own else self._trace.aliases.writers(node)
            for each in (*node.all_input_nodes, *writers):
                if each not in own and each not in found:
                    found.add(each)
                    if each not in self._trace.layer:
                        open_.append(each)
        return [node for node in self._trace.graph.nodes if node in found]

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The names of the model inputs that the layers read."""
        return tuple(self._trace.inputs[node] for node in self._outside if node.op == "placeholder")

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """The names of the values of earlier layers that the layers read."""
        return tuple(VALUE + node.name for node in self._outside if node in self._trace.layer)

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """The names of the values that later layers read."""
        return tuple(VALUE + node.name for node in self._given)

    @cached_property
    def modules(self) -> frozenset[str]:
        """The paths of the modules that are called as a whole."""
        return frozenset(str(node.target) for node in self._own if node.op == "call_module")

    def tensors(self, model: nn.Module) -> set[int]:
        """The identities of the model's parameters and buffers that the layers use."""
        used = [attribute(model, path) for path in self._attributes()]
        for path in self.modules:
            module = model.get_submodule(path)
            used += [*module.parameters(), *module.buffers()]
        return {id(tensor) for tensor in used if tensor is not None}

    def constants(self, root: nn.Module, known: nn.Module) -> Iterator[tuple[str, Any]]:
        """Yields the attributes that the graph names and the module `known` lacks."""
        for path in self._attributes():
            if attribute(known, path) is None:
                yield path, attribute(root, path)

    def _attributes(self) -> list[str]:
        return [str(node.target) for node in self._outside if node.op == "get_attr"]

    def graph(self) -> fx.Graph:
        """Builds the graph: it takes `inputs`, then `reads`, and returns `writes` or the leaves of the model output."""
        graph = fx.Graph()
        new: dict[fx.Node, fx.Node] = {}
        border = [node for node in self._outside if node.op == "placeholder"]
        border += [node for node in self._outside if node in self._trace.layer]
        for node in border:
            new[node] = graph.placeholder(node.name)
        inside = {*self._own, *self._outside}
        for node in self._trace.graph.nodes:
            if node in inside and node not in new:
                new[node] = graph.node_copy(node, new.__getitem__)
        result = self._result.args[0] if self.is_last else tuple(self._given)
        graph.output(fx.map_arg(result, new.__getitem__))
        return graph
