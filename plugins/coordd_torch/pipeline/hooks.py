"""Hooks on single modules and per-instance `forward` functions, some of which a trace would lose."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

__all__ = ["LostError", "has_own_forward", "is_plain", "refuse_backward_hooks", "refuse_own_forwards"]


class LostError(RuntimeError):
    """A trace would lose something that changes the model's results."""


def is_plain(module: nn.Module) -> bool:
    """Returns whether calling the module only calls its class's `forward`."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)  # noqa: SLF001 - no public accessor
    return not any(hooks) and not _has_backward_hooks(module) and not has_own_forward(module)


def has_own_forward(module: nn.Module) -> bool:
    """Returns whether `forward` was replaced on this instance, often by a function that still refers to the module."""
    return "forward" in vars(module)


def refuse_backward_hooks(model: nn.Module, traced: Callable[[str], bool]) -> None:
    """Rejects backward hooks of modules that are traced through: they belong to module calls, which the trace lacks.

    Args:
        model: the whole model.
        traced: returns for a module's path whether its call is traced through.

    Raises:
        LostError: there is such a hook.
    """
    found = [repr(path) for path, module in model.named_modules() if traced(path) and _has_backward_hooks(module)]
    if found:
        raise LostError(
            f"the backward hooks of {_told(found)} would be lost: register them on modules that are layers, which are "
            "called as they are, or on parameters"
        )


def refuse_own_forwards(model: nn.Module, traced: Callable[[str], bool]) -> None:
    """Rejects modules that are traced through and whose instance has its own `forward`.

    The trace uses a copy of the model, but a function that replaces `forward` refers to the original.

    Raises:
        LostError: there is such a module.
    """
    found = [repr(path) for path, module in model.named_modules() if traced(path) and has_own_forward(module)]
    if found:
        raise LostError(
            f"`forward` was replaced on the instance of {_told(found)}: override it in a subclass, or let the module "
            "be a layer, which is called as it is"
        )


def _told(paths: list[str]) -> str:
    return ", ".join("the model itself" if path == "''" else path for path in paths)


def _has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)  # noqa: SLF001 - as above
