"""One stage of a Keras model on this rank, as the engine runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import numpy as np

from coordd.pipeline.batch import Batch
from coordd.pipeline.frame import pack, unpack
from coordd.pipeline.stage import BaseStage
from coordd.pipeline.versions import Versions
from coordd_keras.pipeline.autodiff import Autodiff, Call, Result, floats
from coordd_keras.pipeline.graph import arrays_of, is_seed, place_of
from coordd_keras.pipeline.layout import Layout, Part
from coordd_keras.pipeline.loss_check import Added, Inputs, LayerLossCheck, LossCheck

__all__ = ["KerasStage", "Work"]


class Work(NamedTuple):
    """Purpose of a run.

    Attributes:
        batch: its data.
        training: whether to run backward.
        judged: whether to compute the loss and update metrics.
        scale: factor of the loss gradient.
    """

    batch: Batch
    training: bool
    judged: bool
    scale: float = 1.0


@dataclass
class _Passage:
    """State of a microbatch between forward and backward: its call and, without recompute, the recorded result."""

    call: Call
    entering: dict[int, list[int]]
    found: Result | None = None
    kept: Any = None
    state: Mapping[int, Any] = field(default_factory=dict)
    seed: int | None = None


class KerasStage(BaseStage):
    """Implements `coordd.pipeline.engine.Stage`.

    Keras computes the gradients of inputs and weights together, so where a schedule splits the backward pass, its first
    half does all the work.

    Attributes:
        part: the stage's layers, as a model.
        loss: sum of the weighted losses of this run's microbatches; None if the stage has no loss.
        outputs: of the last stage, by microbatch, in runs without a loss.
    """

    def __init__(
        self,
        number: int,
        layout: Layout,
        part: Part,
        *,
        autodiff: Autodiff,
        add: Callable[[Any, Any], None],
        reduce: Callable[[], None],
        step: Callable[[], None],
        versions: int = 1,
        recompute: bool = False,
        compress: str | None = None,
        seed: int | None = None,
        weighted: bool = False,
        declared: bool = False,
    ) -> None:
        """Creates the stage.

        Args:
            number: of the stage.
            layout: of all stages.
            part: the stage's layers, compiled.
            autodiff: runs forward and backward.
            add: called with each variable and its gradient.
            reduce: starts to reduce gradients over the ranks that share them.
            step: waits for the reduction and updates the weights.
            versions: number of weight versions kept.
            recompute: whether backward recomputes activations.
            compress: format in which activations and gradients are sent, ``"bf16"`` or ``"int8"``; None for no
                compression.
            seed: makes dropout depend only on step, stage and microbatch.
            weighted: whether the user gives weights of microbatches.
            declared: whether the user declares the loss to be a mean.
        """
        super().__init__(reduce=reduce, versions=Versions(autodiff.weights, versions) if versions > 1 else None)
        self.part, self._reads, self._writes = part
        self._number = number
        self._layout = layout
        self._last = number == layout.last
        self._variables = list(self.part.trainable_variables)
        self._autodiff = autodiff
        self._prepared = False
        self._add = add
        self._step = step
        self._recompute = recompute
        self._compress = compress
        self._seed = seed
        self._seeds = {layout.graph.key(variable): variable for variable in self._state() if is_seed(variable)}
        self._random = np.random.default_rng()
        self._steps = 0
        self._check = None
        if self._last and self.part.loss is not None:
            self._check = LossCheck(self._judged, weighted=weighted, declared=declared)
        layers = self.part._flatten_layers()  # noqa: SLF001 - the public attribute has no layers of models inside
        half = any(layer.compute_dtype in {"bfloat16", "float16"} for layer in layers)
        self._layer_checks = {
            training: LayerLossCheck(self._added, training=training, half=half, declared=declared)
            for training in (True, False)
        }
        self._work: Work | None = None
        self._passages: dict[int, _Passage] = {}
        self.loss: float | None = None
        self.outputs: dict[int, Any] = {}

    def begin(self, work: Work) -> None:
        """Prepares a run."""
        self._work = work
        self.loss = None
        self.outputs = {}
        self._passages.clear()
        if work.judged:
            self._layer_checks[work.training].begin(work.batch)
        if work.training and work.judged and self._check is not None:
            self._check.begin(work.batch)
        self.restart()

    def forward(self, microbatch: int, given: Mapping[int, np.ndarray]) -> None:
        """Runs a microbatch forward; the last stage computes its loss."""
        work = self._work
        assert work is not None  # noqa: S101 - set by `begin`
        passage = self._entered(microbatch, given, work)
        if work.judged and not self._prepared:
            self._prepared = True
            state = self._saved()
            self._autodiff.prepare(passage.call)
            self._reset(state)
        means = self._means() if work.judged else []
        found = self._computed(microbatch, passage)
        if found.loss is not None:
            if self._check is not None and work.training:
                self._check.look(microbatch, found.outputs, found.masks, work.batch)
            if found.own is not None:
                self._layer_checks[work.training].look(passage.call.values, passage.call.masks)
            loss = float(keras.ops.convert_to_numpy(found.loss))
            share = work.batch.share(microbatch)
            self.loss = (self.loss or 0.0) + loss * share
            if found.own is not None and (rest := work.batch.share_by_rows(microbatch) - share):
                self.loss += float(keras.ops.convert_to_numpy(found.own)) * rest
            _reweight(means, work.batch.counted(microbatch))
        if not self._last:
            self._send(microbatch, found)
        elif not work.judged:
            self.outputs[microbatch] = arrays_of(found.outputs)

    def backward(self, microbatch: int, given: Mapping[int, np.ndarray]) -> None:
        """Runs a microbatch backward."""
        work, passage = self._work, self._passages.pop(microbatch)
        assert work is not None  # noqa: S101 - set by `begin`
        if passage.found is None:
            self._replay(passage)
        found = passage.found
        assert found is not None  # noqa: S101 - recorded, or recomputed
        places = {number: place for place, number in enumerate(self._writes)}
        roots: list[tuple[Any, Any]] = []
        for taker in sorted(given, reverse=True):
            gradients, _ = unpack(given[taker], self._autodiff.codec)
            numbers = self._layout.given(self._number, taker)
            sent = [found.outputs[places[number]] for number in numbers]
            roots += [pair for pair in zip(sent, gradients, strict=True) if pair[1] is not None]
        if found.loss is not None:
            weight = work.batch.weight(microbatch)
            roots.append((found.loss, weight * work.scale))
            if found.own is not None and (rest := work.batch.by_rows(microbatch) - weight):
                roots.append((found.own, rest * work.scale))
        entered, own = self._autodiff.back(passage.kept, roots)
        for variable, gradient in zip(self._variables, own, strict=True):
            if gradient is not None:
                self._add(variable, gradient)
        inwards = dict(zip(self._entering(passage), entered, strict=True))
        for giver, places_of in passage.entering.items():
            self.frames[microbatch, giver] = self._packed([inwards.get(place) for place in places_of])

    def backward_input(self, microbatch: int, given: Mapping[int, np.ndarray]) -> None:
        """Runs the whole backward pass."""
        self.backward(microbatch, given)

    def backward_weight(self, microbatch: int) -> None:
        """Does nothing, because `backward_input` already computed the weight gradients."""

    def step(self) -> None:
        """Updates the weights, together with those of this rank's other stages."""
        self.advance()
        self._steps += 1
        with self._autodiff.stepping():
            self._step()

    def _entered(self, microbatch: int, given: Mapping[int, np.ndarray], work: Work) -> _Passage:
        """Collects the arguments of the layers' call."""
        values: dict[int, Any] = {}
        masks: dict[int, Any] = {}
        entering: dict[int, list[int]] = {}
        inputs = work.batch.inputs(microbatch)
        for number in self._layout.inputs(self._number):
            values[number] = inputs[str(number)]
        for giver, frame in given.items():
            numbers = self._layout.given(giver, self._number)
            tensors, others = unpack(frame, self._autodiff.codec)[0]
            values |= zip(numbers, tensors, strict=True)
            masks |= zip(numbers, others, strict=True)
            entering[giver] = [self._reads.index(number) for number in numbers]
        call = Call(
            [values[number] for number in self._reads],
            [masks.get(number) for number in self._reads],
            work.batch.targets(microbatch) if self._last and work.judged else None,
            training=work.training,
            judged=work.judged,
            measured=work.judged,
            counts=not work.judged or work.batch.weight(microbatch) > 0,
        )
        return _Passage(call, entering)

    def _computed(self, microbatch: int, passage: _Passage) -> Result:
        """Runs a microbatch forward and saves what backward needs."""
        if not passage.call.training:
            return self._autodiff.run(passage.call)
        self._passages[microbatch] = passage
        self._sow(microbatch, passage)
        with self._autodiff.seeded(passage.seed):
            if self._recompute:
                passage.state = self._saved()
                return self._autodiff.run(passage.call)
            found, passage.kept = self._autodiff.record(passage.call, self._entering(passage))
        passage.found = found
        return found

    def _entering(self, passage: _Passage) -> list[int]:
        """Returns the indices of the values that need gradients."""
        found = sorted(place for places in passage.entering.values() for place in places)
        return [place for place in found if floats(passage.call.values[place])]

    def _replay(self, passage: _Passage) -> None:
        """Recomputes a forward pass with the same dropout, without updating statistics again."""
        now = self._saved()
        self._reset(passage.state)
        call = passage.call._replace(measured=False)
        with self._autodiff.seeded(passage.seed):
            passage.found, passage.kept = self._autodiff.record(call, self._entering(passage))
        self._reset(now)

    def _judged(self, outputs: Sequence[Any], masks: Sequence[Any], targets: Any) -> float:
        """Computes the loss of outputs without updating metrics."""
        state = self._saved()
        given = [keras.ops.convert_to_tensor(output) for output in outputs]
        for output, mask in zip(given, masks, strict=True):
            if mask is not None:
                output._keras_mask = keras.ops.convert_to_tensor(mask)  # noqa: SLF001 - where Keras keeps it
        try:
            found = keras.tree.pack_sequence_as(self.part.output, given)
            # Without the losses of layers, which on TensorFlow are tensors of another graph.
            loss = self.part._compile_loss(targets, found)  # noqa: SLF001 - Keras has no public way
        finally:
            self._reset(state)
        return 0.0 if loss is None else float(keras.ops.convert_to_numpy(loss))

    def _added(self, samples: Sequence[Inputs], training: bool) -> Added:
        """Computes the losses that layers add for some inputs, without updating statistics and metrics.

        Regularizers of weights are left out. Each call finds the same statistics, but draws other random numbers.
        """
        state = self._saved()
        seeds = set(map(id, self._seeds.values()))
        statistics = {key: value for key, value in state.items() if key not in seeds}
        losses, changed = [], False
        try:
            for values, masks in samples:
                given = {"mask": list(masks)} if any(mask is not None for mask in masks) else {}
                self.part(list(values), training=training, **given)
                found = [(layer.name, loss) for layer in self.part.layers for loss in _losses_of_rows(layer)]
                losses.append([(name, float(keras.ops.convert_to_numpy(loss))) for name, loss in found])
                changed |= self._reset(statistics)
        finally:
            self._reset(state)
        return Added(losses, changed)

    def _means(self) -> list[tuple[Any, list[np.ndarray]]]:
        """Returns Keras's means of the losses of several outputs, each with its present total and count."""
        judge = self.part._compile_loss  # noqa: SLF001 - Keras has no public way to tell them from other metrics
        return [] if judge is None else [(mean, arrays_of([mean.total, mean.count])) for mean in judge.metrics]

    def _state(self) -> list[Any]:
        """Returns the variables that a forward pass may change, metrics' included, of which Keras makes some later."""
        heard = [variable for metric in self.part.metrics for variable in metric.variables]
        return [*self.part.non_trainable_variables, *heard]

    def _saved(self) -> dict[int, Any]:
        """Returns the values of these variables by the ids of the variables."""
        variables = self._state()
        return dict(zip(map(id, variables), arrays_of(variables), strict=True))

    def _reset(self, state: Mapping[int, Any]) -> bool:
        """Restores values of `_saved`; metrics that did not exist then are reset.

        Only what has changed is assigned: PyTorch refuses to run backward if a variable that it needs was assigned to.

        Returns:
            Whether a value had changed.
        """
        for metric in self.part.metrics:
            if not state.keys() >= set(map(id, metric.variables)):
                metric.reset_state()
        variables = self._state()
        changed = False
        for variable, now in zip(variables, arrays_of(variables), strict=True):
            if (before := state.get(id(variable))) is not None and before.tobytes() != now.tobytes():
                variable.assign(before)
                changed = True
        return changed

    def _sow(self, microbatch: int, passage: _Passage) -> None:
        """Seeds the random numbers of a microbatch from the user's seed; with recompute, seeds them in any case."""
        if self._seed is not None:
            for key, variable in self._seeds.items():
                variable.assign(_drawn(self._seed, self._steps, place_of(key), microbatch))
            passage.seed = int(_drawn(self._seed, self._steps, self._number, microbatch)[0])
        elif self._recompute:
            passage.seed = int(self._random.integers(2**32))

    def _send(self, microbatch: int, found: Result) -> None:
        places = {number: place for place, number in enumerate(self._writes)}
        for giver, taker in self._layout.flows:
            if giver == self._number:
                mine = [places[number] for number in self._layout.given(giver, taker)]
                value = ([found.outputs[place] for place in mine], [found.masks[place] for place in mine])
                self.frames[microbatch, taker] = self._packed(value)

    def _packed(self, value: Any) -> np.ndarray:
        return pack(value, self._autodiff.codec, compress=lambda tensor: self._compress if floats(tensor) else None)[0]


def _reweight(means: Sequence[tuple[Any, list[np.ndarray]]], rows: float) -> None:
    """Changes the weight of what was added to Keras's means since their totals and counts were read.

    Args:
        means: each with its total and count at that time.
        rows: the number of rows that it counts for.
    """
    for mean, (total, count) in means:
        new_total, new_count = arrays_of([mean.total, mean.count])
        grown = float(new_count - count)
        if grown != rows:
            mean.total.assign(total + (new_total - total) * (rows / grown if grown else 0.0))
            mean.count.assign(count + rows)


def _losses_of_rows(layer: keras.layers.Layer) -> list[Any]:
    """Returns the losses of a layer but for those of its weights' regularizers, which Keras appends."""
    losses: list[Any] = layer.losses
    regularizers = sum(variable.regularizer is not None for variable in layer.trainable_weights)
    return losses[: len(losses) - regularizers]


def _drawn(*source: int) -> np.ndarray:
    return np.random.SeedSequence(source).generate_state(2)
