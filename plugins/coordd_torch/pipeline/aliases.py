"""Finds the nodes of an ATen graph that share memory which a node writes to.

A value that is written once and then read only through the writer's result needs no care: the result is a new value.
All other such nodes must stay in one stage, because every alias of the memory must see the write.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

__all__ = ["Aliases", "impure", "mutates", "renamed", "writes_state"]


def mutates(node: fx.Node) -> bool:
    """Returns whether the node is an ATen operator that writes to its first argument."""
    return isinstance(node.target, OpOverload) and _schema(node.target).is_mutable


def writes_state(node: fx.Node) -> bool:
    """Returns whether the node only writes to a buffer."""
    return mutates(node) and isinstance(node.args[0], fx.Node) and node.args[0].op == "get_attr"


def impure(node: fx.Node) -> bool:
    """Returns whether the node has an effect, so that it must be kept even if no other node reads its result."""
    return node.is_impure() or bool(_written(node))


def renamed(graph: fx.Graph) -> None:
    """Makes later readers of a written value read the writer's result instead, where the value has no other alias."""
    for node in graph.nodes:
        if mutates(node) and _sole(node):
            for user in _later(node):
                user.replace_input_with(node.args[0], node)


class Aliases:
    """The groups of nodes that share written memory."""

    def __init__(self, graph: fx.Graph) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}
        self._order = {node: number for number, node in enumerate(graph.nodes)}
        writers = [node for node in graph.nodes if _written(node) and not _harmless(node)]
        for node in graph.nodes:
            for other in _shared(node):
                if not _written(node) or node in writers:
                    self._parent[self._root(node)] = self._root(other)
        self._writers: dict[fx.Node, list[fx.Node]] = {}
        for node in writers:
            self._writers.setdefault(self._root(node), []).append(node)
        self._members: dict[fx.Node, list[fx.Node]] = {root: [] for root in self._writers}
        for node in graph.nodes:
            if self._root(node) in self._members:
                self._members[self._root(node)].append(node)

    def writers(self, node: fx.Node) -> list[fx.Node]:
        """Returns the nodes that write to this node's memory."""
        return self._writers.get(self._root(node), [])

    @property
    def groups(self) -> list[list[fx.Node]]:
        """The nodes of each piece of written memory, in graph order."""
        return list(self._members.values())

    def together(self) -> Iterator[tuple[fx.Node, fx.Node]]:
        """Yields pairs of nodes that no cut may separate: an alias of written memory, and a later user of an alias."""
        for root, members in self._members.items():
            written = min(map(self._order.__getitem__, self._writers[root]))
            first = next(node for node in members if node.op.startswith("call_"))
            users = {user for node in members for user in (node, *node.users)}
            yield from ((first, user) for user in users if self._order[user] >= written and user.op != "output")

    def _root(self, node: fx.Node) -> fx.Node:
        while node in self._parent and self._parent[node] is not node:
            node = self._parent[node]
        return node


def _shared(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments whose memory the node's result may share."""
    if node.target is operator.getitem:
        return node.all_input_nodes
    if isinstance(node.target, HigherOrderOperator):
        return [*_written(node), *_handed_through(node)]
    if not isinstance(node.target, OpOverload):
        return []
    arguments = _schema(node.target).arguments
    named = [node.args[i] if i < len(node.args) else node.kwargs.get(each.name) for i, each in enumerate(arguments)]
    return [
        value
        for value, each in zip(named, arguments, strict=True)
        if each.alias_info is not None and isinstance(value, fx.Node)
    ]


def _written(node: fx.Node) -> list[fx.Node]:
    """Returns the values that a node writes to, directly or in the graph it runs under `no_grad` or similar."""
    if mutates(node):
        return [each for each in node.args[:1] if isinstance(each, fx.Node)]
    body = _body(node)
    return [body[found] for inner in _nodes(body) for each in _written(inner) if (found := _origin(each)) in body]


def _handed_through(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments of a higher-order operator whose memory its result may share."""
    body = _body(node)
    given = [each for inner in _nodes(body) if inner.op == "output" for each in inner.all_input_nodes]
    return [body[found] for each in given if (found := _origin(each)) in body]


def _body(node: fx.Node) -> dict[fx.Node, fx.Node]:
    """Maps each placeholder of the graph that a higher-order operator runs to the operator's argument."""
    if not isinstance(node.target, HigherOrderOperator):
        return {}
    for number, argument in enumerate(node.args):
        if isinstance(argument, fx.Node) and argument.op == "get_attr":
            module = getattr(node.graph.owning_module, str(argument.target), None)
            if isinstance(module, fx.GraphModule):
                places = [each for each in module.graph.nodes if each.op == "placeholder"]
                pairs = zip(places, node.args[number + 1 :], strict=False)
                return {place: value for place, value in pairs if isinstance(value, fx.Node)}
    return {}


def _nodes(body: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    return list(next(iter(body)).graph.nodes) if body else []


def _origin(node: fx.Node) -> fx.Node:
    """Follows views and in-place writes back to the original value."""
    while above := _shared(node):
        node = above[0]
    return node


def _harmless(writer: fx.Node) -> bool:
    return mutates(writer) and _sole(writer) and not _later(writer)


def _schema(overload: OpOverload) -> Any:
    return overload._schema  # noqa: SLF001 - no public accessor


def _sole(writer: fx.Node) -> bool:
    """Returns whether the written value has no other alias: it is not a view, input or buffer, and has no view."""
    target = writer.args[0]
    if not isinstance(target, fx.Node) or target.op not in {"call_function", "call_module"}:
        return False
    made = not _shared(target) or (mutates(target) and _sole(target))
    return made and not any(_shared(user) for user in target.users if not mutates(user))


def _later(writer: fx.Node) -> list[fx.Node]:
    """Returns the nodes that read the written value after the writer."""
    return [user for user in writer.all_input_nodes[0].users if user is not writer and writer < user]
