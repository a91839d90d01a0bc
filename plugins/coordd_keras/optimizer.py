"""`DistributedOptimizer` for Keras 3: the user's optimizer, with gradients averaged over the ranks.

It returns the same object and replaces its class by a subclass, so Keras treats it as before.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import keras

from coordd import api
from coordd.errors import ArgumentError
from coordd.gradients.bucketing import Grouping
from coordd.gradients.settings import Choices
from coordd.ops.arguments import check_op, read_groups
from coordd.ops.checks import whole
from coordd.ops.messages import ReduceOp
from coordd.ops.process_sets import ProcessSet, check_process_set, global_process_set
from coordd.parallel.collective_calls import CollectiveCall, collective
from coordd_keras.backend import Reduction, check_backend, reduction
from coordd_keras.compression import Compression, compressor
from coordd_keras.hyperparameters import Hyperparameters

__all__ = ["DistributedOptimizer", "PartialDistributedOptimizer", "distribute", "is_distributed"]

log = logging.getLogger("coordd")


class _Plan:
    """Distributed state of an optimizer."""

    def __init__(
        self,
        way: Reduction | None,
        settings: Hyperparameters,
        *,
        passes: int,
        average: bool,
        scale: int,
        unsaved: Sequence[str] = (),
    ) -> None:
        """Keeps the settings.

        Args:
            way: reduces gradients; None if there is nothing to exchange.
            settings: the optimizer's hyperparameters.
            passes: backward passes per step.
            average: whether accumulated gradients are divided by `passes`.
            scale: divisor for the gradients of local variables, which are not reduced.
            unsaved: the settings, as text, that `load_model` must be given again.
        """
        self.way = way
        self._settings = settings
        self.passes = passes
        self.average = average
        self.sums: list[Any] = []
        """For each variable, its gradients accumulated since the last step."""
        self.count: Any = None
        self.passed: dict[int, Any] = {}
        """The variables of these passes by index; in a graph, the variables of its single pass."""
        self.given: set[int] = set()
        """Indices of the variables that had gradients in these passes; in graphs, in any pass."""
        self.traced = False
        """Whether any pass ran inside a graph."""
        self.local: dict[int, Any] = {}
        """Variables whose gradients are not reduced, by id; the references keep the ids unique."""
        self._scale = scale
        self._unsaved = unsaved

    def common(self, variables: Sequence[Any]) -> list[Any]:
        """Returns the variables whose gradients are reduced."""
        return [variable for variable in variables if id(variable) not in self.local]

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduces all gradients except those of local variables."""
        if self.way is None:
            return list(gradients)
        common = self.common(variables)
        mine = {id(variable) for variable in common}
        pairs = list(zip(gradients, variables, strict=True))
        given = [gradient for gradient, variable in pairs if id(variable) in mine]
        reduced = iter(self.way.reduce(given, common, self._settings))
        return [next(reduced) if id(variable) in mine else self._scaled(gradient) for gradient, variable in pairs]

    def warn_unsaved(self) -> None:
        """Warns, once, when a model is saved: its file holds the plain optimizer."""
        unsaved, self._unsaved = self._unsaved, ()
        if unsaved:
            log.warning("a saved model does not hold %s: give it to load_model, too", ", ".join(unsaved))

    def _scaled(self, gradient: Any) -> Any:
        return gradient if gradient is None or self._scale == 1 else keras.ops.convert_to_tensor(gradient) / self._scale


