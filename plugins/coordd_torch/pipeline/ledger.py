"""Gradients of weights that are put off: a backward pass in two where layers know their halves themselves.

The backward pass of a linear layer or of a convolution is two products: the gradient with the weight, for which earlier
layers wait, and the gradient with what has entered, for which nobody does before the optimizer. So such a layer does
the first, and notes what the second needs; whoever pays its debts adds the second to the weight's gradient. Nothing is
gone through twice, and no more is kept meanwhile than the two factors.
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
    """What a layer's parameters are owed the gradients of: what has entered it, and the gradient of what has left."""

    layer: _Layer
    entered: Tensor
    gradient: Tensor


class Ledger:
    """Has the layers of a stage note their debts."""

    def __init__(self, module: nn.Module) -> None:
        """Finds the layers that can; those of exactly these types, for others compute who knows what."""
        layers = [_Linear(each, self) for each in module.modules() if type(each) is nn.Linear]
        convolutions = [each for each in module.modules() if type(each) in _CONVOLUTIONS]
        self._layers = [*layers, *(_Convolution(each, self) for each in convolutions if _is_plain(each))]
        self._debts: list[Debt] | None = None
        weights = {layer.module.weight for layer in self._layers if layer.module.weight.requires_grad}
        trained = [each.numel() for each in module.parameters() if each.requires_grad]
        self.suffices = sum(each.numel() for each in weights) > _LEAST * sum(trained)
        """Whether these layers have most of what is trained."""

    @contextmanager
    def able(self) -> Iterator[None]:
        """Has layers compute, meanwhile, what can be gone back through without their weights."""
        for layer in self._layers:
            vars(layer.module)["forward"] = layer.forward
        try:
            yield
        finally:
            for layer in self._layers:
                vars(layer.module).pop("forward", None)

    @contextmanager
    def noting(self) -> Iterator[list[Debt]]:
        """Notes debts, where otherwise gradients of weights are computed at once; checkpoints may compute anew."""
        debts: list[Debt] = []
        self._debts = debts
        try:
            with self.able():
                yield debts
        finally:
            self._debts = None

    def note(self, debt: Debt) -> bool:
        """Takes a debt, if it is the time for it."""
        if self._debts is not None:
            self._debts.append(debt)
        return self._debts is not None


def pay(debts: list[Debt]) -> None:
    """Adds what is owed to the gradients of weights, and forgets it bit by bit."""
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
        """Stands in for the module's own, which computes the same."""
        weight, bias = self.module.weight, self.module.bias
        own = weight.requires_grad and all(each is None or _is_plain_leaf(each) for each in (weight, bias))
        if own and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            found: Tensor = _Halved.apply(x, weight, bias, self)  # type: ignore[no-untyped-call] # it has no types
        else:
            found = type(self.module).forward(self.module, x)
        return found

    def accumulate(self, x: Tensor, gradient: Tensor) -> None:
        """Adds to the gradients of the parameters."""
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
        """What the layer computes."""

    @abstractmethod
    def inner(self, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of the input."""

    @abstractmethod
    def outer(self, x: Tensor, gradient: Tensor) -> Tensor:
        """That of the weight."""

    def add_outer(self, total: Tensor, x: Tensor, gradient: Tensor) -> None:
        """Adds it."""
        total.add_(self.outer(x, gradient))

    @abstractmethod
    def total(self, gradient: Tensor) -> Tensor:
        """That of the bias."""


class _Linear(_Layer):
    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, weight, bias)

    def inner(self, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:  # noqa: ARG002 - a convolution needs it
        return gradient @ weight

    def outer(self, x: Tensor, gradient: Tensor) -> Tensor:
        return _rows(gradient).t() @ _rows(x)

    def add_outer(self, total: Tensor, x: Tensor, gradient: Tensor) -> None:
        if total.dtype == x.dtype:
            total.addmm_(_rows(gradient).t(), _rows(x))  # the product itself is never there
        else:
            super().add_outer(total, x, gradient)

    def total(self, gradient: Tensor) -> Tensor:
        return _rows(gradient).sum(0)


class _Convolution(_Layer):
    def run(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        found: Tensor = self.module._conv_forward(x, weight, bias)  # noqa: SLF001 - what its forward() is
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
    """A layer; outside of the time when debts are noted, and for gradients of gradients, as any other."""

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
    """Whether a convolution pads with zeros only, and as many on either side."""
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


def _is_plain_leaf(parameter: Tensor) -> bool:
    """Whether a parameter is nothing that is computed, and nobody wants to see its gradients as they come."""
    return parameter.is_leaf and not (parameter._backward_hooks or parameter._post_accumulate_grad_hooks)  # noqa: SLF001 - nothing else tells


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
