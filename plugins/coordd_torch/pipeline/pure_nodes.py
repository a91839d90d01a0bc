"""Finds the nodes of a graph that every stage can compute itself: they use no parameters, random numbers or state."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload

from coordd_torch.pipeline.aliases import Aliases

__all__ = ["attribute", "free"]

_OPERATORS = {operator.__name__, "_operator", "builtins"}
_STATISTICS = {torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default}
_QUERIES = {"dim", "numel", "size"}


def attribute(root: nn.Module, path: str) -> Any:
    """Returns the object at a dotted path, or None."""
    found: Any = root
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def free(root: nn.Module, graph: fx.Graph, aliases: Aliases) -> set[fx.Node]:
    """Returns the nodes that depend only on the model's inputs and constants, such as sizes, positions and masks.

    Every rank has the inputs, so each stage recomputes the nodes it needs, and their values are never sent. If a node
    writes in place, all aliases of that memory must be such nodes.
    """
    barred: set[fx.Node] = set()
    while True:
        known = _free(root, graph, barred)
        torn = [group for group in aliases.groups if not known.issuperset(group)]
        spoilt = {node for group in torn for node in group} & (known | _sources(graph)) - barred
        if not spoilt:
            return known
        barred |= spoilt


def _sources(graph: fx.Graph) -> set[fx.Node]:
    return {node for node in graph.nodes if node.op in {"placeholder", "get_attr"}}


def _free(root: nn.Module, graph: fx.Graph, barred: set[fx.Node]) -> set[fx.Node]:
    known: set[fx.Node] = set()
    for node in graph.nodes:
        inputs = all((_given(root, each) or each in known) and each not in barred for each in node.all_input_nodes)
        if inputs and node not in barred and node.op.startswith("call_") and _repeatable(root, node):
            known.add(node)
    return known


def _given(root: nn.Module, node: fx.Node) -> bool:
    if node.op == "get_attr":
        return not isinstance(attribute(root, str(node.target)), nn.Parameter)
    return node.op == "placeholder"


def _repeatable(root: nn.Module, node: fx.Node) -> bool:
    """Returns whether the node is deterministic and has no side effects."""
    target = node.target
    if node.op == "call_method":
        return target in _QUERIES
    if node.op == "call_module":
        return False
    if isinstance(target, OpOverload):
        return target not in _STATISTICS and torch.Tag.nondeterministic_seeded not in target.tags
    if isinstance(target, HigherOrderOperator):
        return _all_repeatable(root, node)
    name = getattr(target, "__name__", "")
    return getattr(target, "__module__", "") in _OPERATORS and not name.startswith(("i", "setitem", "delitem"))


def _all_repeatable(root: nn.Module, node: fx.Node) -> bool:
    """Returns whether this holds for all nodes of the graph that a higher-order operator runs, as for `no_grad`."""
    bodies = [attribute(root, str(each.target)) for each in node.all_input_nodes if each.op == "get_attr"]
    graphs = [body.graph for body in bodies if isinstance(body, fx.GraphModule)]
    return bool(graphs) and all(
        _repeatable(root, each) for graph in graphs for each in graph.nodes if each.op.startswith("call_")
    )