class _Distributed(keras.optimizers.Optimizer):
    """Overrides of Keras's optimizer methods."""

    _coordd: _Plan

    def build(self, variables: Any) -> None:
        """Creates the optimizer's variables and registers the gradients to reduce.

        Raises:
            ArgumentError: a `LossScaleOptimizer` wraps this optimizer, so each rank would choose its own loss scale.
        """
        outer = sys._getframe(1).f_locals.get("self")  # noqa: SLF001 - the documented way to the caller
        if isinstance(outer, keras.optimizers.LossScaleOptimizer) and outer is not self:
            text = (
                "a LossScaleOptimizer around a DistributedOptimizer would skip steps on some ranks only: use "
                "DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
            )
            raise ArgumentError(text)
        super().build(variables)
        _prepare(self, list(variables))

    def save_own_variables(self, store: Any) -> None:
        """Saves the plain optimizer's variables."""
        self._coordd.warn_unsaved()
        super().save_own_variables(store)

    @classmethod
    def from_config(cls, config: Any, custom_objects: Any = None) -> Any:
        """Creates the plain optimizer; wrap it again."""
        return cls.__bases__[1].from_config(config, custom_objects)  # type: ignore[attr-defined]  # Keras's class

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Reduces the gradients, then updates the variables with them."""
        plan = self._coordd
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if not self.built:
            with keras.name_scope(self.name, caller=self):
                self.build(variables)
        if plan.passes == 1:
            super().apply(plan.reduce(grads, variables), variables)
        else:
            self._accumulate(list(grads), variables)

    def _accumulate(self, gradients: list[Any], variables: list[Any]) -> None:
        """Accumulates gradients; takes a step after `passes` passes.

        In eager mode, the step updates the variables that had a gradient in any pass since the last step. In a graph,
        which may be one of several, the step covers every variable that can have a gradient in any pass, and this set
        must be known when the first graph is traced.

        Raises:
            ArgumentError: a later graph has gradients for other variables, which the first graph cannot include.
        """
        plan, at_once = self._coordd, _at_once()
        by_place = {self._get_variable_index(variable): variable for variable in variables}
        pairs = [pair for pair in zip(gradients, by_place, strict=True) if pair[0] is not None]
        given = {place for _, place in pairs}
        if plan.traced and not (given <= plan.given <= by_place.keys()):
            names = ", ".join(self._trainable_variables[place].path for place in sorted(given ^ plan.given))
            text = (
                "with backward_passes_per_step, all graphs have gradients for the same variables, and only some "
                f"have them for {names}: make one tf.function for all passes, or use run_eagerly=True"
            )
            raise ArgumentError(text)
        plan.traced = plan.traced or not at_once
        plan.given |= given
        plan.passed = plan.passed | by_place if at_once else by_place
        for gradient, place in pairs:
            plan.sums[place].assign_add(keras.ops.convert_to_tensor(gradient))
        plan.count.assign_add(1)
        if not at_once:
            keras.ops.cond(keras.ops.equal(plan.count % plan.passes, 0), self._step, lambda: None)
        elif int(plan.count) % plan.passes == 0:  # `cond` would change the class of errors raised inside
            self._step()

    def _step(self) -> None:
        """Takes a step with the accumulated gradients."""
        plan = self._coordd
        factor = 1.0 / plan.passes if plan.average else 1.0
        places = sorted(plan.passed)
        variables = [plan.passed[place] for place in places]
        found = [plan.sums[place].value * factor if place in plan.given else None for place in places]
        sums = [plan.sums[place] for place in sorted(plan.given)]
        if _at_once():
            plan.passed, plan.given = {}, set()
        try:
            super().apply(plan.reduce(found, variables), variables)
        finally:
            for each in sums:
                each.assign(keras.ops.zeros_like(each))


def _at_once() -> bool:
    """Returns whether operations run eagerly, not in a graph."""
    if keras.backend.backend() != "tensorflow":
        return True
    import tensorflow as tf

    return bool(tf.executing_eagerly())


def _prepare(optimizer: Any, variables: list[Any]) -> None:
    """Prepares an optimizer that has been built."""
    plan: _Plan = optimizer._coordd  # noqa: SLF001 - set by `distribute`
    if plan.way is not None:
        plan.way.release(variables)
    if plan.passes > 1:
        # These are not variables of the optimizer, because the plain optimizer is saved.
        plan.sums = [
            keras.Variable(keras.ops.zeros(variable.shape, variable.dtype), trainable=False, name="coordd_sum")
            for variable in variables
        ]
        plan.count = keras.Variable(0, trainable=False, dtype="int64", name="coordd_passes")
    elif plan.way is not None:
        plan.way.watch(plan.common(variables), optimizer)


@collective("DistributedOptimizer", namespace=True)
def DistributedOptimizer(  # noqa: N802 - Horovod's name and signature
    _call: CollectiveCall,
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes a Keras optimizer average its gradients over the ranks; pass it to ``model.compile`` as usual.

    Args:
        optimizer: any optimizer of Keras 3.
        name: a new name for the optimizer.
        device_dense: ignored.
        device_sparse: ignored.
        compression: of gradients: one of `Compression`, or a class with Horovod's functions.
        sparse_as_dense: converts sparse gradients to dense ones and reduces these.
        gradient_predivide_factor: splits the averaging: gradients are divided by it before the reduction and multiplied
            by it after.
        op: `Average`, `AveragePresent` or `Sum`.
        backward_passes_per_step: number of batches whose gradients are accumulated locally before each reduction and
            step.
        average_aggregated_gradients: divides the accumulated gradients by this number.
        num_groups: reduces gradients in this many buckets of nearly equal size instead of the default ones.
        groups: lists of variables whose gradients are reduced together; other gradients use the default buckets.
        process_set: the ranks that take part.
        scale_local_gradients: whether gradients of local layers are divided by the number of ranks.

    Raises:
        ArgumentError: `optimizer` is not a Keras optimizer or is distributed already, settings do not fit together, or
            Keras runs on neither TensorFlow nor PyTorch.
        MismatchError: raised on all ranks if their settings differ; lists the differences.
        RefusedError: another rank raised an error in this call.
        NotInitializedError: `init` was not called.
    """
    return distribute(
        _call,
        optimizer,
        name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        predivide=gradient_predivide_factor,
        op=op,
        passes=backward_passes_per_step,
        average=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def distribute(
    call: CollectiveCall,
    optimizer: keras.optimizers.Optimizer,
    name: str | None = None,
    *,
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    predivide: float = 1.0,
    op: ReduceOp = ReduceOp.AVERAGE,
    passes: int = 1,
    average: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Does the work of `DistributedOptimizer`, inside a collective call of all ranks of the process set."""
    operations = api.operations()
    check_process_set(process_set, operations.daemon.world.size)
    check_backend()
    _check(optimizer, passes)
    choices = Choices(
        op=check_op(op),
        process_set=process_set,
        predivide=float(predivide),
        compression=compressor(compression),
        sparse_as_dense=sparse_as_dense,
        grouping=_grouping(num_groups, groups),
    )
    kind = compression if isinstance(compression, type) else type(compression)
    way = compression if isinstance(compression, str) else kind.__name__
    call.lines += [f"op={choices.op.name.capitalize()}", f"compression={way}", f"backward_passes_per_step={passes}"]
    call.lines += [f"average_aggregated_gradients={average}", f"gradient_predivide_factor={choices.predivide}"]
    call.lines += [f"sparse_as_dense={sparse_as_dense}", f"optimizer {type(optimizer).__name__}", call.prefix]
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_Distributed, kind), {"__module__": kind.__module__})
    optimizer._coordd = _Plan(  # noqa: SLF001 - set here
        reduction(choices, call.prefix) if choices.exchanges(operations.daemon.world) else None,
        Hyperparameters(optimizer),
        passes=passes,
        average=average,
        scale=process_set.count(api.size()) if scale_local_gradients else 1,
        unsaved=_unsaved(choices.op, passes, average=average),
    )
    if name is not None:
        optimizer.name = name
    if optimizer.built:
        _prepare(optimizer, list(optimizer._trainable_variables))  # noqa: SLF001 - Keras has no public way
    return optimizer


def _unsaved(op: ReduceOp, passes: int, *, average: bool) -> list[str]:
    """Returns the settings that are not default values, and without which a model would train on differently."""
    found = [] if op is ReduceOp.AVERAGE else [f"op={''.join(map(str.capitalize, op.name.split('_')))}"]
    found += [f"backward_passes_per_step={passes}"] * (passes > 1)
    return found + ["average_aggregated_gradients=True"] * average


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: keras.optimizers.Optimizer, *args: Any, local_layers: Any = None, **details: Any
) -> Any:
    """Makes an optimizer average all gradients except those of local layers, whose weights differ between ranks.

    Args:
        optimizer: as for `DistributedOptimizer`; not yet used.
        args: further positional arguments of `DistributedOptimizer`.
        local_layers: a built layer, or several.
        details: further keyword arguments of `DistributedOptimizer`.

    Raises:
        ArgumentError, MismatchError, RefusedError: as for `DistributedOptimizer`; also for wrong or different layers.
    """
    with CollectiveCall("PartialDistributedOptimizer", details.get("process_set", global_process_set)) as call:
        weights = _weights_of(local_layers)
        call.lines += sorted(f"the local {weight.path} {tuple(weight.shape)}" for weight in weights)
    found = DistributedOptimizer(optimizer, *args, **details)
    found._coordd.local.update({id(weight): weight for weight in weights})  # noqa: SLF001 - set by `distribute`
    return found


def _weights_of(layers: Any) -> list[Any]:
    """Returns the trainable weights of zero or more layers."""
    several = [] if layers is None else [layers] if isinstance(layers, keras.Layer) else layers
    if not isinstance(several, (list, tuple, set)) or not all(isinstance(layer, keras.Layer) for layer in several):
        text = f"local_layers is a layer of Keras, or a list of layers, not {layers!r}"
        raise ArgumentError(text)
    if unbuilt := [layer.name for layer in several if not layer.built]:
        text = f"local layers must have been built, so that their weights are known: {', '.join(unbuilt)}"
        raise ArgumentError(text)
    return [weight for layer in several for weight in layer.trainable_weights]


def is_distributed(optimizer: Any) -> bool:
    """Returns whether `DistributedOptimizer` wrapped this optimizer."""
    return isinstance(optimizer, _Distributed)


def _check(optimizer: Any, passes: int) -> None:
    """Raises if this is not an optimizer, is wrapped already, or would never take a step."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        text = f"DistributedOptimizer wants an optimizer of Keras, such as keras.optimizers.Adam(), not {optimizer!r}"
        raise ArgumentError(text)
    if is_distributed(optimizer):
        text = "this optimizer is a DistributedOptimizer already: wrap it once"
        raise ArgumentError(text)
    if whole(passes, "backward_passes_per_step") < 1:
        text = f"backward_passes_per_step must be > 0, not {passes}"
        raise ArgumentError(text)


def _grouping(num_groups: int, groups: Any) -> Grouping:
    """Converts groups of Keras variables to the backend's variables."""
    if api.is_initialized() and api.operations().as_horovod:
        num_groups, groups = read_groups(num_groups, groups)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        from coordd_tensorflow.exchange import plain

        return Grouping(num_groups, plain(groups), kind=tf.Variable)
    return Grouping(num_groups, groups, kind=keras.Variable)
