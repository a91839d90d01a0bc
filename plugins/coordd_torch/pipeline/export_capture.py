"""Tracing with torch.export of models that torch.fx cannot trace: ATen operators, guarded by shapes."""

from __future__ import annotations

import inspect
import re
import warnings
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim, ExportedProgram, ShapesCollection

from coordd_torch.pipeline.aliases import renamed
from coordd_torch.pipeline.batch_norms import restored
from coordd_torch.pipeline.custom_backward import called_whole, opaque, restored_calls
from coordd_torch.pipeline.determinism_check import refuse_luck
from coordd_torch.pipeline.fake_execution import refuse_change
from coordd_torch.pipeline.fakes import known
from coordd_torch.pipeline.hooks import LostError, refuse_backward_hooks, refuse_own_forwards
from coordd_torch.pipeline.inputs import Call
from coordd_torch.pipeline.meta_copy import Stand
from coordd_torch.pipeline.pure_nodes import attribute
from coordd_torch.pipeline.rng_state import untouched
from coordd_torch.pipeline.silence_stderr import hushed
from coordd_torch.pipeline.trace import Trace

__all__ = ["trace"]

# torch.export prints the graph that it abandons, the sizes that it fixes, and the values that it cannot find; the error
# contains the rest.
_TALKERS = (
    "torch._export.non_strict_utils",
    "torch.fx.experimental.symbolic_shapes",
    "torch._subclasses.fake_tensor",
)
_NUMBERS = re.compile(r"(?<=.)(_\d+)+$")
_IDLE = {"aten.detach_.default", "aten._assert_tensor_metadata.default"}


def trace(model: nn.Module, call: Call, norms: Collection[str], *, number: int = 0) -> Trace:
    """Exports the model in its current mode, with all dimensions dynamic that the model leaves dynamic.

    Args:
        model: without data, as from `bare`.
        call: the arguments.
        norms: the paths of the modules that stay module calls.
        number: of the trace; unique among the traces of this model.

    Raises:
        Exception: any exception that torch.export raises.
    """
    for refuse in (refuse_backward_hooks, refuse_own_forwards):
        refuse(model, lambda path: path not in norms)
    stand = Stand(model, call.leaves)
    shapes = ShapesCollection()
    for leaf in stand.leaves:
        if isinstance(leaf, torch.Tensor):
            shapes[leaf] = tuple(Dim.AUTO for _ in leaf.shape)
    args, kwargs = call.arguments(stand.leaves)
    _name_keywords(stand.model, args, kwargs)
    open_ = shapes.dynamic_shapes(stand.model, args, kwargs)
    with hushed(*_TALKERS):
        refuse_change(model, call)
        whole = called_whole(model, call)
        with opaque(stand.model, whole), warnings.catch_warnings(), known(), untouched() as drawn:
            warnings.simplefilter("ignore")  # they concern saved exported programs
            program = torch.export.export(stand.model, args, kwargs, dynamic_shapes=open_, strict=False)
            refuse_luck(drawn=drawn())
    module = _tidied(program, norms)
    restored_calls(module, model, whole)
    _rename_constants(module, model, number)
    _number_values(module.graph)
    fixed = {name: leaf for name, leaf in call.values.items() if not isinstance(leaf, torch.Tensor)}
    guards = _Guards(program, module.graph, call.names)
    return Trace(module, module.graph, call.names, program.call_spec.out_spec, model.training, fixed, guards)


