"""One graph of a model, for training or evaluation mode and for some shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx, nn
from torch.utils import _pytree as pytree

from coordd_torch.pipeline.aliases import Aliases

__all__ = ["Trace"]


def _always(_values: Mapping[str, Any]) -> bool:
    return True


@dataclass(eq=False)
class Trace:
    """A graph, with the calls that it is valid for.

    Attributes:
        root: has the modules and tensors that the graph's nodes name; its parameters hold no data.
        graph: one placeholder for each of `names`; its output is the list of the leaves of the model's output.
        names: of the inputs.
        output: the structure of the model's output.
        training: the mode that it is valid for; None for both.
        fixed: the inputs that are not tensors, and are constants of the graph.
        shapes: returns whether it is valid for inputs of these shapes.
        tried: the input types for which it was compared with the model; None if it needs no such trial.
        together: pairs of nodes that no cut may separate.
        layer: the layer of each node; see `Layering.assign`.
    """

    root: nn.Module
    graph: fx.Graph
    names: tuple[str, ...]
    output: pytree.TreeSpec
    training: bool | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    shapes: Callable[[Mapping[str, Any]], bool] = _always
    tried: set[tuple[Any, ...]] | None = None
    together: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    layer: dict[fx.Node, int] = field(default_factory=dict)

    @cached_property
    def aliases(self) -> Aliases:
        """The groups of nodes that share memory written in place."""
        return Aliases(self.graph)

    @cached_property
    def inputs(self) -> dict[fx.Node, str]:
        """The name of each placeholder."""
        nodes = [node for node in self.graph.nodes if node.op == "placeholder"]
        shown = self.names if len(nodes) == len(self.names) else [name for name in self.names if name not in self.fixed]
        return dict(zip(nodes, shown, strict=True))

    @cached_property
    def layers(self) -> int:
        """Number of layers."""
        return 1 + max(self.layer.values(), default=0)

    def holds(self, names: tuple[str, ...], values: Mapping[str, Any], *, training: bool) -> bool:
        """Returns whether the trace is valid for these inputs in this mode."""
        return (
            self.training in {None, training}
            and names == self.names
            and all(_same(values[name], value) for name, value in self.fixed.items())
            and self.shapes(values)
        )


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)
