"""`DistributedOptimizer`: the user's optimizer, whose gradients are averaged over the ranks while backward still runs.

Its one rule: when ``backward()`` returns, ``.grad`` holds what `step` will use, on every rank. So clipping, scaling and
logging between the two are right without anybody having to know.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from coordd import api
from coordd.errors import ArgumentError, CoorddError
from coordd.handles import Handle, call_site, wait_all
from coordd.messages import Kind, ReduceOp, Request
from coordd.operations import Operations, check_reducible
from coordd.process_sets import ProcessSet, global_process_set
from coordd.table import Site
from coordd_torch.compression import Compression, Compressor
from coordd_torch.operations import Average
from coordd_torch.tensors import borrow, view

__all__ = ["DistributedOptimizer"]


class _Gradient:
    """One parameter's gradient, from backward to its reduction."""

    def __init__(self, reducer: _Reducer, name: str, parameter: torch.Tensor) -> None:
        self._reducer = reducer
        self.name = name
        self.parameter = parameter
        self.passes = 0
        self.handle: Handle[Any] | None = None
        self._request: Request | None = None
        self._dtype: Any = None

    def ready(self, _: torch.Tensor) -> None:
        """Runs when backward has accumulated this gradient."""
        reducer = self._reducer
        if self.passes >= reducer.passes_per_step or self.handle is not None:
            text = (
                f"Gradients were computed more than backward_passes_per_step times before call to step() ({self.name!r}, "
                f"{reducer.passes_per_step}). Increase backward_passes_per_step to accumulate gradients locally."
            )
            raise CoorddError(text)
        self.passes += 1
        reducer.expect_end_of_backward()
        if self.passes == reducer.passes_per_step:
            self.submit()

    def submit(self) -> None:
        """Starts the reduction of what has been accumulated."""
        gradient = self.parameter.grad
        if gradient is None:  # a hook of the user's has taken it away
            self.fill()
            return
        if gradient.layout is not torch.strided and self._reducer.sparse_as_dense:
            gradient = self.parameter.grad = gradient.to_dense()
        self._start(gradient, filler=False)

    def fill(self) -> None:
        """Takes part with zeros, if any rank has something for this parameter."""
        zeros = torch.zeros_like(self.parameter, requires_grad=False)
        self._start(zeros, filler=True)
        assert self.handle is not None
        self.handle.add_done_callback(lambda handle: self._filled(handle, zeros))

    def _filled(self, handle: Handle[Any], zeros: torch.Tensor) -> None:
        if handle.error() is None and handle.result() is not None:
            self.parameter.grad = zeros

    def settle(self) -> bool:
        """Says whether there is a result for this step; forgets an operation that no rank had anything for."""
        if self.handle is not None and self.handle.result() is None:
            self.handle = None
        return self.handle is not None

    def reset(self) -> None:
        """Gets ready for the next step."""
        self.passes = 0
        self.handle = None

    def _start(self, gradient: torch.Tensor, *, filler: bool) -> None:
        reducer = self._reducer
        if reducer.compression is Compression.none and gradient.is_cpu and gradient.layout is torch.strided:
            array, land = view(gradient), None
        else:
            small, context = reducer.compression.compress(gradient)
            array, back = borrow(small)

            def land(finished: Any) -> torch.Tensor:
                if (result := reducer.compression.decompress(back(finished), context)) is not gradient:
                    gradient.copy_(result)
                return gradient

        request = self._request
        if request is None or request.shape != array.shape or self._dtype != array.dtype:
            request, self._dtype = reducer.request(self.name, array), array.dtype
            self._request = request
        self.handle = reducer.operations.submit(request, array, land=land, filler=filler, site=reducer.site)


