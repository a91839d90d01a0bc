"""Fake execution of a traced graph next to the model: compares their operators and finds in-place writes.

A traced forward may have taken another branch than it takes for real tensors, or may have frozen a value that it should
compute on each call, such as noise. Then the graph and the model run different operators.
"""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from coordd_torch.pipeline.determinism_check import InconstantError
from coordd_torch.pipeline.inputs import Call
from coordd_torch.pipeline.meta_copy import Stand
from coordd_torch.pipeline.rng_state import untouched
from coordd_torch.pipeline.trace import Trace
from coordd_torch.pipeline.views import tensors_in

__all__ = ["Trial", "TrialError", "refuse_change", "versions"]


_HANDED_ON = ("aten::lift_fresh", "aten::detach", "aten::alias", "prim::")


def versions(value: Any) -> list[int]:
    """Returns how often each tensor of a value was written in place."""
    return [tensor._version for tensor in tensors_in(value)]  # noqa: SLF001 - autograd's own counter


class TrialError(RuntimeError):
    """The traced graph differs from the model, so the trace must have taken another branch."""


class Trial:
    """One run of a graph on fake tensors, which have no data."""

    def __init__(self, trace: Trace, call: Call) -> None:
        self._trace = trace
        self._call = call
        self._stand = Stand(trace.root, call.leaves)

    def run(self) -> list[tuple[fx.Node, fx.Node]]:
        """Runs the model and the graph, compares them, and returns pairs of nodes that no cut may separate.

        The first node of a pair is a value that is written in place (for a parameter or buffer, the node that writes
        it); the second is the last node that reads the value after the write. The list is empty for a model with
        layers that depend on tensor data, which cannot run on fake tensors.

        Raises:
            TrialError: the graph runs other operators, or returns other shapes, dtypes or another structure.
            Exception: the graph's own error, if the graph fails where the model does not.
        """
        args, kwargs = self._call.arguments(self._stand.leaves)
        with self._stand.mode, torch.set_grad_enabled(self._stand.model.training):
            try:
                with _Record() as wanted_calls:
                    wanted = self._stand.model(*args, **kwargs)
            except Exception:  # noqa: BLE001 - a layer depends on tensor data, so the model cannot be compared
                return []
            walk = _Walk(self._stand.model, self._trace.graph)
            with _Record() as found_calls:
                found = walk.run(*(leaf for name, leaf in self._named() if name not in self._trace.fixed))
        for wanted_call, found_call in itertools.zip_longest(wanted_calls.names, found_calls.names):
            if wanted_call != found_call:
                raise TrialError(f"the model calls {wanted_call} where its trace calls {found_call}")
        expected, structure = pytree.tree_flatten(wanted)
        # A leaf module may return a structure, which is one value in the graph.
        leaves, built = pytree.tree_flatten(pytree.tree_unflatten(found, self._trace.output))
        shown, given = list(map(_shown, expected)), list(map(_shown, leaves))
        if structure != built or shown != given:
            raise TrialError(f"the traced graph gives {given}, the model {shown}")
        return walk.together

    def _named(self) -> list[tuple[str, Any]]:
        return list(zip(self._call.names, self._stand.leaves, strict=True))


def refuse_change(model: nn.Module, call: Call) -> None:
    """Rejects a model that runs other operators, or operators with other scalar arguments, on a second call.

    A model that depends on tensor data cannot be checked and is accepted.

    Raises:
        InconstantError: the two calls differ.
    """
    stand = Stand(model, call.leaves)
    args, kwargs = call.arguments(stand.leaves)
    records = [_Record(), _Record()]
    with untouched(), stand.mode, suppress(Exception):
        for record in records:
            with record:
                stand.model(*args, **kwargs)
            record.done = True
    if not all(record.done for record in records):
        return
    for first, second in itertools.zip_longest(*(record.told for record in records)):
        if first != second:
            raise InconstantError(f"forward does not do the same each time it is called: {first}, then {second}")


def _shown(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    return f"{leaf.dtype}{list(leaf.shape)}{' with gradients' * leaf.requires_grad}"


class _Record(TorchDispatchMode):
    """Records the operators that run, except operators that only pass a constant on.

    Attributes:
        names: the operators' names, each marked if gradients are disabled there.
        told: the same with the operators' scalar and string arguments.
        done: whether the recorded call completed; set by the caller.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # it has no types
        self.names: list[str] = []
        self.told: list[str] = []
        self.done = False

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.name().startswith(_HANDED_ON):
            name = func.name() if torch.is_grad_enabled() else f"{func.name()} without gradients"
            self.names.append(name)
            leaves = pytree.tree_leaves((args, kwargs))
            numbers = (str(leaf) for leaf in leaves if isinstance(leaf, bool | int | float | str))
            self.told.append(f"{name}({', '.join(numbers)})")
        return func(*args, **(kwargs or {}))


class _Walk(fx.Interpreter):
    """Interpreter that runs a graph and compares the version counters of all values before and after each node."""

    def __init__(self, model: nn.Module, graph: fx.Graph) -> None:
        super().__init__(model, garbage_collect_values=False, graph=graph)
        self._order = {node: number for number, node in enumerate(graph.nodes)}
        self.together: list[tuple[fx.Node, fx.Node]] = []

    def run_node(self, n: fx.Node) -> Any:
        before = self._versions()
        result = super().run_node(n)
        if n.op.startswith("call_"):
            self._written(n, before)
        return result

    def _written(self, by: fx.Node, before: dict[fx.Node, list[int]]) -> None:
        after = self._versions()
        for node, changed in before.items():
            late = [user for user in node.users if self._order[user] > self._order[by]]
            if changed != after[node] and late:
                early = by if node.op == "get_attr" else node
                self.together.append((early, max(late, key=self._order.__getitem__)))

    def _versions(self) -> dict[fx.Node, list[int]]:
        return {node: versions(value) for node, value in self.env.items()}
