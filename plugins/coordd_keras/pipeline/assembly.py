"""A Keras model split into stages: this rank's stages and everything that runs them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import keras
import numpy as np
from keras.src.backend.common import global_state  # Keras has no public API for this

from coordd.daemon.operations import Operations
from coordd.errors import ArgumentError
from coordd.gradients.value_check import Trained
from coordd.ops.dtypes import digits_of, dtype_of
from coordd.ops.messages import ReduceOp
from coordd.parallel.objects import allgather_object
from coordd.pipeline.batch import Weigh
from coordd.pipeline.batch_check import ALIKE, Accord, settings
from coordd.pipeline.config import PipelineConfig
from coordd.pipeline.engine import Engine
from coordd.pipeline.microbatch import cut
from coordd.pipeline.plans import Plans
from coordd.pipeline.profile import Profile
from coordd.pipeline.record import Run, latest
from coordd.pipeline.replica_values import ReplicaValues
from coordd_keras.pipeline.autodiff import Autodiff, Computation, autodiff, floats
from coordd_keras.pipeline.description import described, initial_values
from coordd_keras.pipeline.graph import Graph, arrays_of, is_seed, place_of
from coordd_keras.pipeline.layout import Layout, Part
from coordd_keras.pipeline.profiling import measured
from coordd_keras.pipeline.rows import rows_of, taken
from coordd_keras.pipeline.settling import Settling
from coordd_keras.pipeline.sharing import Sharing
from coordd_keras.pipeline.stage import KerasStage, Work

__all__ = ["Assembly", "Model"]

log = logging.getLogger("coordd")

Model: TypeAlias = "keras.Model | Callable[[], keras.Model]"

_TOGETHER: Mapping[str, Callable[[Sequence[np.ndarray]], Any]] = {
    "none": sum,
    "sum": sum,
    "mean": lambda values: np.mean(values, axis=0),
    "only_first_replica": lambda values: values[0],
}
"""Merges the values of a metric variable over replicas, by its `aggregation`, as Keras's distribution does."""