class _Reducer:
    """All gradients of one optimizer."""

    def __init__(  # noqa: PLR0913 - a record of the user's choices
        self,
        operations: Operations,
        parameters: Iterable[tuple[str, torch.Tensor]],
        *,
        compression: type[Compressor],
        passes_per_step: int,
        op: ReduceOp,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.operations = operations
        self.compression = compression
        self.passes_per_step = passes_per_step
        self.sparse_as_dense = sparse_as_dense
        self._op = op
        self._predivide = predivide
        self._process_set = process_set
        self._expected: set[int] = set()
        self._finished = False
        self.skipped = False
        self.site: Site = None
        prefix = operations.namespace()
        self.gradients = [_Gradient(self, prefix + name, parameter) for name, parameter in parameters]
        for gradient in self.gradients:
            gradient.parameter.register_post_accumulate_grad_hook(gradient.ready)

    def request(self, name: str, array: Any) -> Request:
        """Makes the request of one gradient, once."""
        scaled = self._predivide != 1.0
        check_reducible(array.dtype, self._op, scaled=scaled)
        return self.operations.request(
            Kind.ALLREDUCE,
            name,
            array,
            self._process_set,
            op=self._op,
            prescale=1.0 / self._predivide,
            postscale=self._predivide,
        )

    def expect_end_of_backward(self) -> None:
        """Has autograd call us when the backward pass that is running ends."""
        task = torch._C._current_graph_task_id()  # noqa: SLF001 - what FSDP goes by, too
        if task not in self._expected:
            self._expected.add(task)
            self.site = call_site(sys._getframe(1))  # noqa: SLF001 - the documented way to the caller
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._end_of_backward(task))  # type: ignore[attr-defined]  # noqa: SLF001

    def _end_of_backward(self, task: int) -> None:
        self._expected.discard(task)
        if not _nested() and any(gradient.handle is not None for gradient in self.gradients):
            self.finish()

    def finish(self) -> None:
        """Reduces what this step has accumulated and waits; no rank is left waiting for what another does not have.

        Parameters without a gradient here take part with zeros, if another rank has one; if none has, they keep none.
        """
        for gradient in self.gradients:
            if gradient.handle is None:
                if gradient.passes:
                    gradient.submit()
                else:
                    gradient.fill()
        wait_all([gradient.handle for gradient in self.gradients if gradient.handle is not None])
        self._finished = all([gradient.settle() for gradient in self.gradients])  # each forgets a void operation

    def finish_step(self) -> None:
        """Makes sure that everything is reduced."""
        if not self._finished:
            self.finish()

    def reset(self) -> None:
        """Gets ready for the next step."""
        self._finished = False
        for gradient in self.gradients:
            gradient.reset()

    def drop(self) -> None:
        """Lets what is under way end, whatever comes of it, before its memory is used for something else."""
        if not self._finished:
            for gradient in self.gradients:
                if gradient.handle is not None:
                    gradient.handle.wait()
        self.reset()


def _nested() -> bool:
    """Says whether this backward pass runs inside another one, as in reentrant checkpointing."""
    runs = 0
    frame = sys._getframe(1)  # noqa: SLF001 - the documented way to the callers
    while frame is not None:
        runs += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back
    return runs > 1