def _name_keywords(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Gives `forward` a parameter for each keyword passed as ``**kwargs``: torch.export would count it twice."""
    forward = model.forward
    known = inspect.signature(forward).parameters
    if not any(known[name].kind is inspect.Parameter.VAR_KEYWORD for name in known) or set(kwargs) <= set(known):
        return

    def named(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    given = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY) for name in list(known)[: len(args)]]
    given += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs]
    vars(named)["__signature__"] = inspect.Signature(given)
    vars(model)["forward"] = named


def _tidied(program: ExportedProgram, norms: Collection[str]) -> fx.GraphModule:
    """Returns the graph without nodes that only check or detach, and with normalisation as module calls."""
    module: fx.GraphModule = program.module(check_guards=False)
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten.detach_.default:  # of a constant
            node.replace_all_uses_with(node.args[0])
        if str(node.target) in _IDLE:
            module.graph.erase_node(node)
    restored(module.graph, norms)
    renamed(module.graph)
    return module


def _rename_constants(module: fx.GraphModule, model: nn.Module, number: int) -> None:
    """Renames constants that are not part of the model, because each trace uses the same name for its first constant.

    Raises:
        LostError: a value was exported as a constant without data, because it is not a constant.
    """
    new: dict[str, str] = {}
    for node in module.graph.nodes:
        old = str(node.target)
        if node.op == "get_attr" and old not in new and attribute(model, old) is None:
            new[old] = f"_trace{number}_{old.replace('.', '_')}"
            value = attribute(module, old)
            if isinstance(value, FakeTensor) and node.users:
                raise LostError(f"torch.export does not know how a tensor is computed that is read by {_reader(node)}")
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                module.register_buffer(new[old], value, persistent=False)
            else:
                setattr(module, new[old], value)
    for node in module.graph.nodes:
        if node.op == "get_attr":
            node.target = new.get(str(node.target), node.target)


def _number_values(graph: fx.Graph) -> None:
    """Numbers the computed values of each kind in graph order: stages send values under these names.

    The numbers of torch.export differ between ranks. They count sizes that were computed and dropped, and some sizes
    are computed only while another thread refers to the local variables of this thread's frames. The daemon thread does
    so briefly when it reports this rank's stack to other ranks.
    """
    computed = [node for node in graph.nodes if node.op.startswith("call_")]
    taken = {node.name for node in graph.nodes} - {node.name for node in computed}
    numbers: Counter[str] = Counter()
    for node in computed:
        base = name = _NUMBERS.sub("", node.name)
        while name in taken:
            numbers[base] += 1
            name = f"{base}_{numbers[base]}"
        taken.add(name)
        node.name = name


def _reader(node: fx.Node) -> str:
    """Returns the first operator that reads a value, with the line of forward that calls it if known."""
    user = next(iter(node.users))
    lines = user.meta.get("stack_trace", "").strip().splitlines()[-2:]
    return " ".join([f"{user.name!r}:", *map(str.strip, lines)])


class _Guards:
    """Callable that checks whether inputs have the shapes, dtypes and devices that a trace was made for."""

    def __init__(self, program: ExportedProgram, graph: fx.Graph, names: tuple[str, ...]) -> None:
        nodes = [node for node in graph.nodes if node.op == "placeholder"]
        self._wanted = {
            name: node.meta["val"]
            for name, node in zip(names, nodes, strict=True)
            if isinstance(node.meta["val"], torch.Tensor)
        }
        self._ranges = dict(program.range_constraints)

    def __call__(self, values: Mapping[str, Any]) -> bool:
        found: dict[Any, int] = {}
        pairs: list[tuple[Any, int]] = []
        for name, wanted in self._wanted.items():
            value = values[name]
            if not isinstance(value, torch.Tensor) or _kind(value) != _kind(wanted):
                return False
            pairs += zip(wanted.shape, value.shape, strict=True)
        for wanted, size in pairs:
            if isinstance(wanted, torch.SymInt) and wanted.node.expr.is_Symbol:
                found.setdefault(wanted.node.expr, size)
        inside = all(symbol not in found or found[symbol] in bounds for symbol, bounds in self._ranges.items())
        return inside and all(_size(wanted, found) == size for wanted, size in pairs)


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dim(), tensor.dtype, tensor.device


def _size(wanted: Any, found: Mapping[Any, int]) -> int:
    return int(wanted.node.expr.subs(found)) if isinstance(wanted, torch.SymInt) else wanted
