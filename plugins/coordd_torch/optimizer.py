"""`DistributedOptimizer`: the user's optimizer, whose gradients are averaged over the ranks while backward still runs.

Its one rule: when ``backward()`` returns, ``.grad`` holds what `step` will use, on every rank. So clipping, scaling and
logging between the two are right without anybody having to know.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from numbers import Real
from typing import Any

import torch

from coordd import api
from coordd.arguments import check_op, read_groups
from coordd.calls import CollectiveCall, collective
from coordd.checks import finite, whole
from coordd.errors import ArgumentError
from coordd.grouping import Grouping
from coordd.messages import ReduceOp
from coordd.operations import Operations
from coordd.process_sets import ProcessSet, check_process_set, global_process_set
from coordd_torch import as_horovod
from coordd_torch.accumulation import inside_backward
from coordd_torch.adasum import AdasumStep
from coordd_torch.channel import Channel, check_combines
from coordd_torch.compression import Compression, Compressor, made
from coordd_torch.consistency import Consistency
from coordd_torch.late import groups_of
from coordd_torch.names import beside, listed, names_of
from coordd_torch.operations import Average, allreduce_, join
from coordd_torch.reducer import Reducer
from coordd_torch.scaler import forgets_scale
from coordd_torch.start import Start, structure
from coordd_torch.state import broadcast_optimizer_state, broadcast_parameters
from coordd_torch.wrappers import check_parallel

__all__ = ["DistributedOptimizer"]

_log = logging.getLogger("coordd")

_COMBINE = frozenset({ReduceOp.AVERAGE, ReduceOp.AVERAGE_PRESENT, ReduceOp.SUM, ReduceOp.ADASUM})


class _Distributed(torch.optim.Optimizer):
    """What is added to the user's optimizer: its class becomes a subclass of itself that has all this, too.

    It is copied there. As a second base class it could give objects another layout in memory than they have.
    """

    _kind: type[torch.optim.Optimizer]
    """The class that the user's optimizer had."""
    _coordd: Reducer | None = None
    _adasum: AdasumStep | None = None
    _process_set = global_process_set
    _steps = 0
    """Since all ranks have joined last."""
    _passes = 1
    # What follows are attributes of Horovod's optimizer, for scripts that read them.
    _parameter_names: dict[torch.Tensor, str]
    _synchronized = False
    _should_synchronize = True

    @property
    def _handles(self) -> dict[Any, Any]:
        """What is in flight after ``backward()``: nothing."""
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
        """How many backward passes are accumulated before a reduction."""
        return self._passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    def __reduce__(self) -> tuple[Any, ...]:
        """Is copied and pickled as the plain optimizer that it was, and says so: no gradients of a copy are reduced."""
        if self._coordd is not None or self._adasum is not None:
            _log.warning(
                "a copy of an optimizer of DistributedOptimizer is the plain %s, which reduces nothing: to train with "
                "it on all ranks, wrap the copy",
                self._kind.__name__,
            )
        return object.__new__, (self._kind,), self.__getstate__()

    def synchronize(self) -> None:
        """Waits until all gradients are reduced, those of an accumulation that is not complete, too.

        After the last ``backward()`` of a step they are already.

        Raises:
            DiscardedStepError: the backward pass of a rank has failed, so there are no gradients.
        """
        as_horovod.note_synchronize(self)
        if self._coordd is not None:
            self._coordd.check_current()
            self._coordd.finish_step()

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Lets `step` inside the block use the gradients as they are."""
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
        """Lets ``backward()`` inside the block add to the gradients of this rank only.

        The first ``backward()`` after it reduces all that has come together, as with PyTorch's
        ``DistributedDataParallel``; if there is none, `step` or `synchronize` does. Until then ``.grad`` is this
        rank's alone.
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
        """Discards the present step on all ranks, because this rank cannot complete it; does not wait for them.

        It waits only where the other ranks have yet to discard an earlier step that this rank has discarded. If ranks
        wait for each other meanwhile, that is no error here.

        Call it once for each step that fails on this rank, in the ``except`` block. It is needed where a forward pass
        fails, or anything else before ``backward()`` has made a gradient: the other ranks hear of nothing else. Where
        the step is discarded already it does nothing. All other ranks get `DiscardedStepError` by ``backward()`` or
        `step`, gradients are cleared, and the next step is again that of all ranks.

        Raises:
            CoorddError: the gradients of this step are reduced already, so other ranks may have used them.
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
        most = torch.tensor(self._steps * api.size() + api.rank(), device="cpu")
        last = int(allreduce_(most, op=ReduceOp.MAX, process_set=self._process_set)) % api.size()
        self._steps = 0
        broadcast_parameters(_parameters(self), last, self._process_set)
        broadcast_optimizer_state(self, last, process_set=self._process_set)
        return last

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes are accumulated before a reduction."""
        _check_passes(passes)
        self._passes = passes
        if self._coordd is not None:
            self._coordd.passes_per_step = passes

    def zero_grad(self, *args: Any, **options: Any) -> None:
        """Clears the gradients, after what is under way has ended; takes what the user's optimizer takes."""
        if self._coordd is not None:
            self._coordd.drop()
            self._coordd.restore_hooks()
            self._coordd.adopt_late()
        self._kind.zero_grad(self, *args, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, on all ranks alike; their gradients are averaged from the next backward pass on."""
        self._kind.add_param_group(self, param_group)
        if self._coordd is not None:
            self._coordd.add_late_hooks()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state, on any rank, after what is under way has ended; gradients stay, for `step`."""
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
            compression that does not fit ``op``, an argument that is none of these, parameters whose gradients another
            package reduces.
        MismatchError: on all ranks: they have given different parameters or settings; it lists what differs.
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
    """Does what `DistributedOptimizer` says, as part of a call of all members."""
    operations = api.operations()
    world = operations.daemon.world
    check_process_set(process_set, world.size)
    op = check_op(op)  # Horovod's scripts may give its number
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
    operations.uneven |= uneven == "join"
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
    if operations.as_horovod:
        optimizer.register_step_pre_hook(as_horovod.prepare_step)
    optimizer.__class__ = _subclass(type(optimizer), own)
    optimizer._coordd = reducer  # type: ignore[attr-defined]  # noqa: SLF001 - it is ours now
    optimizer._adasum = adasum  # type: ignore[attr-defined]  # noqa: SLF001 - as above
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
    vars(optimizer).update(horovods | vars(optimizer))  # what the optimizer itself calls so stays
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
    """Prepares what compares the values of an optimizer's parameters; what others train changes before it is looked at.

    Args:
        operations: the way to the other ranks.
        optimizer: the user's.
        named: what it trains.
        others: what it does not train now.
        prefix: of the names of its operations.
        process_set: the ranks that take part.
    """
    frozen = [(name, value) for name, value in others if not value.requires_grad]
    names = {id(value): name for name, value in [*named, *others]}
    start = Start(operations, optimizer, [*named, *frozen], prefix=prefix, process_set=process_set)
    return Consistency(operations, optimizer, names, start, prefix=prefix, process_set=process_set)


def _attach(optimizer: torch.optim.Optimizer, reducer: Reducer) -> None:
    """Has an optimizer's steps wait for its gradients."""
    weakref.finalize(optimizer, reducer.detach)
    optimizer.register_step_pre_hook(forgets_scale(_before_step))
    optimizer.register_step_post_hook(forgets_scale(_after_step))


def _check_choices(op: ReduceOp, predivide: float, uneven: str | None) -> None:
    """Refuses settings that do not fit together."""
    finite(predivide, "gradient_predivide_factor", above=0)
    if predivide != 1.0 and op is not Average:
        text = "gradient_predivide_factor not supported with op != Average"
        raise ArgumentError(text)
    if uneven not in {None, "join"}:
        text = f'uneven is None or "join", not {uneven!r}'
        raise ArgumentError(text)


def _check_combined(op: ReduceOp) -> None:
    """Refuses what is neither a mean or sum of gradients nor a combination of steps."""
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
    """Makes sure of the gradients; a closure computes them anew, so each call of it is followed by a reduction.

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


def _begin_closure(reducer: Reducer) -> None:
    """Lets what is under way end; to what has been accumulated the closure adds, unless it clears it."""
    if not reducer.accumulating:
        reducer.drop()


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
    reducer: Reducer = optimizer._coordd  # noqa: SLF001 - set above
    skips = reducer.finiteness is not None and reducer.finiteness.skips
    found = getattr(optimizer, "found_inf", None)  # a loss scaler lets fused optimizers skip the step themselves
    reducer.end_step(made=not skips and (found is None or not found.item()))


def _subclass(kind: type[torch.optim.Optimizer], lacking: dict[str, Any]) -> Any:
    """Makes the class that an optimizer of this kind gets."""
    ours = {name: value for name, value in vars(_Distributed).items() if name not in {"__dict__", "__weakref__"}}
    return type(kind.__name__, (kind,), {**ours, "__module__": kind.__module__, "_kind": kind, **lacking})


def _own_hooks(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Makes hooks possible around the steps of an optimizer whose class has not called torch's ``__init__``.

    Some that wrap another optimizer, such as Lookahead, do not.

    Returns:
        what its class lacks.
    """
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        return {}
    vars(optimizer).update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
    hooked.hooked = True  # so that torch does not do the same
    return {"step": hooked}


def _check_optimizer(optimizer: Any, op: ReduceOp) -> None:
    """Refuses what is no optimizer, is wrapped already, or could not do what the settings want."""
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
    """Refuses lazy parameters, and those whose gradients may be of another type, as newer versions of PyTorch allow."""
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