class Assembly:
    """A model split over the ranks.

    Attributes:
        layout: of all stages.
        stages: this rank's stages, by number.
        directions: by name of a metric of the outputs, ``max`` or ``min``; known once metrics have been returned.
        ran: the last training run, or the last run if there was no training yet.
    """

    def __init__(
        self,
        model: Model,
        x: Any,
        config: PipelineConfig,
        *,
        plans: Plans,
        optimizer: Any,
        compiled: Mapping[str, Any],
        weight: Weigh | None,
        accord: Accord,
        operations: Operations,
        name: str,
    ) -> None:
        """Splits the model and builds this rank's stages.

        Args:
            model: a built model, or one that can be built from an input shape; or a function that makes it.
            x: inputs of a batch: they give the input shape of a Sequential model, and layers are profiled with them.
            config: how the model is split and trained.
            plans: schedules of its runs.
            optimizer: of this rank's variables.
            compiled: loss and metrics, as `keras.Model.compile` takes them.
            weight: returns the weight of a microbatch; None for its number of rows.
            accord: compares the arguments of the ranks.
            operations: of the daemon.
            name: prefix of operation names; the same on all ranks and unique to this pipeline.

        Raises:
            ArgumentError: the model cannot be split like this, or the ranks have different models.
        """
        self._config = config
        self._optimizer: Any = optimizer
        self._weighted = weight is not None
        self._plans = plans
        self._operations = operations
        self._name = name
        self._rank = operations.daemon.world.rank
        sketch = plans.sketch
        self._model, self._shape = model, (None, *keras.tree.flatten(x)[0].shape[1:])
        outline, assigned = _outlined(model, self._shape)
        self._graph = Graph(outline)
        _check_precision(self._graph.model, optimizer)
        self.initial = initial_values(self._graph, assigned)
        """Initial values of the variables, compared between ranks."""
        alike = described(self._graph, optimizer, compiled=compiled, weight=weight)
        accord.check("Pipeline", settings(config) | alike, advice=ALIKE)
        profile = self._profile(x) if config.measured else None
        self.layout = Layout.of(self._graph, sketch.stages, config, profile)
        self._check()
        self._placed = sketch.placement
        held = {number: self.layout.variables(number) for number in sketch.held[self._rank]}
        for variable in (variable for mine in held.values() for variable in mine.values()):
            _initialize(variable, assigned)
        self._owners = {
            key: tuple(sorted({rank for stage in stages for rank in self._placed[stage]}))
            for key, stages in self.layout.holders.items()
        }
        self._held = {key: variable for mine in held.values() for key, variable in mine.items()}
        self._trainable = {key: bool(variable.trainable) for key, variable in self._held.items()}
        sharing = Sharing(held, self._owners, operations, name=name)
        sharing.align()
        self.replica_values = ReplicaValues(
            operations,
            self._shared,
            framework=keras.backend.backend(),
            name=f"{name}.replicas",
            remedy="Pipeline(whole(), ...) again, which copies the values of the first rank",
        )
        parts = {number: self.layout.parts[number] for number in held}
        for number, part in parts.items():
            judging = compiled if number == self.layout.last else {}
            part.model.compile(optimizer, run_eagerly=True, jit_compile=False, auto_scale_loss=False, **judging)
        computed = {
            number: autodiff(Computation(part.model, last=number == self.layout.last), part.model.trainable_variables)
            for number, part in parts.items()
        }
        self._scale = float(optimizer.loss_scale_factor or 1.0)
        self._settling = Settling(
            held,
            sharing,
            optimizer,
            statistics={key: self._held[key] for key in self._averaged(held)},
            autodiff=next(iter(computed.values())),
            counted=frozenset(key for key in self._held if self._owners[key][0] == self._rank),
            clip_norm=math.inf if config.clip_norm is None else config.clip_norm * self._scale,
            operations=operations,
            name=f"{name}.norm",
        )
        self.stages = {number: self._stage(number, part, computed[number]) for number, part in parts.items()}
        self._engine = Engine(self.stages, operations, name=name, fail=operations.daemon.fail)
        self.directions: dict[str, str] = {}
        self.ran: Run | None = None

    def named(self, x: Any) -> dict[str, np.ndarray]:
        """Returns the model's inputs by tensor number.

        Raises:
            ArgumentError: the number of inputs is wrong.
        """
        graph = self._graph
        names = [tensor.name for tensor in graph.model.inputs]
        by_name = isinstance(x, dict) and set(x) >= set(names)
        given = [x[name] for name in names] if by_name else keras.tree.flatten(x)
        if len(given) != len(names):
            text = f"the model takes {len(names)} inputs ({', '.join(names)}), and is given {len(given)}"
            raise ArgumentError(text)
        return {str(number): array for number, array in zip(graph.inputs, given, strict=True)}

    def check_trainable(self) -> None:
        """Checks that no layer was frozen or thawed since the model was split.

        Raises:
            ArgumentError: a layer was; the text says what to do.
        """
        for key, before in self._trainable.items():
            variable = self._held[key]
            if bool(variable.trainable) != before:
                raise ArgumentError(
                    f"{variable.path} has trainable={not before}, and had {before} when the pipeline was made: make a "
                    "new Pipeline of whole() to train other weights"
                )

    def telling(self, *, known: Callable[[BaseException], bool] = lambda _: False) -> AbstractContextManager[None]:
        """Reports an error inside the block to all ranks, which may wait to receive, unless ``known`` accepts it."""
        return self._engine.telling("before or after the passes of the pipeline", self._rank, known=known)

    def run(self, work: Work, microbatches: int) -> None:
        """Executes a run.

        Args:
            work: the batch, and what to do with it.
            microbatches: number for each replica of the widest stage.
        """
        plan = self._plans.lowered(microbatches, self.layout.flows, self.layout.tied, training=work.training)
        work = work._replace(scale=self._scale)
        for stage in self.stages.values():
            stage.begin(work)
        spans = self._engine.run(plan, self._rank)
        self.ran = latest(self.ran, Run(plan, spans, self._engine.since, work.training))

    def loss(self, *, needed: bool) -> float:
        """Returns the loss of the last run, on every rank.

        Args:
            needed: whether a missing loss is an error.

        Raises:
            ArgumentError: on all ranks, if no stage has a loss.
        """
        losses = [stage.loss for stage in self.stages.values() if stage.loss is not None]
        mine = np.array([sum(losses), len(losses)], np.float64)
        loss, count = self._operations.allreduce(mine, name=f"{self._name}.loss", op=ReduceOp.SUM).result()
        if needed and not count:
            raise ArgumentError("there is no loss: give loss= and targets, or let a layer call add_loss")
        return float(loss)

    def outputs(self) -> list[list[np.ndarray]]:
        """Returns the outputs of the last run by microbatch, on every rank."""
        mine = {place: found for stage in self.stages.values() for place, found in stage.outputs.items()}
        found: dict[int, list[np.ndarray]] = {}
        for each in allgather_object(mine, name=f"{self._name}.outputs"):
            found |= each
        return [found[place] for place in sorted(found)]

    def metrics(self) -> dict[str, Any]:
        """Returns the metrics since `reset`, merged over all replicas, in Keras's order, on every rank; resets them.

        Raises:
            ArgumentError: on all ranks, if a metric has no result.
        """
        mine = {
            number: [arrays_of(metric.variables) for metric in _metrics(stage.part)]
            for number, stage in self.stages.items()
        }
        heard = allgather_object(mine, name=f"{self._name}.metrics")
        found: dict[str, Any] = {}
        names: dict[int, tuple[list[str], list[str]]] = {}
        directions: dict[str, str] = {}
        wrong = ""
        try:
            for number, stage in self.stages.items():
                if self._rank == self._placed[number][0]:
                    found |= _results(stage.part, [heard[rank][number] for rank in self._placed[number]])
                    names[number] = _names(stage.part)
                    directions |= _directions(stage.part)
        except Exception as error:  # noqa: BLE001 - a metric may raise any error, and the other ranks wait
            wrong = f"a metric has no result: {error!r}"
        everybodys = allgather_object((found, names, directions, wrong), name=f"{self._name}.results")
        self.reset()
        for results, others, theirs, wrong in everybodys:
            if wrong:
                raise ArgumentError(wrong)
            found |= results
            names |= others
            self.directions |= theirs
        # Keras's order: metrics of the output, losses, metrics of layers; then, sorted, what has the name of no metric.
        every = [names[number] for number in sorted(names)]
        known = [name for kind in zip(*every, strict=True) for each in kind for name in each]
        return {name: found[name] for name in [*known, *sorted(found)] if name in found}

    @contextmanager
    def separate_metrics(self) -> Iterator[None]:
        """Resets all metrics, and restores them after the block, such as an `evaluate` in a callback of a `fit`."""
        kept = [
            (metric, arrays_of(metric.variables)) for stage in self.stages.values() for metric in stage.part.metrics
        ]
        self.reset()
        try:
            yield
        finally:
            self.reset()
            for metric, arrays in kept:
                for variable, array in zip(metric.variables, arrays, strict=False):  # it may have been built since
                    variable.assign(array)

    def reset(self) -> None:
        """Resets all metrics."""
        for stage in self.stages.values():
            stage.part.reset_metrics()

    def finalize(self) -> None:
        """Finalizes the optimizer at the end of training, for example by replacing weights with their averages."""
        self._settling.finalize()

    def whole(self) -> keras.Model:
        """Returns the whole model with the weights of all ranks, on every rank: the user's own, or a new one."""
        mine = {key: each for key, each in self._held.items() if self._owners[key][0] == self._rank}
        values: dict[str, np.ndarray] = {}
        own = dict(zip(mine, arrays_of(mine.values()), strict=True))
        for part in allgather_object(own, name=f"{self._name}.whole"):
            values |= part
        whole = self._model if isinstance(self._model, keras.Model) else _built(self._model(), self._shape)
        variables, before = whole.variables, len(self._graph.model.variables)
        if len(variables) != before:
            raise ArgumentError(
                f"the model has {len(variables)} variables, and had {before} when it was split: change no layers of a "
                "model in a pipeline"
            )
        for key, value in values.items():
            variables[place_of(key)].assign(value)
        self._detach_optimizer(whole)
        return whole

    def _detach_optimizer(self, whole: keras.Model) -> None:
        """Gives the whole model a new optimizer if it has this one, with the state of this rank's variables only."""
        optimizer, size = self._optimizer, self._operations.daemon.world.size
        has_it = getattr(whole, "optimizer", None) is optimizer
        if has_it and any(len(ranks) < size for ranks in self._owners.values()):
            try:
                whole.optimizer = type(optimizer).from_config(optimizer.get_config())
            except Exception:  # noqa: BLE001 - configurations of users' classes and functions may raise any error
                whole.optimizer = None
            whole.train_function = None  # the backend's, which contains the optimizer
            log.warning(
                "the whole model of a pipeline has %s optimizer, for each rank has a part of the state of the one that "
                "it was compiled with",
                "no" if whole.optimizer is None else "a new",
            )

    def _shared(self) -> Iterable[tuple[Sequence[int], Trained]]:
        """Yields the trained variables that other ranks have, too, with these ranks; in the order of the model."""
        for key, variable in sorted(self._held.items(), key=lambda item: place_of(item[0])):
            if len(self._owners[key]) > 1 and variable.trainable and floats(variable):
                yield self._owners[key], _trained(variable)

    def _averaged(self, stages: Iterable[int]) -> list[str]:
        """Returns the keys of layer state that replicas average."""
        states = (pair for number in stages for pair in self.layout.states(number).items())
        return [key for key, variable in states if math.prod(variable.shape) and floats(variable)]

    def _stage(self, number: int, part: Part, computed: Autodiff) -> KerasStage:
        config = self._config
        return KerasStage(
            number,
            self.layout,
            part,
            autodiff=computed,
            add=self._settling.add,
            reduce=lambda: self._settling.reduce(number),
            step=self._settling.step,
            versions={"pipedream": self._plans.sketch.stages - number, "2bw": 2}.get(config.schedule, 1),
            recompute=config.recompute,
            compress=config.compression,
            seed=config.seed,
            weighted=self._weighted,
            declared=config.loss_reduction == "mean",
        )

    def _profile(self, x: Any) -> Profile:
        """Profiles the layers with the first microbatch of a batch.

        Raises:
            ArgumentError: the layers cannot be profiled.
        """
        if not isinstance(self._model, keras.Model):
            raise ArgumentError(
                "split='time' measures the layers, which takes a model, and not a function that makes one: give that, "
                "or split by 'parameters'"
            )
        rows = rows_of(x)
        first = cut(rows, self._config.fitting(rows) * self._config.widest)[0]
        return measured(self._graph, taken(self.named(x), first), self._config, name=f"{self._name}.profile")

    def _check(self) -> None:
        """Rejects layers that several stages would evaluate independently.

        Raises:
            ArgumentError: several stages have the same metric, or the same variable with a regularizer or layer state.
        """
        hears: dict[int, int] = {}
        for stage, part in enumerate(self.layout.parts):
            for metric in part.model.metrics:
                if (first := hears.setdefault(id(metric), stage)) != stage:
                    raise ArgumentError(
                        f"the metric {metric.name!r} is in stages {first}, {stage}, each of which would hear of its "
                        "own half: let no cut separate the layers that have it"
                    )
        for key, stages in self.layout.holders.items():
            variable, told = self.layout.variables(stages[0])[key], ", ".join(map(str, stages))
            if len(stages) > 1 and getattr(variable, "regularizer", None) is not None:
                raise ArgumentError(
                    f"{variable.path} is in stages {told}, each of which would add its regulariser to the loss: let no "
                    "cut separate the layers that have it, or take the regulariser away"
                )
            if len(stages) > 1 and key in self.layout.states(stages[0]) and not is_seed(variable):
                raise ArgumentError(
                    f"{variable.path} is in stages {told}, each of which would keep statistics of its own: let no cut "
                    "separate the layers that have it"
                )


