"""`DistributedOptimizer`: the user's optimizer, whose gradients are averaged over the ranks while backward still runs.

Its one rule: when ``backward()`` returns, ``.grad`` holds what `step` will use, on every rank. So clipping, scaling and
logging between the two are right without anybody having to know.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from numbers import Real
from typing import Any

import torch

from coordd import api
from coordd.errors import ArgumentError
from coordd.grouping import Grouping
from coordd.messages import ReduceOp
from coordd.process_sets import ProcessSet, global_process_set
from coordd_torch.adasum import AdasumStep
from coordd_torch.channel import Channel, check_combines
from coordd_torch.compression import Compression, Compressor, made
from coordd_torch.operations import Average, allreduce_, join
from coordd_torch.reducer import Reducer
from coordd_torch.state import broadcast_optimizer_state, broadcast_parameters

__all__ = ["DistributedOptimizer"]


class _Distributed(torch.optim.Optimizer):
    """What is added to the user's optimizer; its class becomes a subclass of both."""

    _coordd: Reducer | None = None
    _process_set = global_process_set
    _steps = 0
    """Since all ranks have joined last."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Is copied and pickled as the plain optimizer that it was: nobody reduces a copy's parameters."""
        return object.__new__, (type(self).__bases__[1],), self.__getstate__()

    def synchronize(self) -> None:
        """Waits until all gradients are reduced. After ``backward()`` they are already; kept for Horovod's idiom."""
        if self._coordd is not None:
            self._coordd.check_current()
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

    def join(self) -> int:
        """Waits until all ranks have joined, takes part with nothing until then, and ends equal to who has done most.

        What all have then are this optimizer's parameters and state; not buffers, schedulers or loss scalers. Who has
        joined early has not seen how the others' loss scale has changed, and with different scales parameters part, so
        take it over: ``scaler.load_state_dict(broadcast_object(scaler.state_dict(), last))`` with what `join` returns.

        Returns:
            the rank that has made the most steps, and whose parameters and state these are.
        """
        if self._coordd is not None:
            self._coordd.drop()
        join(process_set=self._process_set)
        most = torch.tensor(self._steps * api.size() + api.rank())
        last = int(allreduce_(most, op=ReduceOp.MAX, process_set=self._process_set)) % api.size()
        self._steps = 0
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        broadcast_parameters(parameters, last, self._process_set)
        broadcast_optimizer_state(self, last, process_set=self._process_set)
        return last

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes are accumulated before a reduction."""
        _check_passes(passes)
        if self._coordd is not None:
            self._coordd.passes_per_step = passes

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, after what is under way has ended."""
        if self._coordd is not None:
            self._coordd.drop()
            self._coordd.adopt(_late(self, self._coordd))
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state, after what is under way has ended."""
        if self._coordd is not None:
            self._coordd.drop()
        super().load_state_dict(state_dict)


def DistributedOptimizer(  # noqa: N802, PLR0917 - Horovod's name and signature
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compressor | type = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    *,
    uneven: str | None = None,
) -> Any:
    """Makes an optimizer average its gradients over the ranks.

    The very object is returned, with its class turned into a subclass of what it was: ``isinstance``, learning rate
    schedulers and references to it keep working.

    Args:
        optimizer: any optimizer of PyTorch's interface.
        named_parameters: usually ``model.named_parameters()``; names must be equal on all ranks.
        compression: what travels instead of the gradients: one of `Compression`, as a class or an object, or a class
            with Horovod's functions ``compress`` and ``decompress``. Give each optimizer its own object.
        backward_passes_per_step: passes whose gradients are summed locally before they are averaged.
        op: `Average`, `AveragePresent`, `Sum` or `Adasum`, which combines the steps that the ranks would have made.
        gradient_predivide_factor: splits the averaging: gradients are divided by it before, multiplied after.
        num_groups: so many buckets of nearly equal size, instead of the usual ones.
        groups: lists of parameters whose gradients are reduced together; the rest as usual.
        sparse_as_dense: turns sparse gradients into dense ones, which can be reduced.
        process_set: the ranks that take part.
        uneven: ``"join"`` lets ranks have different numbers of batches: one that is through with the script, or calls
            ``optimizer.join()``, takes part with nothing until all are.

    Raises:
        ArgumentError: parameters without a name, names used twice, an optimizer that is distributed already, a
            compression that does not fit ``op``, an argument that is none of these.
        NotInitializedError: `init` was not called.
    """
    op = ReduceOp(op)  # Horovod's scripts may give its number
    _check_passes(backward_passes_per_step)
    _check_optimizer(optimizer, op)
    if gradient_predivide_factor != 1.0 and op is not Average:
        text = "gradient_predivide_factor not supported with op != Average"
        raise ArgumentError(text)
    if uneven not in {None, "join"}:
        text = f'uneven is None or "join", not {uneven!r}'
        raise ArgumentError(text)
    grouping = Grouping(num_groups, groups, kind=torch.Tensor)
    compressor = made(compression)
    check_combines(compressor, op)
    operations = api.operations()
    operations.uneven |= uneven == "join"
    world = operations.daemon.world
    named = _named(optimizer, named_parameters)
    prefix = operations.namespace()  # of every rank that gets here, so that all count alike
    alone = world.size == 1 or len(process_set.ranks) == 1
    reducer = None
    takes_part = not alone and world.rank in (process_set.ranks or range(world.size))
    if takes_part and op is ReduceOp.ADASUM:
        AdasumStep(optimizer, prefix, named, compressor=compressor, process_set=process_set)
    elif takes_part:
        channel = Channel(
            operations,
            prefix=prefix,
            compressor=compressor,
            op=op,
            predivide=gradient_predivide_factor,
            process_set=process_set,
        )
        passes = backward_passes_per_step
        reducer = Reducer(channel, named, passes_per_step=passes, sparse_as_dense=sparse_as_dense, grouping=grouping)
        weakref.finalize(optimizer, reducer.detach)
        optimizer.register_step_pre_hook(_before_step)
        optimizer.register_step_post_hook(_after_step)
    if takes_part:
        optimizer.register_step_post_hook(_count_step)
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_Distributed, kind), {"__module__": kind.__module__})
    optimizer._coordd = reducer  # type: ignore[attr-defined]  # noqa: SLF001 - it is ours now
    optimizer._process_set = process_set  # type: ignore[attr-defined]  # noqa: SLF001 - as above
    return optimizer


def _count_step(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001 - torch's signature
    optimizer._steps += 1  # noqa: SLF001 - it is ours


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes sure of the gradients; a closure computes them anew, so each call of it is followed by a reduction.

    ``args`` begins with the optimizer itself.
    """
    reducer: Reducer = optimizer._coordd  # noqa: SLF001 - set above
    reducer.check_current()
    reducer.adopt(_late(optimizer, reducer))
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        if not reducer.skipped:
            reducer.finish_step()
        _skip(optimizer, reducer)
        return None
    reducer.drop()

    def reduced() -> Any:
        reducer.reset()
        loss = closure()
        reducer.finish_step()
        _skip(optimizer, reducer)
        return _agreed(loss, reducer)

    rest = {key: value for key, value in kwargs.items() if key != "closure"}
    return (optimizer, reduced, *args[2:]), rest


