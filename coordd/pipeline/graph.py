"""Dependencies between a model's layers, and the cuts that they allow. Pure.

A stage is a run of consecutive layers. All calls of a stateful module use the same module, so they belong to one stage,
together with all layers on any path from one of its calls back to it::

    A ──▶ B ──▶ C ──▶ D ──▶ E          B is called again behind D, so B, C and D need each other:
          ▲           │                 A │ B C D │ E are the only cuts
          └───────────┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from coordd.errors import ArgumentError

__all__ = ["Layer", "check_cuts", "condense", "cycles", "tied"]


@dataclass(frozen=True)
class Layer:
    """The smallest unit that a cut does not divide.

    Attributes:
        name: its name in errors.
        reads: the layers whose values it consumes; all of them come before it.
        module: the module that runs here, if it is stateful; layers with the same module are calls of that module.
        parameters: the keys of its parameters' storages; layers with a key in common are tied.
    """

    name: str
    reads: tuple[int, ...] = ()
    module: str = ""
    parameters: tuple[str, ...] = ()


def cycles(layers: Sequence[Layer], reuse: Collection[str] = ()) -> list[tuple[int, ...]]:
    """Returns the layers that depend on each other: the strongly connected components of more than one layer.

    Args:
        layers: in the order in which they run.
        reuse: modules that are copied to each stage that calls them.

    Returns:
        The layers of each cycle, in order; the cycles are ordered by their first layers.

    Raises:
        ArgumentError: a layer reads one that comes later, or `reuse` names a module that no layer calls.
    """
    _check(layers, reuse)
    calls: dict[object, int] = {}  # a node of the graph is a module with all its calls
    keys = [layer.module if layer.module and layer.module not in reuse else at for at, layer in enumerate(layers)]
    nodes = [calls.setdefault(key, len(calls)) for key in keys]
    readers: list[list[int]] = [[] for _ in calls]
    for node, layer in zip(nodes, layers, strict=True):
        for read in layer.reads:
            readers[nodes[read]].append(node)
    members: defaultdict[int, list[int]] = defaultdict(list)
    component = _Components(readers).of
    for at, node in enumerate(nodes):
        members[component[node]].append(at)
    return [tuple(group) for group in members.values() if len(group) > 1]


def condense(layers: Sequence[Layer], reuse: Collection[str] = ()) -> list[range]:
    """Returns the runs of layers that no cut divides: a cycle with all layers in between, or a single layer.

    Raises:
        ArgumentError: as `cycles`.
    """
    runs: list[range] = []
    hulls = {group[0]: group[-1] + 1 for group in cycles(layers, reuse)}
    end = 0
    for at in range(len(layers)):
        begin = at if at >= end else runs.pop().start
        end = max(end, hulls.get(at, at + 1))
        runs.append(range(begin, at + 1))
    return runs


def check_cuts(layers: Sequence[Layer], cuts: Sequence[int], reuse: Collection[str] = ()) -> None:
    """Checks that no cut divides a cycle.

    Args:
        layers: in the order in which they run.
        cuts: the first layer of each stage but the first.
        reuse: modules that are copied to each stage that calls them.

    Raises:
        ArgumentError: a cut divides a cycle, or as `cycles`.
    """
    found = cycles(layers, reuse)
    for cut in cuts:
        for cycle in found:
            if cycle[0] < cut <= cycle[-1]:
                raise ArgumentError(_divided(layers, cut, cycle, condense(layers, reuse), reuse))


def tied(layers: Sequence[Layer], stage_of_layer: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Returns the parameters that several stages hold, in the order in which they first occur, and those stages.

    Raises:
        ArgumentError: the stages are not runs of layers.
    """
    _check_stages(layers, stage_of_layer)
    holders: defaultdict[str, set[int]] = defaultdict(set)
    for layer, stage in zip(layers, stage_of_layer, strict=True):
        for key in layer.parameters:
            holders[key].add(stage)
    return {key: tuple(sorted(stages)) for key, stages in holders.items() if len(stages) > 1}


class _Components:
    """Strongly connected components of a graph (Tarjan 1972), without recursion: models have thousands of layers."""

    def __init__(self, successors: Sequence[Sequence[int]]) -> None:
        self.of = [-1] * len(successors)
        """The number of each node's component."""
        self._successors = successors
        self._found: dict[int, int] = {}  # order of discovery of each node
        self._low: dict[int, int] = {}  # the earliest discovered node of its component that it is known to reach
        self._open: list[int] = []  # discovered, and not assigned to a component yet
        for node in range(len(successors)):
            if node not in self._found:
                self._walk(node)

    def _walk(self, root: int) -> None:
        trail = [(root, self._enter(root))]
        while trail:
            node, rest = trail[-1]
            below = next((there for there in rest if self._new(node, there)), None)
            if below is not None:
                trail.append((below, self._enter(below)))
                continue
            trail.pop()
            if trail:
                above = trail[-1][0]
                self._low[above] = min(self._low[above], self._low[node])
            if self._low[node] == self._found[node]:
                self._close(node)

    def _enter(self, node: int) -> Iterator[int]:
        self._low[node] = self._found[node] = len(self._found)
        self._open.append(node)
        return iter(self._successors[node])

    def _new(self, node: int, there: int) -> bool:
        if there not in self._found:
            return True
        if self.of[there] < 0:
            self._low[node] = min(self._low[node], self._found[there])
        return False

    def _close(self, node: int) -> None:
        while self.of[node] < 0:
            self.of[self._open.pop()] = node


def _check(layers: Sequence[Layer], reuse: Collection[str]) -> None:
    for at, layer in enumerate(layers):
        wrong = next((read for read in layer.reads if not 0 <= read < at), None)
        if wrong is not None:
            raise ArgumentError(f"layer {at} ({layer.name!r}) reads layer {wrong}, which does not come before it")
    known = dict.fromkeys(layer.module for layer in layers if layer.module)
    for name in reuse:
        if name not in known:
            raise ArgumentError(
                f"reuse names {name!r}, which no layer calls; the modules are {', '.join(known) or 'none'}"
            )


def _check_stages(layers: Sequence[Layer], stage_of_layer: Sequence[int]) -> None:
    if len(layers) != len(stage_of_layer):
        raise ArgumentError(f"there are {len(layers)} layers, and stages for {len(stage_of_layer)}")
    for at, (stage, following) in enumerate(pairwise(stage_of_layer)):
        if following < stage:
            raise ArgumentError(f"layer {at} is in stage {stage} and layer {at + 1} in {following}: stages are runs")


def _divided(
    layers: Sequence[Layer], cut: int, cycle: Sequence[int], runs: Sequence[range], reuse: Collection[str]
) -> str:
    def told(at: int) -> str:
        return f"layer {at} ({layers[at].name!r})"

    run = next(run for run in runs if cut in run)
    before = [told(run.start)] if run.start > 0 else []
    behind = [told(run.stop)] if run.stop < len(layers) else []
    move = f"start that stage at {' or '.join(before + behind)}" if before or behind else "leave that cut out"
    sides = {layer.module for layer in layers[:cut]} & {layer.module for layer in layers[cut:]}
    shared = sorted(sides - {"", *reuse})
    names = ", ".join(repr(layers[at].name) for at in cycle)
    return (
        f"the cut before {told(cut)} goes through layers that form a cycle and must share a stage: {names}; "
        f"{move}, or let each side have a copy of what both call, with reuse={shared}"
    )