def _check_precision(model: keras.Model, optimizer: Any) -> None:
    """Rejects dtype policies for which Keras does more than compute gradients and add them up.

    Raises:
        ArgumentError: the policy needs a loss scale, or has scales that are not trained by gradients.
    """
    if model.dtype_policy.name == "mixed_float16" and not optimizer.loss_scale_factor:
        raise ArgumentError(
            "the policy mixed_float16 needs a scaled loss, and a pipeline does not adapt the scale as model.fit does: "
            "set loss_scale_factor of the optimizer, such as 1024, or use mixed_bfloat16, which needs none"
        )
    for variable in model.variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ArgumentError(
                f"{variable.path} is a scale of float8 that is overwritten by its gradient, and a pipeline would add "
                "up those of microbatches: train without quantize('float8')"
            )


def _trained(variable: Any) -> Trained:
    """Describes a variable for the comparison of its values between ranks."""
    dtype = dtype_of(variable.dtype)

    def read(places: np.ndarray) -> np.ndarray:
        found: np.ndarray = arrays_of([variable])[0].reshape(-1)[places].astype(np.float64)
        return found

    what = f"{tuple(variable.shape)} {variable.dtype}"
    return Trained(variable.path, what, math.prod(variable.shape), digits_of(dtype) ** 0.5, read)


