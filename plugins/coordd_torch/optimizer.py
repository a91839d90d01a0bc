"""`DistributedOptimizer`: the user's optimizer, with gradients averaged over the ranks while backward still runs.

Invariant: when ``backward()`` returns, ``.grad`` holds the values that `step` will use, on every rank. Thus clipping,
scaling and logging between the two work unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from numbers import Real
from typing import Any

import torch

from coordd import api
from coordd.daemon.operations import Operations
from coordd.errors import ArgumentError, CoorddError, ranks_text
from coordd.gradients.bucketing import Grouping
from coordd.ops.arguments import check_op, read_groups
from coordd.ops.checks import finite, whole
from coordd.ops.messages import ReduceOp
from coordd.ops.process_sets import ProcessSet, check_process_set, global_process_set
from coordd.parallel.collective_calls import CollectiveCall, collective
from coordd_torch import as_horovod
from coordd_torch.accumulation import inside_backward
from coordd_torch.adasum import AdasumStep
from coordd_torch.communication import Channel, check_combines
from coordd_torch.compression import Compression, Compressor, made
from coordd_torch.consistency import Consistency
from coordd_torch.differentiable import allgather
from coordd_torch.late_parameters import groups_of
from coordd_torch.names import beside, listed, names_of
from coordd_torch.operations import Average, join
from coordd_torch.reducer import Reducer
from coordd_torch.scaler import forgets_scale
from coordd_torch.start import Start, structure
from coordd_torch.state import broadcast_optimizer_state, broadcast_parameters
from coordd_torch.wrappers import check_parallel

__all__ = ["DistributedOptimizer"]

_log = logging.getLogger("coordd")

_COMBINE = frozenset({ReduceOp.AVERAGE, ReduceOp.AVERAGE_PRESENT, ReduceOp.SUM, ReduceOp.ADASUM})


class _Distributed(torch.optim.Optimizer):
    """Attributes and methods of a distributed optimizer, copied into a subclass of the user's optimizer class.

    They are copied because a second base class could require another memory layout than the existing object has.
    """

    _kind: type[torch.optim.Optimizer]
    """The original class of the user's optimizer."""
    _coordd: Reducer | None = None
    _adasum: AdasumStep | None = None
    _process_set = global_process_set
    _steps = 0
    """Number of steps since all ranks last joined."""
    _passes = 1
    # The following attributes are Horovod's, for scripts that read them.
    _parameter_names: dict[torch.Tensor, str]
    _synchronized = False
    _should_synchronize = True

    @property
    def _handles(self) -> dict[Any, Any]:
        """The operations in flight after ``backward()``: always empty."""
        return {}

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        """The parameters whose gradients are reduced."""
        known = self._coordd.known if self._coordd is not None else set()
        return {parameter for parameter in _parameters(self) if id(parameter) in known}

    @property
    def _allreduce_delay(self) -> dict[torch.Tensor, int]:
        """How many backward passes each parameter's gradient still accumulates before it is reduced."""
        made = self._coordd.passes() if self._coordd is not None else {}
        return {parameter: self._passes - made.get(parameter, 0) for parameter in self._parameter_names}

    @property
    def backward_passes_per_step(self) -> int:
        """Number of backward passes that are accumulated before a reduction."""
        return self._passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles as the plain optimizer, with a warning, because a copy reduces no gradients."""
        if self._coordd is not None or self._adasum is not None:
            _log.warning(
                "a copy of an optimizer of DistributedOptimizer is the plain %s, which reduces nothing: to train with "
                "it on all ranks, wrap the copy",
                self._kind.__name__,
            )
        return object.__new__, (self._kind,), self.__getstate__()

    def synchronize(self) -> None:
        """Reduces all gradients, of an incomplete accumulation too, and waits for them.

        After the last ``backward()`` of a step they are already reduced.

        Raises:
            DiscardedStepError: the backward pass of a rank failed, so there are no gradients.
        """
        as_horovod.note_synchronize(self)
        if self._coordd is not None:
            self._coordd.check_current()
            self._coordd.finish_step()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Context in which `step` uses the gradients as they are, without a reduction."""
        self._should_synchronize = False
        if self._coordd is not None:
            self._coordd.skipped = True
        try:
            yield
        finally:
            self._should_synchronize = True
            if self._coordd is not None:
                self._coordd.skipped = False

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which ``backward()`` accumulates local gradients without a reduction.

        The first ``backward()`` after it reduces all accumulated gradients, as with PyTorch's
        ``DistributedDataParallel``; without one, `step` or `synchronize` does. Until then ``.grad`` is local to this
        rank.
        """
        if self._coordd is None:
            yield
            return
        self._coordd.local += 1
        try:
            yield
        finally:
            self._coordd.local -= 1

    def discard_step(self) -> None:
        """Discards the current step on all ranks, because this rank cannot complete it; does not wait for them.

        It waits only if the other ranks have not yet discarded an earlier step that this rank discarded. A deadlock
        between ranks in that wait is no error here.

        Call it once for each step that fails on this rank, in the ``except`` block. It is needed if a forward pass, or
        other code before ``backward()`` has computed a gradient, fails: otherwise the other ranks are not notified. It
        does nothing if the step is already discarded. On all other ranks ``backward()`` or `step` raises
        `DiscardedStepError`, gradients are cleared, and all ranks make the next step together.

        Raises:
            CoorddError: the gradients of this step are already reduced, so other ranks may have used them.
        """
        if self._adasum is not None:
            self._adasum.discard_step()
        elif self._coordd is not None:
            self._coordd.check_current()
            self._coordd.discard_step()
        else:
            for parameter in _parameters(self):
                parameter.grad = None

    def join(self) -> int:
        """Waits until all ranks have joined, then broadcasts parameters and state of the rank with the most steps.

        Until then this rank contributes placeholders to the operations of the others. Only this optimizer's parameters
        and state are broadcast; not buffers, schedulers or loss scalers. A rank that joined early has missed changes of
        the loss scale, and with different scales parameters drift apart, so broadcast the scaler too:
        ``scaler.load_state_dict(broadcast_object(scaler.state_dict(), last))``, where ``last`` is the result of `join`.

        Returns:
            The rank that made the most steps, whose parameters and state were broadcast.

        Raises:
            CoorddError: a rank has joined in another way, as it does at the end of a script with ``uneven="join"``.
        """
        if self._coordd is not None:
            self._coordd.drop()
        join(process_set=self._process_set)
        steps = torch.tensor([self._steps * api.size() + api.rank()], device="cpu")
        found: list[int] = allgather(steps, process_set=self._process_set).tolist()
        _check_all_join(self._process_set, [each % api.size() for each in found])
        last = max(found) % api.size()
        self._steps = 0
        broadcast_parameters(_parameters(self), last, self._process_set)
        broadcast_optimizer_state(self, last, process_set=self._process_set)
        return last

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Sets the number of backward passes that are accumulated before a reduction."""
        _check_passes(passes)
        self._passes = passes
        if self._coordd is not None:
            self._coordd.passes_per_step = passes

    def zero_grad(self, *args: Any, **options: Any) -> None:
        """Clears the gradients after pending reductions have completed; arguments as in the user's optimizer."""
        if self._coordd is not None:
            self._coordd.drop()
            self._coordd.restore_hooks()
            self._coordd.adopt_late()
        self._kind.zero_grad(self, *args, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, the same on all ranks; their gradients are averaged from the next backward pass on."""
        self._kind.add_param_group(self, param_group)
        if self._coordd is not None:
            self._coordd.add_late_hooks()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state, on any rank, after pending reductions have completed; keeps the gradients for `step`."""
        if self._coordd is not None:
            self._coordd.underway.wait()
        self._kind.load_state_dict(self, state_dict)


@collective("DistributedOptimizer", namespace=True)
def DistributedOptimizer(  # noqa: N802, PLR0917 - Horovod's name and signature
    _call: CollectiveCall,
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

    Returns the same object, whose class becomes a subclass of its original class: ``isinstance``, learning rate
    schedulers and references to it keep working.

    Args:
        optimizer: any optimizer with PyTorch's interface.
        named_parameters: usually ``model.named_parameters()``; names must be equal on all ranks.
        compression: one of `Compression`, as a class or an object, or a class with Horovod's functions ``compress`` and
            ``decompress``. Give each optimizer its own object.
        backward_passes_per_step: number of passes whose gradients are summed locally before they are averaged.
        op: `Average`, `AveragePresent`, `Sum` or `Adasum`, which combines the ranks' local steps.
        gradient_predivide_factor: splits the averaging: gradients are divided by it before the reduction and
            multiplied by it afterwards.
        num_groups: number of buckets of nearly equal size, instead of the default ones.
        groups: lists of parameters whose gradients are reduced together; the others as by default.
        sparse_as_dense: converts sparse gradients to dense ones before the reduction.
        process_set: the ranks that take part.
        uneven: ``"join"`` lets ranks have different numbers of batches: a rank that has finished the script, or calls
            ``optimizer.join()``, contributes placeholders until all ranks have.

    Raises:
        ArgumentError: a parameter has no name, a name is used twice, the optimizer is already distributed, the
            compression does not support ``op``, an argument is invalid, or another package reduces the gradients.
        MismatchError: on all ranks: their parameters or settings differ; the message lists the differences.
        RefusedError: another rank has raised an error here.
        NotInitializedError: `init` was not called.
    """
    return _distributed(
        _call,
        optimizer,
        named_parameters,
        compression=compression,
        passes=backward_passes_per_step,
        op=op,
        predivide=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        uneven=uneven,
    )


def _distributed(
    call: CollectiveCall,
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
    *,
    compression: Compressor | type,
    passes: int,
    op: ReduceOp,
    predivide: float,
    num_groups: int,
    groups: Any,
    sparse_as_dense: bool,
    process_set: ProcessSet,
    uneven: str | None,
) -> Any:
    """Implements `DistributedOptimizer` inside a collective call."""
    operations = api.operations()
    world = operations.daemon.world
    check_process_set(process_set, world.size)
    op = check_op(op)  # scripts written for Horovod may pass its number
    _check_passes(passes)
    _check_optimizer(optimizer, op)
    _check_choices(op, predivide, uneven)
    if operations.as_horovod:
        num_groups, groups = read_groups(num_groups, groups)
    grouping = Grouping(num_groups, groups, kind=torch.Tensor)
    compressor = made(compression)
    check_combines(compressor, op)
    _check_combined(op)
    given = None if named_parameters is None else listed(named_parameters)
    named = names_of(optimizer, given)
    check_parallel(optimizer, [parameter for _, parameter in named])
    _check_types(named)
    own = _own_hooks(optimizer)
    settings = [
        f"op={op.name.capitalize()}",
        f"backward_passes_per_step={passes}",
        f"sparse_as_dense={sparse_as_dense}",
        f"gradient_predivide_factor={predivide}",
        f"uneven={uneven}",
        compressor.title,
        call.prefix,
    ]
    settings += [f"groups {grouping.choice(parameter for _, parameter in named)}"] if num_groups or groups else []
    others = beside(optimizer, given)
    call.lines += structure(optimizer, [*named, *others], settings)
    prefix = call.prefix
    alone = world.size == 1 or len(process_set.ranks) == 1
    reducer = None
    takes_part = not alone and world.rank in (process_set.ranks or range(world.size))
    adasum = None
    consistency = _consistency(operations, optimizer, named, others, prefix=prefix, process_set=process_set)
    if takes_part and op is ReduceOp.ADASUM:
        adasum = AdasumStep(
            optimizer, prefix, named, compressor=compressor, process_set=process_set, consistency=consistency
        )
    elif takes_part:
        channel = Channel(
            operations, prefix=prefix, compressor=compressor, op=op, predivide=predivide, process_set=process_set
        )
        reducer = Reducer(
            channel,
            named,
            groups=groups_of(optimizer),
            passes_per_step=passes,
            sparse_as_dense=sparse_as_dense,
            grouping=grouping,
            consistency=consistency,
        )
        _attach(optimizer, reducer)
    if takes_part:
        optimizer.register_step_post_hook(_count_step)
    if uneven == "join":
        call.agreed.append(lambda: operations.uneven.add(process_set if takes_part else global_process_set))
    if operations.as_horovod:
        optimizer.register_step_pre_hook(as_horovod.prepare_step)
    optimizer.__class__ = _subclass(type(optimizer), own)
    optimizer._coordd = reducer  # type: ignore[attr-defined]  # noqa: SLF001 - it is ours now
    optimizer._adasum = adasum and adasum.guard(optimizer)  # type: ignore[attr-defined]  # noqa: SLF001 - as above
    optimizer._process_set = process_set  # type: ignore[attr-defined]  # noqa: SLF001 - as above
    optimizer._passes = passes  # type: ignore[attr-defined]  # noqa: SLF001 - as above
    horovods: dict[str, Any] = {"_compression": compression, "op": op}
    horovods |= {
        "gradient_predivide_factor": predivide,
        "sparse_as_dense": sparse_as_dense,
        "process_set": process_set,
        "_groups": groups or num_groups or None,
    }
    horovods["_parameter_names"] = as_horovod.parameter_names(optimizer, given)
    vars(optimizer).update(horovods | vars(optimizer))  # attributes of the optimizer take precedence
    return optimizer


def _consistency(
    operations: Operations,
    optimizer: torch.optim.Optimizer,
    named: list[tuple[str, torch.Tensor]],
    others: list[tuple[str, torch.Tensor]],
    *,
    prefix: str,
    process_set: ProcessSet,
) -> Consistency:
    """Creates the consistency check of an optimizer's parameters.

    The initial values of parameters that another optimizer may train are not compared, because they may change before.

    Args:
        operations: starts the operations.
        optimizer: the user's optimizer.
        named: the parameters that it trains.
        others: the parameters that it does not train now.
        prefix: prefix of the names of the operations.
        process_set: the ranks that take part.
    """
    frozen = [(name, value) for name, value in others if not value.requires_grad]
    names = {id(value): name for name, value in [*named, *others]}
    start = Start(operations, optimizer, [*named, *frozen], prefix=prefix, process_set=process_set)
    return Consistency(operations, optimizer, names, start, prefix=prefix, process_set=process_set)


def _attach(optimizer: torch.optim.Optimizer, reducer: Reducer) -> None:
    """Adds hooks that make an optimizer's steps wait for its gradients."""
    weakref.finalize(optimizer, reducer.detach)
    optimizer.register_step_pre_hook(forgets_scale(_before_step))
    optimizer.register_step_post_hook(forgets_scale(_after_step))


def _check_choices(op: ReduceOp, predivide: float, uneven: str | None) -> None:
    """Rejects settings that cannot be combined."""
    finite(predivide, "gradient_predivide_factor", above=0)
    if predivide != 1.0 and op is not Average:
        text = "gradient_predivide_factor not supported with op != Average"
        raise ArgumentError(text)
    if uneven not in {None, "join"}:
        text = f'uneven is None or "join", not {uneven!r}'
        raise ArgumentError(text)


def _check_combined(op: ReduceOp) -> None:
    """Rejects a reduction that is neither a mean or sum of gradients nor Adasum."""
    if op not in _COMBINE:
        text = (
            "DistributedOptimizer averages or adds up gradients, or combines steps: "
            f"op={op.name.capitalize()} does not, choose Average, AveragePresent, Sum or Adasum"
        )
        raise ArgumentError(text)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _count_step(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001 - torch's signature
    optimizer._steps += 1  # noqa: SLF001 - it is ours


def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Completes the reduction of gradients before a step; with a closure, reduces them after each call of it.

    ``args`` begins with the optimizer itself.
    """
    reducer: Reducer = optimizer._coordd  # noqa: SLF001 - set above
    reducer.check_current()
    if reducer.expected:
        raise inside_backward()
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        if not reducer.skipped:
            reducer.finish_step(stepping=True)
        elif reducer.adopt_late() or not reducer.complete:
            reducer.consistency.local = True
        if api.operations().as_horovod:
            as_horovod.fill_missing(_parameters(optimizer))
        _skip(optimizer, reducer)
        return None
    _begin_closure(reducer)
    reducer.adopt_late()

    def reduced() -> Any:
        _begin_closure(reducer)
        loss = closure()
        reducer.finish_step(stepping=True)
        _skip(optimizer, reducer)
        return _agreed(loss, reducer)

    rest = {key: value for key, value in kwargs.items() if key != "closure"}
    return (optimizer, reduced, *args[2:]), rest


def _check_all_join(process_set: ProcessSet, present: list[int]) -> None:
    """Rejects ranks that have joined without their optimizer: their parameters may be those of the most steps."""
    absent = sorted({*(process_set.ranks or range(api.size()))} - {*present})
    if absent:
        text = (
            f"{ranks_text(absent)} joined without optimizer.join(), as at the end of a script with uneven='join', so "
            "it is unknown which parameters are those of the most steps: call optimizer.join() on all ranks"
        )
        raise CoorddError(text)


def _begin_closure(reducer: Reducer) -> None:
    """Waits for pending reductions; keeps accumulated gradients, to which the closure adds unless it clears them."""
    if not reducer.accumulating:
        reducer.drop()


def _skip(optimizer: torch.optim.Optimizer, reducer: Reducer) -> None:
    """Clears the gradients if this step is skipped, so that the optimizer does nothing."""
    if reducer.finiteness is not None and reducer.finiteness.skips:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def _agreed(loss: Any, reducer: Reducer) -> Any:
    """Reduces the loss that a closure returns as gradients are, so that line searches are equal on all ranks."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return torch.full_like(loss.detach(), reducer.reduced(loss.item()))
    return reducer.reduced(float(loss)) if isinstance(loss, Real) else loss


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG001 - torch's signature
    reducer: Reducer = optimizer._coordd  # noqa: SLF001 - set above
    skips = reducer.finiteness is not None and reducer.finiteness.skips
    found = getattr(optimizer, "found_inf", None)  # a loss scaler lets fused optimizers skip the step themselves
    reducer.end_step(made=not skips and (found is None or not found.item()))


def _subclass(kind: type[torch.optim.Optimizer], lacking: dict[str, Any]) -> Any:
    """Returns the subclass for an optimizer of this class."""
    ours = {name: value for name, value in vars(_Distributed).items() if name not in {"__dict__", "__weakref__"}}
    return type(kind.__name__, (kind,), {**ours, "__module__": kind.__module__, "_kind": kind, **lacking})


def _own_hooks(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Enables step hooks on an optimizer that has not called torch's ``__init__``.

    Some optimizers that wrap another one, such as Lookahead, do not call it.

    Returns:
        The attributes that its class lacks.
    """
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        return {}
    vars(optimizer).update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True  # prevents torch from wrapping it again
    if (scheduled := vars(optimizer).get("step")) is not None:
        vars(optimizer)["step"] = _hooked(scheduled, optimizer)
    return {"step": hooked}


def _hooked(step: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Adds step hooks to a scheduler's wrapper, which calls the optimizer's own method without them."""
    hooked: Any = torch.optim.Optimizer.profile_hook_step(lambda _, *args, **options: step(*args, **options))
    reference = weakref.ref(optimizer)

    @functools.wraps(step)
    def whole(*args: Any, **options: Any) -> Any:
        return hooked(reference(), *args, **options)

    return whole


def _check_optimizer(optimizer: Any, op: ReduceOp) -> None:
    """Rejects an object that is no optimizer, is already distributed, or does not support the settings."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        given = type(optimizer).__name__
        text = f"DistributedOptimizer wants an optimizer, such as torch.optim.SGD(model.parameters()), not a {given}"
        rest = ", which is no subclass of torch.optim.Optimizer" if hasattr(optimizer, "param_groups") else ""
        raise ArgumentError(text + rest)
    if hasattr(optimizer, "_coordd"):
        text = "this optimizer is a DistributedOptimizer already: wrap it once"
        raise ArgumentError(text)
    if op is ReduceOp.ADASUM and api.operations().daemon.config.nonfinite != "ignore":
        text = "nonfinite looks at gradients, and Adasum combines steps: leave nonfinite out, or use another op"
        raise ArgumentError(text)


def _check_types(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Rejects lazy parameters, and parameters with another gradient dtype, which newer versions of PyTorch allow."""
    for name, parameter in named:
        if torch.nn.parameter.is_lazy(parameter):
            text = f"{name!r} has no shape yet, for its layer is lazy: call the model on a batch before you wrap this"
            raise ArgumentError(text)
        wanted = getattr(parameter, "grad_dtype", parameter.dtype)
        if wanted is not parameter.dtype:
            text = (
                f"gradients of {name!r} are of {wanted or 'any type'}, and the parameter is of {parameter.dtype}: "
                "gradients are reduced in the type of their parameter, so leave grad_dtype as it is"
            )
            raise ArgumentError(text)


def _check_passes(passes: int) -> None:
    if whole(passes, "backward_passes_per_step") < 1:
        text = f"backward_passes_per_step must be > 0, not {passes}"
        raise ArgumentError(text)
