"""Assigns the nodes of a traced model to layers.

Layers are numbered in topological order, so any run of consecutive layers can be a stage.

A *unit* is a module that is one layer: an item of a ModuleList, ModuleDict or Sequential, and any module that holds no
such list. Modules that contain units are open: the nodes that they compute themselves belong to the unit before.

With `cuts` a module is open if one of the cuts lies inside it, and a unit otherwise; a layer then has all units from
one cut to the next.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from torch import fx, nn

from coordd.errors import ArgumentError
from coordd_torch.pipeline.aliases import writes_state
from coordd_torch.pipeline.hooks import has_own_forward
from coordd_torch.pipeline.pure_nodes import free
from coordd_torch.pipeline.trace import Trace

__all__ = ["Layering", "children", "first_names", "units", "units_between"]

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_REPEATED = re.compile(r"@(\d+)$")


def units(model: nn.Module, depth: int = 1) -> frozenset[str]:
    """Returns the paths of the modules that are layers.

    Args:
        model: the model; it is not a unit itself.
        depth: how many levels of lists are opened: with 1 a block of a transformer is one layer, with 2 the items of
            lists inside blocks are layers, with 0 the model's children are.
    """
    if depth == 0:
        return frozenset(name for name, _ in children(model))
    return frozenset(_units(model, "", depth))


def units_between(model: nn.Module, cuts: Sequence[str]) -> frozenset[str]:
    """Returns the paths of the modules that are called as a whole if a stage may begin only at `cuts`."""
    return frozenset(_between(model, "", cuts))


def first_names(model: nn.Module, cuts: Sequence[str]) -> list[str]:
    """Returns, for each module in `cuts`, the first of its names in the model.

    Raises:
        ArgumentError: the model has no such module, or `cuts` is empty.
    """
    known = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    missing = sorted(set(cuts) - set(known))
    if missing or not cuts:
        raise ArgumentError(
            f"{type(model).__name__} has no module {', '.join(map(repr, missing)) or 'to cut at'}; there are: "
            f"{', '.join(known)}"
        )
    first = {id(module): name for name, module in model.named_modules()}
    return [first[id(known[cut])] for cut in cuts]


def _between(module: nn.Module, prefix: str, cuts: Sequence[str]) -> Iterator[str]:
    for name, child in children(module):
        path = prefix + name
        if any(cut.startswith(path + ".") for cut in cuts) or not _has_forward(child):
            yield from _between(child, path + ".", cuts)
        else:
            yield path


def _begun(keys: Sequence[str], cuts: Sequence[str], starts: AbstractSet[int]) -> set[int]:
    """Returns the first unit of each call of a module at which a stage may begin.

    Raises:
        ArgumentError: one of these modules is never called, or has nothing to compute in a stage of its own.
    """
    found: set[int] = set()
    for cut in cuts:
        calls: dict[str, int] = {}
        for number in sorted(starts):
            path, _, call = keys[number].partition("#")
            if path == cut or path.startswith(cut + "."):
                calls.setdefault(call, number)
        if not calls:
            raise ArgumentError(
                f"cuts names {cut!r}, where no stage can begin: forward does not call it, or it needs no stage, as it "
                f"depends on the inputs alone; what is called are {', '.join(keys)}"
            )
        found.update(calls.values())
    return found


def _has_forward(module: nn.Module) -> bool:
    """Returns whether the module can be called; a ModuleList only holds other modules."""
    return type(module).forward is not nn.Module.forward or has_own_forward(module)


def children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the module's children under all their names; `named_children` lists one name of each."""
    found = module.named_modules(remove_duplicate=False)
    return [(name, child) for name, child in found if name and "." not in name]


def _units(module: nn.Module, prefix: str, depth: int) -> Iterator[str]:
    for name, child in children(module):
        yield from _of_child(child, prefix + name, depth)


def _of_child(child: nn.Module, path: str, depth: int) -> Iterator[str]:
    if not _holds_list(child) or has_own_forward(child):
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
    """The layers of all traces of one model, in training and evaluation mode and for all input shapes.

    The first trace defines the layers. In later traces a known unit goes to its layer, and new nodes go to the layer of
    the nodes before them, so that a cut is the same in all traces.

    Attributes:
        units: the paths of the modules that are units.
        names: of the layers, each named after its first unit.
        calls: for each layer its units, as in `names`.
    """

    def __init__(self, known: frozenset[str], cuts: Sequence[str] | None = None) -> None:
        """Starts without a trace.

        Args:
            known: the paths of the modules that are units.
            cuts: the modules at which a layer may begin; None for all units.
        """
        self.units = known
        self._cuts = cuts
        self.calls: dict[int, list[str]] = {}
        self.names: list[str] = []
        self._index: dict[str, int] = {}
        self._moved: list[int] = []

    def assign(self, trace: Trace) -> dict[fx.Node, int]:
        """Returns the layer of each node; nodes that every stage can compute from the inputs alone have none.

        Raises:
            ArgumentError: this is not the first trace, and a cut would separate an in-place writer from a reader.
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
                    f"{node.name!r} reads what was written in place, and this was not seen when the model was cut: "
                    f"the layers from {self.names[early]!r} to {self.names[late]!r} would have to stay together. "
                    "Assign the result of the call that writes in place (x = x.relu_()), or give `cuts` that keep "
                    "these layers together, or an `example` of a batch with the shapes and in the mode of this one"
                )
        return found

    def _walk(self, graph: fx.Graph, cheap: set[fx.Node], *, learn: bool) -> dict[fx.Node, int]:
        found: dict[fx.Node, int] = {}
        current = 0
        for node in graph.nodes:
            if node in cheap or node.op in {"placeholder", "get_attr", "output"}:
                continue
            inputs = max((found.get(each, 0) for each in node.all_input_nodes), default=0)
            if writes_state(node):  # torch.export moves these to the end; they belong to the written value
                found[node] = inputs
                continue
            key = self._key(node)
            if learn and key:
                self._index.setdefault(key, len(self._index))
            current = found[node] = max(self._index.get(key, current), current, inputs)
        return found

    def _key(self, node: fx.Node) -> str:
        """Returns the unit's path, with the number of the call from the second call on."""
        for scope, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            if path in self.units:
                again = _REPEATED.search(scope)
                return f"{path}#{int(again[1]) + 1}" if again else path
        return ""

    def _settle(self, starts: set[int], spans: Sequence[tuple[int, int]]) -> None:
        """Renumbers the layers, without those that are empty or merged with the one before."""
        keys = list(self._index) or ["model"]
        if self._cuts is not None:
            starts = {min(starts), *_begun(keys, self._cuts, starts)}
        for early, late in spans:
            starts -= set(range(early + 1, late + 1))
        self.names = [keys[start] for start in sorted(starts)]
        self._moved = [sum(start <= layer for start in starts) - 1 for layer in range(len(keys))]
        for key, layer in zip(keys, self._moved, strict=True):
            self.calls.setdefault(max(layer, 0), []).append(key)
        self._index = {key: self._moved[layer] for key, layer in self._index.items()}
