"""What users attach to single modules: hooks, and a `forward` of the instance's own. A trace would lose some of it."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

__all__ = ["LostError", "has_own_forward", "is_plain", "refuse_backward_hooks", "refuse_own_forwards"]


class LostError(RuntimeError):
    """A trace of the model would lose something that changes what is computed."""


def is_plain(module: nn.Module) -> bool:
    """Whether a call of the module is a call of its class's `forward`, and nothing else."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)  # noqa: SLF001 - nothing else tells
    return not any(hooks) and not _has_backward_hooks(module) and not has_own_forward(module)


def has_own_forward(module: nn.Module) -> bool:
    """Whether `forward` was replaced for this instance alone, often by a function that still refers to the module."""
    return "forward" in vars(module)


def refuse_backward_hooks(model: nn.Module, traced: Callable[[str], bool]) -> None:
    """Refuses backward hooks of modules that are traced through: they belong to calls that the trace does not have.

    Args:
        model: the whole of it.
        traced: tells of a module's path whether its call is traced through.

    Raises:
        LostError: there are some.
    """
    found = [repr(path) for path, module in model.named_modules() if traced(path) and _has_backward_hooks(module)]
    if found:
        raise LostError(
            f"the backward hooks of {_told(found)} would be lost: register them on modules that are layers, which are "
            "called as they are, or on parameters"
        )


def refuse_own_forwards(model: nn.Module, traced: Callable[[str], bool]) -> None:
    """Refuses modules whose instance has a `forward` of its own, if they are traced through.

    A trace is of a copy of the model; a function that was put in the place of `forward` refers to the original.

    Raises:
        LostError: there are some.
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
