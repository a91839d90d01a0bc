"""Deferred weight gradients: splits the backward pass of layers whose two halves are known.

The backward pass of a linear layer or of a convolution consists of two products: the gradient times the weight, which
earlier layers wait for, and the gradient times the input, which only the optimizer needs. Such a layer computes the
first product and records the factors of the second; `pay` later adds the second to the weight's gradient. No graph is
traversed twice, and only the two factors are kept in between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Debt", "Ledger", "pay"]

_LEAST = 0.5
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class Debt(NamedTuple):
    """Factors of a deferred weight gradient: a layer's input, and the gradient of its output."""

    layer: _Layer
    entered: Tensor
    gradient: Tensor


class Ledger:
    """The deferred weight gradients of a stage's layers."""

    def __init__(self, module: nn.Module) -> None:
        """Finds the layers that can be split: only these exact types, as subclasses may compute something else."""
        layers = [_Linear(each, self) for each in module.modules() if type(each) is nn.Linear]
        convolutions = [each for each in module.modules() if type(each) in _CONVOLUTIONS]
        self._layers = [*layers, *(_Convolution(each, self) for each in convolutions if _is_plain(each))]
        self._debts: list[Debt] | None = None
        weights = {layer.module.weight for layer in self._layers if layer.module.weight.requires_grad}
        trained = [each.numel() for each in module.parameters() if each.requires_grad]
        self.suffices = sum(each.numel() for each in weights) > _LEAST * sum(trained)
        """Whether these layers have most of the trained parameters."""

    @contextmanager
    def able(self) -> Iterator[None]:
        """Replaces the forward of the layers inside the block, so that their backward pass can be split."""
        for layer in self._layers:
            vars(layer.module)["forward"] = layer.forward
        try:
            yield
        finally:
            for layer in self._layers:
                vars(layer.module).pop("forward", None)

    @contextmanager
    def noting(self) -> Iterator[list[Debt]]:
        """Collects deferred weight gradients instead of computing them at once; checkpoints may recompute meanwhile."""
        debts: list[Debt] = []
        self._debts = debts
        try:
            with self.able():
                yield debts
        finally:
            self._debts = None

    def note(self, debt: Debt) -> bool:
        """Records a deferred weight gradient inside `noting`; returns whether it was recorded."""
        if self._debts is not None:
            self._debts.append(debt)
        return self._debts is not None


def pay(debts: list[Debt]) -> None:
    """Computes the deferred weight gradients and accumulates them, and frees each entry as soon as it is done."""
    with torch.no_grad():
        for layer, entered, gradient in reversed(debts):
            layer.accumulate(entered.to(gradient.dtype), gradient)
            debts.pop()


class _Layer(ABC):
    """A layer whose backward pass has two halves."""

    def __init__(self, module: Any, ledger: Ledger) -> None:
        self.module = module
        self.ledger = ledger

    def forward(self, x: Tensor) -> Tensor:
        """Replaces the module's own forward, and computes the same."""
        weight, bias = self.module.weight, self.module.bias
        own = weight.requires_grad and all(each is None or _is_plain_leaf(each) for each in (weight, bias))
        if own and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            found: Tensor = _Halved.apply(x, weight, bias, self)  # type: ignore[no-untyped-call] # it has no types
        else:
            found = type(self.module).forward(self.module, x)
        return found

    def accumulate(self, x: Tensor, gradient: Tensor) -> None:
        """Accumulates the gradients of the parameters."""
        weight, bias = self.module.weight, self.module.bias
        if weight.grad is None:
            weight.grad = self.outer(x, gradient).to(weight.dtype)
        else:
            self.add_outer(weight.grad, x, gradient)
        if bias is not None and bias.requires_grad:
            found = self.total(gradient).to(bias.dtype)
            bias.grad = found if bias.grad is None else bias.grad.add_(found)

    @abstractmethod
    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Computes the layer's output."""

    @abstractmethod
    def inner(self, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        """Computes the gradient of the input."""

    @abstractmethod
    def outer(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Computes the gradient of the weight."""

    def add_outer(self, total: Tensor, x: Tensor, gradient: Tensor) -> None:
        """Adds the gradient of the weight to `total`."""
        total.add_(self.outer(x, gradient))

    @abstractmethod
    def total(self, gradient: Tensor) -> Tensor:
        """Computes the gradient of the bias."""


class _Linear(_Layer):
    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

    def inner(self, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:  # noqa: ARG002 - a convolution needs it
        return gradient @ weight

    def outer(self, x: Tensor, gradient: Tensor) -> Tensor:
        return _rows(gradient).t() @ _rows(x)

    def add_outer(self, total: Tensor, x: Tensor, gradient: Tensor) -> None:
        if total.dtype == x.dtype:
            total.addmm_(_rows(gradient).t(), _rows(x))  # the product is never stored
        else:
            super().add_outer(total, x, gradient)

    def total(self, gradient: Tensor) -> Tensor:
        return _rows(gradient).sum(0)


class _Convolution(_Layer):
    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found: Tensor = self.module._conv_forward(x, weight, bias)  # noqa: SLF001 - its forward() calls this
        return found

    def inner(self, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        return self._backward(x, weight, gradient, inner=True)

    def outer(self, x: Tensor, gradient: Tensor) -> Tensor:
        weight = self.module.weight.detach().to(gradient.dtype)
        return self._backward(x, weight, gradient, inner=False)

    def total(self, gradient: Tensor) -> Tensor:
        batched = gradient.dim() == self.module.weight.dim()
        return gradient.sum([axis for axis in range(gradient.dim()) if axis != int(batched)])

    def _backward(self, x: Tensor, weight: Tensor, gradient: Tensor, *, inner: bool) -> Tensor:
        module, batched = self.module, gradient.dim() == weight.dim()
        entered, left = (x, gradient) if batched else (x[None], gradient[None])
        geometry = module.stride, module.padding, module.dilation, False, [0] * len(module.stride), module.groups
        mask = [inner, not inner, False]
        pair = torch.ops.aten.convolution_backward(left, entered, weight, None, *geometry, mask)
        found: Tensor = pair[0] if inner else pair[1]
        return found if batched or not inner else found[0]


class _Halved(torch.autograd.Function):
    """A layer as an autograd function; outside of `noting`, and for double backward, it acts like the plain layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: _Layer) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        return layer.run(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        layer, (x, weight) = ctx.layer, ctx.saved_tensors
        lower = x.to(gradient.dtype)  # under autocast
        inner = layer.inner(lower, weight.to(gradient.dtype), gradient) if ctx.needs_input_grad[0] else None
        if layer.ledger.note(Debt(layer, x.detach(), gradient.detach())):
            return inner, None, None, None
        total = layer.total(gradient) if ctx.needs_input_grad[2] else None
        return inner, layer.outer(lower, gradient), total, None


def _is_plain(module: Any) -> bool:
    """Returns whether a convolution pads with zeros, equally on both sides."""
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


def _is_plain_leaf(parameter: Tensor) -> bool:
    """Returns whether a parameter is a leaf without gradient hooks."""
    return parameter.is_leaf and not (parameter._backward_hooks or parameter._post_accumulate_grad_hooks)  # noqa: SLF001 - no public accessor


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