def _skip(optimizer: torch.optim.Optimizer, reducer: Reducer) -> None:
    """Has the optimizer do nothing if this step is to be skipped."""
    if reducer.finiteness is not None and reducer.finiteness.skips:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _agreed(loss: Any, reducer: Reducer) -> Any:
    """Reduces what a closure returns as its gradients are, so that line searches do the same on all ranks."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return torch.full_like(loss.detach(), reducer.reduced(loss.item()))
    return reducer.reduced(float(loss)) if isinstance(loss, Real) else loss


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001 - torch's signature
    found = getattr(optimizer, "found_inf", None)  # a loss scaler lets fused optimizers skip the step themselves
    optimizer._coordd.end_step(made=found is None or not found.item())  # noqa: SLF001 - set above


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
    try:
        named = list(named_parameters)
    except TypeError:  # a model, say
        named = []
    if not named or any(type(item) is not tuple or len(item) != 2 for item in named):
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


def _late(optimizer: torch.optim.Optimizer, reducer: Reducer) -> list[tuple[str, torch.Tensor]]:
    """Finds the parameters that were added or thawed after the optimizer was made distributed."""
    return [
        (f"param.{index}.{place}", parameter)
        for index, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
        if id(parameter) not in reducer.known and parameter.requires_grad
    ]


def _check_optimizer(optimizer: Any, op: ReduceOp) -> None:
    """Refuses what is no optimizer, is wrapped already, or could not do what the settings want."""
    if not hasattr(optimizer, "param_groups"):
        given = type(optimizer).__name__
        text = f"DistributedOptimizer wants an optimizer, such as torch.optim.SGD(model.parameters()), not a {given}"
        raise ArgumentError(text)
    if isinstance(optimizer, _Distributed):
        text = "this optimizer is a DistributedOptimizer already: wrap it once"
        raise ArgumentError(text)
    if op is ReduceOp.ADASUM and api.operations().daemon.config.nonfinite != "ignore":
        text = "nonfinite looks at gradients, and Adasum combines steps: leave nonfinite out, or use another op"
        raise ArgumentError(text)


def _check_passes(passes: int) -> None:
    if passes < 1:
        text = f"backward_passes_per_step must be > 0, not {passes}"
        raise ArgumentError(text)
