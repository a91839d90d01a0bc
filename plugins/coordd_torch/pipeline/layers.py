"""The layers of a traced model: which nodes stay together.

Its one rule: layers are numbered in topological order, so any run of consecutive layers can be a stage.

A *unit* is a module that is a layer of its own: an item of a ModuleList, ModuleDict or Sequential, and any module that
holds no such list. Modules on the way to units are open: what they themselves compute goes with the unit before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch import fx, nn

from coordd.errors import ArgumentError
from coordd_torch.pipeline.aliases import writes_state
from coordd_torch.pipeline.purity import free
from coordd_torch.pipeline.trace import Trace

__all__ = ["Layering", "children", "units"]

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_REPEATED = re.compile(r"@(\d+)$")


def units(model: nn.Module, depth: int = 1) -> frozenset[str]:
    """The paths of the modules that are layers.

    Args:
        model: the model; it is no unit itself.
        depth: how many levels of lists are opened: with 1 a block of a transformer is one layer, with 2 the items of
            lists inside blocks are layers, with 0 the model's children are.
    """
    if depth == 0:
        return frozenset(name for name, _ in children(model))
    return frozenset(_units(model, "", depth))


def children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The module's children under all of their names; `named_children` tells one name of each."""
    found = module.named_modules(remove_duplicate=False)
    return [(name, child) for name, child in found if name and "." not in name]


def _units(module: nn.Module, prefix: str, depth: int) -> Iterator[str]:
    for name, child in children(module):
        yield from _of_child(child, prefix + name, depth)


def _of_child(child: nn.Module, path: str, depth: int) -> Iterator[str]:
    if not _holds_list(child):
        yield path
    elif not isinstance(child, _LISTS):
        yield from _units(child, path + ".", depth)
    elif depth > 1:
        yield from _units(child, path + ".", depth - 1)
    else:
        yield from (f"{path}.{name}" for name, _ in children(child))


def _holds_list(module: nn.Module) -> bool:
    return any(isinstance(each, _LISTS) and len(each) > 0 for each in module.modules())


class Layering:
    """The layers of all traces of one model: of training and evaluation, of this shape and that.

    The first trace says what the layers are. In the others a unit that is known goes to its layer, and what is new to
    them goes with what is before it, so that a cut is the same in all.
    """

    def __init__(self, known: frozenset[str]) -> None:
        self.units = known
        self.names: list[str] = []
        self._index: dict[str, int] = {}
        self._moved: list[int] = []

    def assign(self, trace: Trace) -> dict[fx.Node, int]:
        """The layer of each node; what every stage can compute for itself from the inputs alone has none.

        Raises:
            ArgumentError: this is not the first trace, and a cut would separate a writer in place from a reader.
        """
        first = not self.names
        found = self._walk(trace.graph, free(trace.root, trace.graph, trace.aliases), learn=first)
        pairs = [*trace.together, *(pair for pair in trace.aliases.together() if pair[0] in found)]
        spans = [(found.get(early, 0), found[late], late) for early, late in pairs if late in found]
        if first:
            self._settle(set(found.values()) or {0}, [(early, late) for early, late, _ in spans])
            return {node: self._moved[layer] for node, layer in found.items()}
        for early, late, node in spans:
            if early != late:
                raise ArgumentError(
                    f"{node.name!r} reads what was written in place, only in some modes or for some shapes: the layers "
                    f"from {self.names[early]!r} to {self.names[late]!r} would have to stay together"
                )
        return found

    def _walk(self, graph: fx.Graph, cheap: set[fx.Node], *, learn: bool) -> dict[fx.Node, int]:
        found: dict[fx.Node, int] = {}
        current = 0
        for node in graph.nodes:
            if node in cheap or node.op in {"placeholder", "get_attr", "output"}:
                continue
            inputs = max((found.get(each, 0) for each in node.all_input_nodes), default=0)
            if writes_state(node):  # torch.export moves these to the end; they belong to what they write
                found[node] = inputs
                continue
            key = self._key(node)
            if learn and key:
                self._index.setdefault(key, len(self._index))
            current = found[node] = max(self._index.get(key, current), current, inputs)
        return found

    def _key(self, node: fx.Node) -> str:
        """The unit's path, with the number of its call from the second on."""
        for scope, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            if path in self.units:
                again = _REPEATED.search(scope)
                return f"{path}#{int(again[1]) + 1}" if again else path
        return ""

    def _settle(self, starts: set[int], spans: Sequence[tuple[int, int]]) -> None:
        """Numbers the layers anew, without those that are empty or joined to the one before."""
        for early, late in spans:
            starts -= set(range(early + 1, late + 1))
        keys = list(self._index) or ["model"]
        self.names = [keys[start] for start in sorted(starts)]
        self._moved = [sum(start <= layer for start in starts) - 1 for layer in range(len(keys))]
        self._index = {key: self._moved[layer] for key, layer in self._index.items()}
