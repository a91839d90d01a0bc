"""Keeps values known to torch.export that it would otherwise take for constants without data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._export import non_strict_utils
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

__all__ = ["known"]

_EXPORT: Any = non_strict_utils
_SHOWN: Any = torch.Tensor


@contextmanager
def known() -> Iterator[None]:
    """Makes torch.export track tensors that PyTorch copies without dispatching to the tracer."""
    plain = _EXPORT.FakeTensorMode
    _EXPORT.FakeTensorMode = _Fakes  # torch.export creates its own mode and accepts none
    try:
        with _DataAsDetached():
            yield
    finally:
        _EXPORT.FakeTensorMode = plain


class _Fakes(FakeTensorMode):
    """Fake tensor mode that keeps the results of `torch.arange` and similar functions known to the tracer.

    These functions return the traced tensor only if no other reference to it exists at that time, and a copy otherwise.
    A thread that inspects this thread's stack briefly refers to all local variables: a profiler does, and so does the
    daemon when another rank waits for this one.
    """

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result: Any = super().__torch_dispatch__(func, types, args, kwargs or {})
        if func is torch.ops.aten.detach.default:
            _hand_on(args[0], result)
        return result


def _hand_on(source: torch.Tensor, copy: torch.Tensor) -> None:
    """Registers a copy with the tracer as equal to its source; does nothing if the tracer itself records the copy."""
    key = torch._C._TorchDispatchModeKey.PROXY  # noqa: SLF001 - no public way to get the tracer of torch.export
    mode = torch._ops._get_dispatch_mode_pre_dispatch(key)  # noqa: SLF001 - as above
    if mode is not None and not source.requires_grad and source in mode.tracer.tensor_tracker:
        mode.tracer.tensor_tracker.setdefault(copy, mode.tracer.tensor_tracker[source])


class _DataAsDetached(TorchFunctionMode):
    """Makes forward read `tensor.detach()` instead of `tensor.data`, which is such a copy without gradient."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SHOWN.data.__get__:
            return args[0].detach()
        return func(*args, **(kwargs or {}))