def _outlined(model: Model, shape: tuple[int | None, ...]) -> tuple[keras.Model, dict[int, Any]]:
    """Returns the built model; a model that a function makes gets no memory for its weights.

    Returns:
        the model, and the values that the function assigned to its variables, such as loaded ones, by their ids.

    Raises:
        ArgumentError: the function makes no model, or variables that cannot be deferred.
    """
    if isinstance(model, keras.Model):
        return _built(model, shape), {}
    try:
        with keras.StatelessScope(initialize_variables=False) as scope:
            found = _built(model(), shape)
    except ValueError as error:
        if "create a variable while in a stateless scope" not in str(error):
            raise
        raise ArgumentError(
            "the function that makes the model also creates a variable without an initializer, such as those of an "
            "optimizer: compile nothing in it, and call load_model(..., compile=False)"
        ) from error
    values = ((variable, scope.get_current_value(variable)) for variable in found.variables)
    assigned = {id(variable): value for variable, value in values if value is not None}
    for variable in found.variables:
        if not floats(variable):  # PyTorch takes deferred ones for trainable
            _initialize(variable, assigned)
    # Keras keeps a list of these variables and would initialize them all at the next opportunity.
    own = set(map(id, found.variables))
    noted = global_state.get_global_attribute("uninitialized_variables") or []
    global_state.set_global_attribute("uninitialized_variables", [each for each in noted if id(each) not in own])
    return found, assigned


