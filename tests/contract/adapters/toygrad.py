"""The toy framework of examples/numpy."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "numpy"))

import coordd_toygrad as cd
import toygrad

from coordd import api
from coordd.daemon.autograd_rules import Alltoall, Broadcast, Reducescatter
from coordd.ops.process_sets import global_process_set
from tests.contract.plugin import NAMES

__all__ = ["PLUGIN"]


class Toygrad:
    """What it lacks of the operations it has with a line each."""

    dtypes = (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    )
    shares = writable = adopts = keeps = mends = True
    precision = "float64"
    reductions = (cd.allreduce,)
    allgather = staticmethod(cd.allgather)
    tensor = back = staticmethod(toygrad.Tensor)
    view = staticmethod(cd.view)

    def alltoall(self, tensor, *, name):
        return cd.differentiable(Alltoall(api.source(), [name], global_process_set), tensor)

    def broadcast(self, tensor, root, *, name):
        return cd.differentiable(Broadcast(api.source(), [name], global_process_set, root=root), tensor)

    def reducescatter(self, tensor, *, name, op):
        return cd.differentiable(Reducescatter(api.source(), [name], global_process_set, op=op), tensor)

    def differentiated(self, function, array, upstream):
        tensor = toygrad.Tensor(array)
        result = function(tensor)
        toygrad.backward(toygrad.operation(np.zeros(()), (result,), lambda _: (upstream,)))
        return result, toygrad.Tensor(tensor.gradient)

    def training(self, weights, rate):
        return _Training(weights, rate)


class _Training:
    def __init__(self, weights, rate):
        self._weights = [toygrad.Tensor(weight.copy()) for weight in weights]
        self._optimizer = cd.DistributedSGD(dict(zip(NAMES, self._weights, strict=True)), rate)
        # It shows nobody its gradients, so they are seen on their way.
        self._wait, self._optimizer._gradients.wait = self._optimizer._gradients.wait, self._seen

    def step(self, x, wanted, *, frozen):
        hidden, out = self._weights
        last = toygrad.Tensor(out.value) if frozen else out
        inner = toygrad.tanh(toygrad.matmul(toygrad.Tensor(x), hidden))
        toygrad.backward(toygrad.mean_squared_error(toygrad.matmul(inner, last), wanted))
        self._optimizer.step()
        return self._reduced

    def weights(self):
        return [weight.value for weight in self._weights]

    def _seen(self):
        found = self._wait()
        self._reduced = [toygrad.Tensor(found[index]) for index in range(len(NAMES))]
        return found


PLUGIN = Toygrad()
