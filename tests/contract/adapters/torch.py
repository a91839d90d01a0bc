"""PyTorch."""

from __future__ import annotations

import numpy as np
import torch

import coordd.torch as cd
from coordd_torch import tensors
from tests.contract.plugin import NAMES

__all__ = ["PLUGIN", "Torch"]

_WIDE = {"b": np.bool_, "u": np.int64, "i": np.int64, "c": np.complex128}


class Torch:
    """Its ``.grad`` is overwritten by the next step, as without coordd."""

    dtypes = (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    )
    shares = writable = adopts = mends = True
    keeps = False
    precision = "float64"
    reductions = (cd.allreduce, cd.allreduce_)
    allgather = staticmethod(cd.allgather)
    alltoall = staticmethod(cd.alltoall)
    broadcast = staticmethod(cd.broadcast)
    reducescatter = staticmethod(cd.reducescatter)
    view = staticmethod(tensors.view)
    back = staticmethod(tensors.from_array)

    def tensor(self, array):
        wide = array.astype(_WIDE.get(array.dtype.kind, np.float64))
        return torch.tensor(wide, dtype=getattr(torch, array.dtype.name))

    def differentiated(self, function, array, upstream):
        tensor = self.tensor(array).requires_grad_()
        result = function(tensor)
        result.backward(self.tensor(upstream))
        return result, tensor.grad

    def training(self, weights, rate):
        return _Training(weights, rate)


class _Training:
    def __init__(self, weights, rate):
        self._weights = [torch.nn.Parameter(torch.tensor(weight)) for weight in weights]
        plain = torch.optim.SGD(self._weights, lr=rate)
        self._optimizer = cd.DistributedOptimizer(plain, zip(NAMES, self._weights, strict=True))

    def step(self, x, wanted, *, frozen):
        hidden, out = self._weights
        last = out.detach() if frozen else out
        self._optimizer.zero_grad()
        found = torch.tanh(torch.tensor(x) @ hidden) @ last
        torch.nn.functional.mse_loss(found, torch.tensor(wanted)).backward()
        self._optimizer.step()
        return [weight.grad for weight in self._weights]

    def weights(self):
        return [weight.detach().numpy() for weight in self._weights]


PLUGIN = Torch()