def _initialize(variable: Any, assigned: Mapping[int, Any]) -> None:
    """Initializes a variable that may be deferred, with the value that was assigned to it, if any."""
    if variable._value is None:  # noqa: SLF001 - no public way to initialize a deferred variable
        variable._deferred_initialize()  # noqa: SLF001 - as above
    if id(variable) in assigned:
        variable.assign(assigned[id(variable)])


def _built(model: Any, shape: tuple[int | None, ...]) -> keras.Model:
    if not isinstance(model, keras.Model):
        raise ArgumentError(f"a pipeline wants a Keras model, or a function that makes one, not {model!r}")
    if isinstance(model, keras.Sequential) and not model.built:
        model.build(shape)
    return model


def _results(part: keras.Model, heard: Sequence[Sequence[Sequence[np.ndarray]]]) -> dict[str, Any]:
    """Returns the results, numbers or arrays, of metrics whose variables are merged over replicas."""
    found: dict[str, Any] = {}
    for place, metric in enumerate(_metrics(part)):
        for at, variable in enumerate(metric.variables):
            variable.assign(_TOGETHER[variable.aggregation]([each[place][at] for each in heard]))
        for name, each in _flattened(metric.name, metric.result()):
            array = keras.ops.convert_to_numpy(each)
            found[name] = array if array.ndim else float(array)
    return found


def _flattened(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the values of a result, which may be dictionaries in a dictionary, by their own names, as Keras does."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _flattened(key, each)
    else:
        yield name, value


def _names(part: keras.Model) -> tuple[list[str], list[str]]:
    """Returns the names of the metrics of the model's outputs and losses, and those of the metrics of layers."""
    of_layers = {id(metric) for layer in part.layers for metric in layer.metrics}
    found: tuple[list[str], list[str]] = ([], [])
    for metric in _metrics(part):
        # Keras keeps the metrics of all outputs in one.
        found[id(metric) in of_layers].extend(each.name for each in getattr(metric, "metrics", [metric]))
    return found


def _directions(part: keras.Model) -> dict[str, str]:
    """Returns by name whether a metric of the outputs should be large or small, if Keras knows that."""
    compiled = [each for metric in _metrics(part) for each in getattr(metric, "metrics", [])]
    known = {each.name: getattr(each, "_direction", None) for each in compiled}
    return {name: "max" if known[name] == "up" else "min" for name in known if known[name] is not None}


def _metrics(part: keras.Model) -> list[Any]:
    return [metric for metric in part.metrics if metric.name != "loss"]