class _Distributed(torch.optim.Optimizer):
    """What is added to the user's optimizer; its class becomes a subclass of both."""

    _coordd: _Reducer | None

    def synchronize(self) -> None:
        """Waits until all gradients are reduced. After ``backward()`` they are already; kept for Horovod's idiom."""
        if self._coordd is not None:
            self._coordd.finish_step()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Lets `step` inside the block use the gradients as they are."""
        if self._coordd is None:
            yield
            return
        self._coordd.skipped = True
        try:
            yield
        finally:
            self._coordd.skipped = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes are accumulated before a reduction."""
        _check_passes(passes)
        if self._coordd is not None:
            self._coordd.passes_per_step = passes

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's signature
        """Clears the gradients, after what is under way has ended."""
        if self._coordd is not None:
            self._coordd.drop()
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state, after what is under way has ended."""
        if self._coordd is not None:
            self._coordd.drop()
        super().load_state_dict(state_dict)


def DistributedOptimizer(  # noqa: N802, PLR0913 - Horovod's name and signature
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,  # noqa: FBT001, FBT002 - Horovod's signature
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Makes an optimizer average its gradients over the ranks.

    The very object is returned, with its class turned into a subclass of what it was: ``isinstance``, learning rate
    schedulers and references to it keep working.

    Args:
        optimizer: any optimizer of PyTorch's interface.
        named_parameters: usually ``model.named_parameters()``; names must be equal on all ranks.
        compression: what travels instead of the gradients.
        backward_passes_per_step: passes whose gradients are summed locally before they are averaged.
        op: `Average` or `Sum`.
        gradient_predivide_factor: splits the averaging: gradients are divided by it before, multiplied after.
        sparse_as_dense: turns sparse gradients into dense ones, which can be reduced.
        process_set: the ranks that take part.

    Raises:
        ArgumentError: parameters without a name, names used twice, an optimizer that is distributed already.
        NotInitializedError: `init` was not called.
    """
    _check_passes(backward_passes_per_step)
    if isinstance(optimizer, _Distributed):
        text = "this optimizer is a DistributedOptimizer already: wrap it once"
        raise ArgumentError(text)
    if gradient_predivide_factor != 1.0 and op is not Average:
        text = "gradient_predivide_factor not supported with op != Average"
        raise ArgumentError(text)
    operations = api.operations()
    world = operations.daemon.world
    named = _named(optimizer, named_parameters)
    alone = world.size == 1 or len(process_set.ranks) == 1
    reducer = None
    if not alone and world.rank in (process_set.ranks or range(world.size)):
        reducer = _Reducer(
            operations,
            named,
            compression=compression,
            passes_per_step=backward_passes_per_step,
            op=op,
            predivide=gradient_predivide_factor,
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
        )
        optimizer.register_step_pre_hook(_before_step)
        optimizer.register_step_post_hook(_after_step)
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_Distributed, kind), {"__module__": kind.__module__})
    optimizer._coordd = reducer  # type: ignore[attr-defined]  # noqa: SLF001 - it is ours now
    return optimizer


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes sure of the gradients. ``args`` begins with the optimizer; a closure computes them anew, so each call of it is followed by a reduction."""
    reducer: _Reducer = optimizer._coordd  # noqa: SLF001 - set above
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        if not reducer.skipped:
            reducer.finish_step()
        return None
    reducer.drop()

    def reduced() -> Any:
        reducer.reset()
        loss = closure()
        reducer.finish_step()
        return loss

    rest = {key: value for key, value in kwargs.items() if key != "closure"}
    return (optimizer, reduced, *args[2:]), rest


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001 - torch's signature
    optimizer._coordd.reset()  # noqa: SLF001 - set above


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> list[tuple[str, torch.Tensor]]:
    """Gives every parameter of the optimizer a name."""
    places = [
        (f"param.{index}.{place}", parameter)
        for index, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
        if parameter.requires_grad
    ]
    if named_parameters is None:
        return places
    named = list(named_parameters)
    if any(not isinstance(item, tuple) or len(item) != 2 for item in named):  # noqa: PLR2004 - a pair
        text = (
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
        raise ArgumentError(text)
    names = [name for name, _ in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        text = f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}"
        raise ArgumentError(text)
    known = {id(parameter): name for name, parameter in named}
    if unnamed := [place for place, parameter in places if id(parameter) not in known]:
        text = (
            "named_parameters was specified, but one or more model parameters were not named: "
            f"{', '.join(unnamed)} (group and place in the optimizer)"
        )
        raise ArgumentError(text)
    return [(known[id(parameter)], parameter) for _, parameter in places]


def _check_passes(passes: int) -> None:
    if passes < 1:
        text = f"backward_passes_per_step must be > 0, not {passes}"
        raise ArgumentError(text)


