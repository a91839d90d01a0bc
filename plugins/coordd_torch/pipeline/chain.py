"""Models that are chains: each part is called with the output of the part before it. Nothing is traced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx, nn
from torch.utils import _pytree as pytree

from coordd_torch.pipeline.hooks import is_plain
from coordd_torch.pipeline.layers import children
from coordd_torch.pipeline.trace import Trace

__all__ = ["INPUT", "chain", "flattened", "is_sequential"]

INPUT = "input"
"""The name of a chain's one input, which may be anything."""


def is_sequential(module: nn.Module) -> bool:
    """Returns whether the module behaves exactly like `nn.Sequential`; a module with hooks must be called itself."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and is_plain(module)


def flattened(model: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yields the paths of a Sequential's children; nested Sequentials are flattened."""
    for name, child in children(model):
        if is_sequential(child) and children(child):
            yield from flattened(child, f"{prefix}{name}.")
        else:
            yield prefix + name


def chain(model: nn.Module, parts: Sequence[str]) -> Trace:
    """Builds the trace that calls the parts one after another."""
    known = dict(model.named_modules(remove_duplicate=False))
    graph = fx.Graph()
    value = graph.placeholder(INPUT)
    calls: dict[int, int] = {}
    for part in parts:
        module = known[part]
        number = calls[id(module)] = calls.get(id(module), 0) + 1
        value = graph.call_module(part, (value,))
        scope = f"{part}@{number - 1}" if number > 1 else part
        value.meta["nn_module_stack"] = {scope: (part, type(module))}
    graph.output([value])
    return Trace(model, graph, (INPUT,), pytree.tree_structure(0))
