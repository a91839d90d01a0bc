"""Consecutive layers of a trace as a graph of their own."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

from torch import fx, nn

from coordd_torch.pipeline.purity import attribute
from coordd_torch.pipeline.trace import Trace

__all__ = ["Cut"]

_ANYWHERE = -1


class Cut:
    """The layers from `first` to `last` (included) of a trace, and what crosses their borders."""

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
        """What the nodes need that is not among them, in order; what anybody can compute is followed to its inputs."""
        own = set(self._own)
        found: set[fx.Node] = set()
        open_ = list(ends)
        while open_:
            for each in open_.pop().all_input_nodes:
                if each not in own and each not in found:
                    found.add(each)
                    if each not in self._trace.layer:
                        open_.append(each)
        return [node for node in self._trace.graph.nodes if node in found]
