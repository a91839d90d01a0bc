"""Excludes coordd from `torch.compile`: its functions run uncompiled, called from compiled code or as autograd hooks.

`torch.compiler.disable` does that for one function, but it imports the compiler, which takes seconds. So each function
gets what `disable` sets: a mark that keeps the compiler from tracing into it from a caller, and a strategy of its code
object that keeps it and the functions that it calls from being compiled when they run. A compiled function that coordd
calls, such as a closure of the user, stays compiled.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

__all__ = ["keep_uncompiled"]

_PACKAGES = frozenset({"coordd", "coordd_keras", "coordd_torch"})


def keep_uncompiled() -> None:
    """Marks all functions of coordd's loaded modules; does nothing if this PyTorch version does not support it."""
    try:
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:  # before PyTorch 2.7
        return
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for function in {found for module in _modules() for found in _functions(vars(module))}:
        if not getattr(function, "_torchdynamo_disable", False):
            vars(function).update(_torchdynamo_disable=True, _torchdynamo_disable_msg="coordd is not compiled")
            set_code_exec_strategy(function.__code__, skip)


def _modules() -> list[types.ModuleType]:
    return [module for name, module in sys.modules.items() if name.partition(".")[0] in _PACKAGES]


def _functions(names: Any) -> Iterator[types.FunctionType]:
    """Yields coordd's own functions of a module or class, and the functions that they wrap."""
    for value in list(names.values()):
        if isinstance(value, type):
            if _is_ours(value):
                yield from _functions(vars(value))
            continue
        parts = (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),)
        for part in parts:
            yield from _unwrapped(part)


def _unwrapped(value: Any) -> Iterator[types.FunctionType]:
    """Yields a function, the function that it wraps, and so on."""
    while isinstance(value, types.FunctionType) and _is_ours(value):
        yield value
        value = getattr(value, "__wrapped__", None)


def _is_ours(value: Any) -> bool:
    return (value.__module__ or "").partition(".")[0] in _PACKAGES
