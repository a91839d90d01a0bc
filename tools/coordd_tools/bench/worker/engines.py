"""The engines: coordd and the libraries it is compared with, behind one interface for the benchmark."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from coordd_tools.bench.worker.models import LEARNING_RATE
from coordd_tools.bench.worker.sketch import Sketch

if TYPE_CHECKING:  # importing MPI initialises it, and looking up an engine must not require a rank
    from coordd_tools.bench.worker.rank import Rank

__all__ = ["REDUCERS", "TRAINERS", "Engine", "Reducer", "Trainer", "started"]

_PAST_CACHES = 128 << 20


class Engine(Protocol):
    """A library that exchanges data among ranks."""

    name: str

    def start(self, rank: Rank) -> None:
        """Imports and initialises the library on this rank."""

    def stop(self) -> None:
        """Shuts the library down."""


class Trainer(Engine, Protocol):
    """An engine for data-parallel training; ``exchanges`` is false for the baseline without communication."""

    exchanges: bool

    def prepare(self, model: nn.Module, *, label: str) -> tuple[nn.Module, Optimizer]:
        """Wraps a model; returns the module to call and the optimizer to step; ``label`` makes tensor names unique."""


class Reducer(Engine, Protocol):
    """An engine that sums a tensor over all ranks in place; ``exchanges`` is false without communication."""

    exchanges: bool

    def tensor(self, count: int) -> Tensor:
        """Returns an fp32 tensor in this engine's preferred memory; the time of a larger one counts in proportion."""

    def reducing(self, tensor: Tensor, *, label: str) -> Callable[[], object]:
        """Returns a function that sums the tensor over all ranks, in place."""


class _Nothing:
    """No communication: each rank trains on its own."""

    name = "none"
    exchanges = False

    def start(self, rank: Rank) -> None:
        pass

    def stop(self) -> None:
        pass

    def prepare(self, model: nn.Module, *, label: str) -> tuple[nn.Module, Optimizer]:  # noqa: ARG002
        return model, SGD(model.parameters(), lr=LEARNING_RATE)


class _Anywhere:
    """Accepts tensors in any memory."""

    exchanges = True

    def tensor(self, count: int) -> Tensor:
        return torch.empty(count)


class _PlainMPI(_Anywhere):
    """A blocking ``MPI_Allreduce`` in the calling thread."""

    name = "mpi"

    def start(self, rank: Rank) -> None:
        self._comm = rank.comm

    def stop(self) -> None:
        pass

    def reducing(self, tensor: Tensor, *, label: str) -> Callable[[], object]:  # noqa: ARG002
        from mpi4py import MPI

        comm, array = self._comm, tensor.numpy()
        return lambda: comm.Allreduce(MPI.IN_PLACE, array)


class _Memory(_Anywhere):
    """The memory bandwidth bound: all ranks at once read and write as many bytes as in a sum in shared memory.

    In such a sum each of n ranks reads its slice, 1/n, of n tensors, and writes it n times: one tensor read, one tensor
    written. An in-place product does just that, without waiting for other ranks. The tensor exceeds the caches, because
    memory is to be measured.
    """

    name = "memory"
    exchanges = False

    def tensor(self, count: int) -> Tensor:
        return torch.empty(max(count, _PAST_CACHES // torch.float32.itemsize))

    def start(self, rank: Rank) -> None:
        pass

    def stop(self) -> None:
        pass

    def reducing(self, tensor: Tensor, *, label: str) -> Callable[[], object]:  # noqa: ARG002
        return lambda: tensor.mul_(1.0)


class _Gloo(_Anywhere):
    """PyTorch's own engine: DDP and ``all_reduce`` over gloo."""

    def __init__(self, name: str, *, view: bool = False) -> None:
        self.name = name
        self._view = view

    def start(self, rank: Rank) -> None:
        if not dist.is_initialized():  # two engines may share the one default group
            meeting = f"file://{rank.directory / 'gloo'}"
            dist.init_process_group("gloo", init_method=meeting, rank=rank.number, world_size=rank.size)

    def stop(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def prepare(self, model: nn.Module, *, label: str) -> tuple[nn.Module, Optimizer]:  # noqa: ARG002
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=self._view)
        return wrapped, SGD(wrapped.parameters(), lr=LEARNING_RATE)

    def reducing(self, tensor: Tensor, *, label: str) -> Callable[[], object]:  # noqa: ARG002
        return lambda: dist.all_reduce(tensor)


class _Hooked(_Anywhere):
    """coordd or Horovod: both have the same public names, so the same code drives both."""

    def __init__(self, name: str, module: str) -> None:
        self.name = name
        self._module = module

    def start(self, rank: Rank) -> None:
        self._api: Any = importlib.import_module(self._module)
        self._api.init()
        if (size := self._api.size()) != rank.size:
            raise RuntimeError(f"{self.name} sees {size} ranks where MPI has {rank.size}")

    def stop(self) -> None:
        self._api.shutdown()

    def prepare(self, model: nn.Module, *, label: str) -> tuple[nn.Module, Optimizer]:
        names = [(f"{label}.{name}", parameter) for name, parameter in model.named_parameters()]
        optimizer: Optimizer = self._api.DistributedOptimizer(
            SGD(model.parameters(), lr=LEARNING_RATE), named_parameters=names
        )
        self._api.broadcast_parameters(model.state_dict(), root_rank=0)
        return model, optimizer

    def reducing(self, tensor: Tensor, *, label: str) -> Callable[[], object]:
        api = self._api
        return lambda: api.allreduce_(tensor, op=api.Sum, name=label)


class _Negotiated(_Hooked):
    """coordd without a locked plan: names come in an order that never repeats."""

    def reducing(self, tensor: Tensor, *, label: str) -> Callable[[], object]:
        api, rng = self._api, random.Random(label)  # noqa: S311 - equal on all ranks is the point
        return lambda: api.allreduce_(tensor, op=api.Sum, name=f"{label}.{rng.randrange(8)}")


class _Window(_Hooked):
    """coordd with a tensor in memory that all ranks see, as gradients in their buckets are."""

    def tensor(self, count: int) -> Tensor:
        found: Tensor = self._api.empty_common(count)
        return found

    def reducing(self, tensor: Tensor, *, label: str) -> Callable[[], object]:
        return super().reducing(tensor, label=f"{label}.window")


TRAINERS: dict[str, Callable[[], Trainer]] = {
    "none": _Nothing,
    "coordd": lambda: _Hooked("coordd", "coordd.torch"),
    "ddp": lambda: _Gloo("ddp"),
    "ddp-view": lambda: _Gloo("ddp-view", view=True),
    "horovod": lambda: _Hooked("horovod", "horovod.torch"),
    "sketch": Sketch,
}
REDUCERS: dict[str, Callable[[], Reducer]] = {
    "coordd": lambda: _Hooked("coordd", "coordd.torch"),
    "coordd-negotiated": lambda: _Negotiated("coordd-negotiated", "coordd.torch"),
    "coordd-window": lambda: _Window("coordd-window", "coordd.torch"),
    "memory": _Memory,
    "gloo": lambda: _Gloo("gloo"),
    "mpi": _PlainMPI,
    "horovod": lambda: _Hooked("horovod", "horovod.torch"),
}

E = TypeVar("E", bound=Engine)


@contextmanager
def started(engines: Sequence[E], rank: Rank) -> Iterator[Sequence[E]]:
    """Starts all engines in order, and stops them in reverse order."""
    with ExitStack() as running:
        for engine in engines:
            engine.start(rank)
            running.callback(engine.stop)
        yield engines
