"""Tracing of a model's own forward with torch.fx: layers are leaves and are not traced, shapes stay dynamic."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError
from torch.utils import _pytree as pytree

from coordd_torch.pipeline.determinism_check import InconstantError, difference, refuse_luck
from coordd_torch.pipeline.failure import DataDependentError
from coordd_torch.pipeline.fake_execution import Trial
from coordd_torch.pipeline.hooks import refuse_backward_hooks, refuse_own_forwards
from coordd_torch.pipeline.inputs import Call
from coordd_torch.pipeline.meta_copy import bare
from coordd_torch.pipeline.pure_nodes import attribute
from coordd_torch.pipeline.rng_state import untouched
from coordd_torch.pipeline.trace import Trace

__all__ = ["trace"]


_SET = ("data", "grad", "requires_grad")


class _Proxy(fx.Proxy):
    """A proxy that distinguishes `x += y` from `x = x + y`, and names its expression where data are needed."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SET:
            raise TraceError(f"`{_written(self.node)}.{name} = ...` would be lost")
        super().__setattr__(name, value)

    def __int__(self) -> int:
        raise _needs_data(self, "becomes a number")

    def __float__(self) -> float:
        raise _needs_data(self, "becomes a number")


def _in_place(target: Callable[[Any, Any], Any]) -> Callable[[_Proxy, Any], fx.Proxy]:
    def method(self: _Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return method


_NAMES = ("iadd", "isub", "imul", "itruediv", "ipow", "imod", "ifloordiv", "iand", "ior", "ixor")
for _name in _NAMES:
    setattr(_Proxy, f"__{_name}__", _in_place(getattr(operator, _name)))


class _Tracer(fx.Tracer):
    """Tracer that traces only through modules outside the layers, with the arguments of a given call."""

    def __init__(self, units: frozenset[str], call: Call, dynamic: frozenset[str]) -> None:
        super().__init__()
        self._units = units
        self._call = call
        self._dynamic = dynamic
        self._modes = _modes()
        self.output = pytree.tree_structure(0)

    proxy_buffer_attributes = True  # writes to buffers must be in the graph

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        if self._differs(_modes()):
            text = f"`{_written(node)}` is computed under `no_grad`, `autocast` or the like, which would be lost"
            raise TraceError(text)
        return node

    def _differs(self, modes: tuple[int, ...]) -> bool:
        """Returns whether the modes differ from those of the call; gradient modes matter in training only."""
        return modes != self._modes if self.root.training else modes[0] != self._modes[0]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002 - fx's own signature
        return module_qualified_name in self._units

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        raise _needs_data(obj, "decides over control flow")

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        raise _needs_data(obj, "is iterated over")

    def create_args_for_root(
        self,
        root_fn: Callable[..., Any],  # noqa: ARG002 - fx's own signature
        is_module: bool,  # noqa: ARG002
        concrete_args: Any = None,  # noqa: ARG002
    ) -> tuple[Any, list[Any]]:
        leaves = [
            self.create_proxy("placeholder", name, (), {}) if name in self._dynamic else leaf
            for name, leaf in self._call.values.items()
        ]
        args, kwargs = self._call.arguments(leaves)

        def run(root: nn.Module) -> list[Any]:
            found, self.output = pytree.tree_flatten(root(*args, **kwargs))  # its hooks are traced, too
            return found

        return run, [self.root]


def _modes() -> tuple[int, ...]:
    """Returns the nesting depth of autocast, whether gradients are enabled, and whether inference mode is."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth, torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def _needs_data(proxy: fx.Proxy, use: str) -> DataDependentError:
    return DataDependentError(_written(proxy.node), use, proxy.tracer.scope.module_path)


def _written(node: Any, depth: int = 3) -> str:
    """Formats a value as its expression; deeply nested values appear by name only."""
    if not isinstance(node, fx.Node):
        return repr(node)
    if depth == 0 or not node.op.startswith("call_"):
        return str(node.target if node.op in {"placeholder", "get_attr"} else node.name)
    target = getattr(node.target, "__name__", node.target)
    return f"{target}({', '.join(_written(each, depth - 1) for each in (*node.args, *node.kwargs.values()))})"


def trace(model: nn.Module, units: frozenset[str], call: Call, *, example: bool) -> Trace:
    """Traces the model in its current mode.

    Args:
        model: without data, as from `bare`.
        units: the paths of the layers.
        call: the arguments; tensors stay dynamic, and so do floats where possible; other leaves become constants.
        example: whether the leaves of the call are real, so that the graph is tried with them; otherwise all are
            dynamic.

    Raises:
        Exception: any exception that stops the tracing, or the failure of the trial.
    """
    for refuse in (refuse_backward_hooks, refuse_own_forwards):
        refuse(model, lambda path: not _within(path, units))
    if not example:
        return _trace(model, units, call, frozenset(call.names), example=False)
    tensors = frozenset(name for name, leaf in call.values.items() if isinstance(leaf, torch.Tensor))
    open_ = frozenset(name for name, leaf in call.values.items() if isinstance(leaf, torch.Tensor | float))
    if open_ != tensors:
        with suppress(Exception):  # the control flow of forward depends on a float
            return _trace(model, units, call, open_, example=True)
    return _trace(model, units, call, tensors, example=True)


def _within(path: str, units: frozenset[str]) -> bool:
    """Returns whether a module is a unit or lies in one."""
    names = path.split(".")
    return any(".".join(names[:count]) in units for count in range(1, len(names) + 1))


def _trace(model: nn.Module, units: frozenset[str], call: Call, dynamic: frozenset[str], *, example: bool) -> Trace:
    tracer, again = (_Tracer(units, call, dynamic) for _ in range(2))
    root = bare(model)  # a copy, as forward may store computed values
    with torch.enable_grad(), untouched() as drawn:
        graph = tracer.trace(root)
        _restore(root, model)
        second = again.trace(root)
        refuse_luck(drawn=drawn())
    if told := difference(root, graph, second):
        raise InconstantError(f"forward does not do the same each time it is called: {told}")
    for node in graph.nodes:
        if node.op == "get_attr" and attribute(model, node.target) is None:  # a constant found by tracing
            setattr(model, node.target, attribute(tracer.root, node.target))
    fixed = {name: leaf for name, leaf in call.values.items() if name not in dynamic}
    found = Trace(model, graph, call.names, tracer.output, model.training, fixed)
    if example:
        found.together = Trial(found, call).run()
        types = {name: type(leaf) for name, leaf in call.values.items() if name in dynamic}
        found.shapes = lambda values: all(isinstance(values[name], each) for name, each in types.items())
    else:
        found.tried = set()
    return found


def _restore(root: nn.Module, model: nn.Module) -> None:
    """Replaces traced values in buffers, left there by in-place writes, with tensors again."""
    for path, module in root.named_modules():
        for name, value in list(module._buffers.items()):  # noqa: SLF001 - no public accessor
            if isinstance(value, fx.Proxy) and _written_buffer(value.node) == (f"{path}.{name}" if path else name):
                setattr(module, name, torch.empty_like(model.get_submodule(path).get_buffer(name)))


def _written_buffer(node: Any) -> str:
    """Returns the path of the buffer whose in-place update is this value; an empty string for any other value."""
    while isinstance(node, fx.Node) and node.op.startswith("call_") and _writes(node.target):
        node = node.args[0]
    return str(node.target) if isinstance(node, fx.Node) and node.op == "get_attr" else ""


def _writes(target: Any) -> bool:
    if isinstance(target, str):
        return target.endswith("_") and not target.endswith("__")
    return getattr(target, "__name__", "") in _NAMES
