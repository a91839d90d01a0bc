"""Split backward pass: first the gradients of a stage's inputs, which another rank waits for, later the parameters'.

Two plain passes would traverse the same nodes of the graph, and compute everything between them twice. But where the
paths to the inputs and to the parameters diverge, each node has one half for each::

    output ─▶ MatMul ─▶ GELU ─▶ MatMul ─▶ input        first pass: along the line
                │ T               │ T                   second: from each node that the line passes, down
              weight            weight

The first pass keeps the gradients that arrive at the nodes where a path branches off; the second starts there, one node
after the other, and follows the branches. Nothing is computed twice, sums are formed in the same order as in one pass,
and saved tensors that the second pass does not need are freed.

This holds for separate branches. Parameters that several nodes lead to (a weight used twice) are done in the first
pass; only a path that leads both to such a parameter and to another one is followed in both passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from coordd_torch.pipeline.saved_tensors import Shelf, strangers

__all__ = ["Graph", "SplitBackward", "obstacle", "walk"]

Graph = dict[Node, list[Node]]
"""All nodes of a graph with their children, in topological order: each node comes before its children."""

_INDIVISIBLE = {"CheckpointFunctionBackward": "a reentrant checkpoint", "CompiledFunctionBackward": "torch.compile"}
"""Nodes that can run backward only once, and only as a whole."""


@dataclass
class _Kept:
    """The gradients that arrived at a node.

    Its hook refers to them and not to the node, which would never be freed otherwise.
    """

    gradients: tuple[Tensor | None, ...] | None = None

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        """Stores the gradients on the first call; returns them on the second, as other hooks have processed them."""
        if self.gradients is None:
            self.gradients = gradients
            return None
        return self.gradients


@dataclass
class _Branch:
    """The path from a node to the parameters that only this node leads to."""

    node: Node
    leaves: list[Tensor]
    kept: _Kept = field(default_factory=_Kept)
    handle: RemovableHandle | None = None


class SplitBackward:
    """The two passes over one graph."""

    def __init__(
        self,
        roots: Sequence[GradientEdge],
        gradients: Sequence[Tensor | None],
        inputs: Iterable[Tensor],
        *,
        shelf: Shelf | None = None,
        graph: Graph | None = None,
    ) -> None:
        """Assigns the work to the two passes.

        Args:
            roots: of the graph, which has no `obstacle`.
            gradients: of the roots.
            inputs: the leaves whose gradients the first pass computes.
            shelf: has the saved tensors of the graph.
            graph: from `walk`, if already computed.
        """
        graph = graph or walk(roots)
        self._inputs = [leaf for leaf in inputs if leaf.requires_grad and _accumulator(leaf) in graph]
        toward = _toward({_accumulator(leaf) for leaf in self._inputs}, graph)
        edges = list(zip(roots, gradients, strict=True))
        self._roots = [pair for pair in edges if pair[0].node in toward]
        self._rest = [pair for pair in edges if pair[0].node not in toward]
        self._branches, self._own, self._early = _sorted(graph, toward, [edge.node for edge, _ in self._rest])
        self._shelf = shelf or Shelf()
        self._again = [branch.node for branch in self._branches]
        self._again += [node for node in graph if node not in toward and not hasattr(node, "variable")]

    def first(self) -> None:
        """Accumulates the gradients of the inputs, and of parameters that several branches lead to."""
        for branch in self._branches:
            branch.handle = branch.node.register_prehook(branch.kept)
        targets = self._inputs + self._early
        if targets:
            with self._shelf.clearing(self._again):
                _run(self._roots + self._rest, targets, retain_graph=True)
        self._roots, self._inputs, self._early, self._again = [], [], [], []

    def second(self) -> None:
        """Accumulates the gradients of all other parameters; the graph is freed branch by branch."""
        if self._own:
            _run(self._rest, self._own)
        self._rest.clear()
        for branch in self._branches:
            pairs = [
                (GradientEdge(branch.node, number), gradient)
                for number, gradient in enumerate(branch.kept.gradients or ())
                if gradient is not None
            ]
            if pairs:
                _run(pairs, branch.leaves)
            assert branch.handle is not None  # noqa: S101 - for the type checker
            branch.handle.remove()
        self._branches.clear()


def obstacle(graph: Iterable[Node]) -> str | None:
    """Returns what prevents splitting a graph's backward pass; None if nothing does.

    A non-reentrant checkpoint would be recomputed by each of the passes.
    """
    for node in graph:
        if node.name() in _INDIVISIBLE:
            return _INDIVISIBLE[node.name()]
        for hook in strangers(node):
            return f"saved tensors that {hook.__module__} gives back"
    return None


def walk(roots: Iterable[GradientEdge]) -> Graph:
    """Returns the graph that starts at some edges; this takes as long as some of its operators."""
    children: Graph = {}
    finished: list[Node] = []
    waiting = [(root.node, False) for root in roots]
    while waiting:
        node, seen = waiting.pop()
        if seen:
            finished.append(node)
        elif node not in children:
            children[node] = [child for child, _ in node.next_functions if child is not None]
            waiting.append((node, True))
            waiting.extend((child, False) for child in children[node] if child not in children)
    return {node: children[node] for node in reversed(finished)}


def _run(
    pairs: Sequence[tuple[GradientEdge, Tensor | None]], targets: list[Tensor], *, retain_graph: bool = False
) -> None:
    edges, gradients = zip(*pairs, strict=True)
    torch.autograd.backward(edges, gradients, retain_graph=retain_graph, inputs=targets)


def _accumulator(leaf: Tensor) -> Node:
    return torch.autograd.graph.get_gradient_edge(leaf).node


def _toward(targets: set[Node], graph: Graph) -> set[Node]:
    """Returns the targets and the nodes that lead to one."""
    found = set(targets)
    for node, children in reversed(graph.items()):
        if not found.isdisjoint(children):
            found.add(node)
    return found


_SEVERAL: Any = object()
_ROOT: Any = object()


def _sorted(graph: Graph, toward: set[Node], roots: list[Node]) -> tuple[list[_Branch], list[Tensor], list[Tensor]]:
    """Sorts the leaves that are not inputs.

    Returns:
        the leaves that only one node on the path to the inputs leads to, by node; the leaves unrelated to the inputs;
            and the leaves of the first pass.
    """
    owners: dict[Node, Any] = dict.fromkeys(roots, _ROOT)
    leaves: dict[Any, list[Tensor]] = {}
    for node, children in graph.items():
        owner = node if node in toward else owners[node]
        for child in children:
            if child not in toward:
                owners[child] = owner if owners.get(child, owner) is owner else _SEVERAL
        if node not in toward and hasattr(node, "variable"):
            leaves.setdefault(owner, []).append(node.variable)
    own, early = leaves.pop(_ROOT, []), leaves.pop(_SEVERAL, [])
    for owner in [owner for owner in leaves if isinstance(owner, BackwardCFunction)]:
        early += leaves.pop(owner)  # Python functions compute both halves in each run
    return [_Branch(node, leaves[node]) for node in graph if node in leaves], own, early
