"""Support for `torch.autograd.Function`, which has its own backward pass, in models traced by torch.export.

An exported graph has only the operators of the function's forward pass, so it would be differentiated in another way
than the model. Therefore a module without submodules that calls such a function is called as a whole: during the export
an opaque operator replaces it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from coordd_torch.pipeline.hooks import LostError, is_plain
from coordd_torch.pipeline.inputs import Call
from coordd_torch.pipeline.meta_copy import Stand
from coordd_torch.pipeline.rng_state import untouched

__all__ = ["called_whole", "opaque", "restored_calls"]

_SHOWN: Any = torch.Tensor
_ASSIGNMENT = _SHOWN.data.__set__
_LOST = {_SHOWN.register_hook, _SHOWN.register_post_accumulate_grad_hook, _ASSIGNMENT}

_forwards: ContextVar[list[Any]] = ContextVar("forwards")


@torch.library.custom_op("coordd::call_module", mutates_args=())
def _call_module(tensor: torch.Tensor, number: int) -> torch.Tensor:  # noqa: ARG001 - the operator has it
    """Replaces a module call, by the module's number among those called as a whole; it never runs with data."""
    raise RuntimeError(number)


@_call_module.register_fake
def _on_fake(tensor: torch.Tensor, number: int) -> torch.Tensor:
    found: torch.Tensor = _forwards.get()[number](tensor)
    return found


def called_whole(model: nn.Module, call: Call) -> tuple[str, ...]:
    """Finds the modules to be called as a whole: they take and return one tensor, and have no submodules and no hooks.

    Args:
        model: without data, as from `bare`.
        call: the arguments.

    Raises:
        LostError: a graph would be differentiated in another way than the model for another reason: a function with its
            own backward pass outside of such modules, or a hook that forward registers on a computed tensor. For a
            model that needs data to run, nothing is found.
    """
    stand = Stand(model, call.leaves)
    args, kwargs = call.arguments(stand.leaves)
    hooks = _Hooks()
    found: Any = None
    inside: dict[Any, str] = {}
    watched = [
        module.register_forward_hook(_watcher(path, inside), with_kwargs=True)
        for path, module in stand.model.named_modules()
        if not any(module.children()) and is_plain(model.get_submodule(path))
    ]
    with untouched(), stand.mode, torch.enable_grad(), suppress(Exception), hooks:
        found = stand.model(*args, **kwargs)
    for handle in watched:
        handle.remove()
    if hooks.seen & (_LOST if model.training else {_ASSIGNMENT}):
        raise LostError(
            "forward registers a hook on a tensor, or assigns to `tensor.data`, which torch.export loses: do so in a "
            "layer that torch.fx calls as a whole, or not at all (`tensor.copy_()` under `no_grad` is kept)"
        )
    names = sorted({_title(node) for node in _custom(pytree.tree_leaves(found)) - inside.keys()})
    if names and model.training:
        raise LostError(
            f"torch.export would lose the backward pass of the torch.autograd.Function {', '.join(names)}: write it as "
            "a torch.library.custom_op with register_autograd, or change what keeps torch.fx from calling the layers "
            "that use it as a whole (for `checkpoint`, set use_reentrant=False)"
        )
    return tuple(sorted({*inside.values()}))


def _watcher(path: str, inside: dict[Any, str]) -> Any:
    def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:  # noqa: ARG001
        if len(args) == 1 and not kwargs and all(isinstance(each, torch.Tensor) for each in (*args, output)):
            inside.update(dict.fromkeys(_custom([output], until=args[0]), path))

    return watch


@contextmanager
def opaque(model: nn.Module, paths: tuple[str, ...]) -> Iterator[None]:
    """Replaces each call of these modules by one operator inside the block."""
    modules = [model.get_submodule(path) for path in paths]
    token = _forwards.set([module.forward for module in modules])
    try:
        for number, module in enumerate(modules):
            vars(module)["forward"] = _stand_in(number)
        yield
    finally:
        for module in modules:
            vars(module).pop("forward", None)
        _forwards.reset(token)


def _stand_in(number: int) -> Any:
    def forward(tensor: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.coordd.call_module(tensor, number)
        return found

    return forward


def restored_calls(module: fx.GraphModule, model: nn.Module, paths: tuple[str, ...]) -> None:
    """Replaces these operators in an exported graph by calls of the modules.

    Args:
        module: the graph, which lacks modules without parameters.
        model: the exported model.
        paths: of the modules, by number.

    Raises:
        LostError: one is called under `no_grad` or `autocast`, which a call of the module would not keep.
    """
    target = torch.ops.coordd.call_module.default
    for path in paths:
        module.add_submodule(path, model.get_submodule(path))
    for node in module.graph.find_nodes(op="call_function", target=target):
        tensor, number = node.args
        with module.graph.inserting_before(node):
            call = module.graph.call_module(paths[number], (tensor,))
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        module.graph.erase_node(node)
    inner = [each for each in module.modules() if isinstance(each, fx.GraphModule) and each is not module]
    if left := [node for each in inner for node in each.graph.find_nodes(op="call_function", target=target)]:
        raise LostError(
            f"{paths[left[0].args[1]]!r} has a backward pass of its own, and is called under `no_grad` or `autocast`; "
            "that would be lost: enter them in a module that is one layer"
        )


def _custom(outputs: list[Any], until: torch.Tensor | None = None) -> set[Any]:
    """Returns the functions with their own backward pass that the outputs depend on, except those behind ``until``."""
    open_ = [leaf.grad_fn for leaf in outputs if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
    known = {*open_, *([] if until is None or until.grad_fn is None else [until.grad_fn])}
    open_ = [node for node in open_ if until is None or node is not until.grad_fn]
    found: set[Any] = set()
    while open_:
        node = open_.pop()
        if isinstance(node, BackwardCFunction):
            found.add(node)
        new = {each for each, _ in node.next_functions if each is not None} - known
        known |= new
        open_ += new
    return found


def _title(node: Any) -> str:
    return type(node).__name__.removesuffix("Backward")


class _Hooks(TorchFunctionMode):
    """Records in ``seen`` whether forward registers a hook on a tensor, or assigns to `tensor.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= {func} & _LOST
        return func(*args, **(kwargs or {}))
