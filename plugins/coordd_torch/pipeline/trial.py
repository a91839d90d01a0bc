"""Running a graph without data, beside the model itself: does it do the same, and what does it write to in place?

A traced forward may have taken another branch than it does for tensors, or have kept what it should do anew each time,
such as noise. Then the operators that run are not the same ones.
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

from coordd_torch.pipeline.constancy import InconstantError
from coordd_torch.pipeline.inputs import Call
from coordd_torch.pipeline.luck import untouched
from coordd_torch.pipeline.trace import Trace
from coordd_torch.pipeline.twin import Stand
from coordd_torch.pipeline.views import tensors_in

__all__ = ["Trial", "TrialError", "refuse_change", "versions"]


_HANDED_ON = ("aten::lift_fresh", "aten::detach", "aten::alias", "prim::")


def versions(value: Any) -> list[int]:
    """How often each tensor of a value was written to."""
    return [tensor._version for tensor in tensors_in(value)]  # noqa: SLF001 - autograd's own counter


class TrialError(RuntimeError):
    """The traced graph does not do what the model does, so it must have taken another branch."""


class Trial:
    """One run of a graph on tensors that have no data."""

    def __init__(self, trace: Trace, call: Call) -> None:
        self._trace = trace
        self._call = call
        self._stand = Stand(trace.root, call.leaves)

    def run(self) -> list[tuple[fx.Node, fx.Node]]:
        """Pairs of nodes between which no cut may be: what is written to in place, and who reads it after that.

        Raises:
            TrialError: the graph runs other operators, or gives other shapes, types or another structure.
            Exception: what the graph raises where the model does not.

        Nothing is found out about a model with layers that need to see data.
        """
        args, kwargs = self._call.arguments(self._stand.leaves)
        with self._stand.mode, torch.set_grad_enabled(self._stand.model.training):
            try:
                with _Record() as wanted_calls:
                    wanted = self._stand.model(*args, **kwargs)
            except Exception:  # noqa: BLE001 - a layer that looks at its data; nothing can be told without
                return []
            walk = _Walk(self._stand.model, self._trace.graph)
            with _Record() as found_calls:
                found = walk.run(*(leaf for name, leaf in self._named() if name not in self._trace.fixed))
        for wanted_call, found_call in itertools.zip_longest(wanted_calls.names, found_calls.names):
            if wanted_call != found_call:
                raise TrialError(f"the model calls {wanted_call} where its trace calls {found_call}")
        expected, structure = pytree.tree_flatten(wanted)
        # A layer that is called as a whole may return a structure, which is one value of the graph.
        leaves, built = pytree.tree_flatten(pytree.tree_unflatten(found, self._trace.output))
        shown, given = list(map(_shown, expected)), list(map(_shown, leaves))
        if structure != built or shown != given:
            raise TrialError(f"the traced graph gives {given}, the model {shown}")
        return walk.together

    def _named(self) -> list[tuple[str, Any]]:
        return list(zip(self._call.names, self._stand.leaves, strict=True))


def refuse_change(model: nn.Module, call: Call) -> None:
    """Refuses a model that runs other operators, or with other numbers, when it is called again.

    Raises:
        InconstantError: it does; nothing is found out about one that needs to see data.
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
    """Notes the operators that run, but for those that only hand on a constant.

    Attributes:
        names: of the operators, and whether gradients are wanted there.
        told: the same with the numbers that they are given.
        done: whether what is recorded came to its end.
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
    """Watches the version counters of all values while a graph runs."""

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
