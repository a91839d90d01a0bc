"""Values that torch.export loses: it would take them for constants, which have no data."""

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
    """Has torch.export know what tensors are that PyTorch copies without telling it."""
    plain = _EXPORT.FakeTensorMode
    _EXPORT.FakeTensorMode = _Fakes  # it makes its mode itself, and takes none
    try:
        with _DataAsDetached():
            yield
    finally:
        _EXPORT.FakeTensorMode = plain


class _Fakes(FakeTensorMode):
    """Computes without data, and keeps what `torch.arange` and the like return known to the tracer.

    They return the tensor that was traced only if nothing else refers to it by then, and otherwise a copy. A thread
    that looks at the stack of this one, as a profiler does, and the daemon when another rank waits for this one, refers
    to all local variables for a moment.
    """

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result: Any = super().__torch_dispatch__(func, types, args, kwargs or {})
        if func is torch.ops.aten.detach.default:
            _hand_on(args[0], result)
        return result


def _hand_on(source: torch.Tensor, copy: torch.Tensor) -> None:
    """Lets a copy be for the tracer what its source is, unless the tracer sees it: then no tracer is found here."""
    key = torch._C._TorchDispatchModeKey.PROXY  # noqa: SLF001 - nothing else tells the tracer of a torch.export
    mode = torch._ops._get_dispatch_mode_pre_dispatch(key)  # noqa: SLF001 - as above
    if mode is not None and not source.requires_grad and source in mode.tracer.tensor_tracker:
        mode.tracer.tensor_tracker.setdefault(copy, mode.tracer.tensor_tracker[source])


class _DataAsDetached(TorchFunctionMode):
    """Has forward read `tensor.detach()` where it reads `tensor.data`, which is such a copy, and has no gradient."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SHOWN.data.__get__:
            return args[0].detach()
        return func(*args, **(kwargs or {}))
