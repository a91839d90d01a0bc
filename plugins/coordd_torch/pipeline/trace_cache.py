"""All traces of one model: each mode and each kind of inputs gets its own trace when it first appears."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from coordd.errors import ArgumentError
from coordd_torch.pipeline import export_capture, fx_capture
from coordd_torch.pipeline.batch_norms import tracking
from coordd_torch.pipeline.chain import INPUT, chain
from coordd_torch.pipeline.cut import VALUE
from coordd_torch.pipeline.failure import CaptureError, NoExampleError
from coordd_torch.pipeline.fake_execution import Trial, TrialError
from coordd_torch.pipeline.inputs import Call, only
from coordd_torch.pipeline.layers import Layering, units, units_between
from coordd_torch.pipeline.meta_copy import Stand, bare
from coordd_torch.pipeline.rng_and_autocast import uncast
from coordd_torch.pipeline.rng_state import untouched
from coordd_torch.pipeline.trace import Trace

__all__ = ["KEPT", "Traces"]

KEPT = 256
"""Maximum number of traces, and of kinds of inputs, that are kept."""

FX, EXPORT, SEQUENTIAL = "fx", "export", "sequential"


class Traces:
    """The traces of one model, and the code that makes new ones; holds no data of the model.

    Attributes:
        way: the capture method: ``sequential``, ``fx`` or ``export``.
        first: the trace that defines the layers.
        found: all traces.
        closed: why the model's lists of layers could not be opened, if only its direct children are layers.
    """

    def __init__(
        self, model: nn.Module, way: str, layering: Layering, first: Trace, norms: frozenset[str] = frozenset()
    ) -> None:
        self.way = way
        self.first = first
        self._layering = layering
        self._model = model
        self._norms = norms
        self.found: list[Trace] = []
        self._by_kind: dict[tuple[Any, ...], Trace] = {}  # in order of use, the latest last
        self._calls: dict[tuple[str, ...], Call] = {}
        self._made = 0
        self.closed: CaptureError | None = None
        self._add(first)

    @property
    def names(self) -> list[str]:
        """The names of the layers."""
        return self._layering.names

    @property
    def calls(self) -> Mapping[int, Sequence[str]]:
        """For each layer the modules that it calls."""
        return self._layering.calls

    @classmethod
    def of_chain(cls, model: nn.Module, parts: Sequence[str], *, cuts: Sequence[str] | None) -> Traces:
        """Creates the trace that calls the parts one after another, for any inputs.

        Raises:
            ArgumentError: no part begins at one of the `cuts`.
        """
        plain = bare(model)
        return cls(plain, SEQUENTIAL, Layering(frozenset(parts), cuts), chain(plain, parts))

    @classmethod
    def of_model(
        cls, model: nn.Module, call: Call, *, example: bool, depth: int, cuts: Sequence[str] | None = None
    ) -> Traces:
        """Traces any model; as the last resort with its direct children as layers, regardless of their contents.

        Raises:
            ArgumentError: no stage can begin at one of the `cuts`.
            CaptureError: neither torch.fx nor torch.export can trace it.
        """
        plain = bare(model)
        if not plain.training:  # training mode defines the layers, as only there gradients matter
            plain.train()
        norms = tracking(plain)
        errors: list[tuple[str, Exception]] = []
        if cuts is not None:
            tried = [(way, units_between(model, cuts)) for way in (FX, EXPORT)]
        else:
            tried = [(way, units(model, opened)) for way, opened in ((FX, depth), (EXPORT, depth), (FX, 0))]
        for way, known in tried:
            try:
                first = _traced(way, plain, known, norms, call, example=example)
            except Exception as error:  # noqa: BLE001 - user code, fx and export raise any exception
                errors.append((way, error))
            else:
                traces = cls(plain, way, Layering(known, cuts), first, norms)
                traces.learn(call)
                if len(errors) == len((FX, EXPORT)):
                    traces.closed = CaptureError.composed(model, errors, cuts=cuts)
                return traces
        raise CaptureError.composed(model, errors, cuts=cuts) from errors[-1][1]

    def call(self, batch: Any) -> dict[str, Any]:
        """Returns a batch as the values that stages take, and records how such a batch is passed to the model.

        Raises:
            ArgumentError: the model does not take it.
        """
        if self.way == SEQUENTIAL:
            return {INPUT: only(self._model, batch)}
        call = Call.bound(self._model, batch)
        self.learn(call)
        return call.values

    def find(self, values: Mapping[str, Any], *, training: bool) -> Trace:
        """Returns the trace for these inputs, and makes it if there is none yet.

        Raises:
            ArgumentError: `call` was never called with a batch of this kind.
            CaptureError: the model cannot be traced with them.
        """
        if self.way == SEQUENTIAL:
            return self.first
        names = tuple(name for name in values if not name.startswith(VALUE))
        if names not in self._calls:
            raise ArgumentError(f"the inputs {', '.join(names)} are not those of a batch that was given to `inputs`")
        leaves = tuple(values[name] for name in names)
        key = (training, names, tuple(map(_kind, leaves)))
        found = self._by_kind.pop(key, None)
        if found is None:
            call = replace(self._calls[names], leaves=leaves)
            fitting = (trace for trace in self.found if trace.holds(names, values, training=training))
            found = next((trace for trace in fitting if self._stands(trace, call)), None)
            found = found or self._traced_again(call, training)
        self._by_kind[key] = found
        if len(self._by_kind) > KEPT:
            del self._by_kind[next(iter(self._by_kind))]
        return found

    def imagined(self, batch: Any, rows: int, run: Callable[[nn.Module, Any], Any]) -> Any:
        """Returns the model's output in evaluation mode for such a batch with `rows` rows: shapes and dtypes, no data.

        Args:
            batch: as it is given to the model.
            rows: of all its tensors.
            run: calls a model with a batch.
        """
        modes = [module.training for module in self._model.modules()]
        self._model.eval()
        try:
            leaves, structure = pytree.tree_flatten(batch)
            stand = Stand(self._model, tuple(_with_rows(leaf, rows) for leaf in leaves))
        finally:
            for module, mode in zip(self._model.modules(), modes, strict=True):
                module.training = mode
        with untouched(), stand.mode, torch.no_grad(), uncast(torch.device("cuda")):
            return run(stand.model, pytree.tree_unflatten(list(stand.leaves), structure))

    def learn(self, call: Call) -> None:
        """Records how such a batch is passed to the model."""
        self._calls.setdefault(call.names, call.without_leaves())

    def _stands(self, trace: Trace, call: Call) -> bool:
        """Returns whether a trace that was made without an example matches the model for these types of inputs.

        Raises:
            ArgumentError: it does, but a cut separates nodes that these inputs need together.
        """
        types = (call.names, *map(type, call.leaves))
        if trace.tried is None or types in trace.tried:
            return True
        with suppress(TrialError), _exact():
            trace.together = Trial(trace, call).run()
            self._layering.assign(trace)
            trace.tried.add(types)
            return True
        return False

    def _traced_again(self, call: Call, training: bool) -> Trace:
        modes = [module.training for module in self._model.modules()]
        if self._model.training != training:
            self._model.train(training)
        try:
            self._made += 1
            trace = _traced(
                self.way, self._model, self._layering.units, self._norms, call, example=True, number=self._made
            )
        except Exception as error:
            raise CaptureError.composed(self._model, [(self.way, error)]) from error
        finally:
            for module, mode in zip(self._model.modules(), modes, strict=True):
                module.training = mode
        return self._same_in_both_modes(trace, call) or self._add(trace)

    def _same_in_both_modes(self, trace: Trace, call: Call) -> Trace | None:
        """Returns the trace of the other mode, if the graphs are equal: layers that are leaves handle their mode."""
        for other in self.found if self.way == FX else ():
            fits = other.holds(call.names, call.values, training=other.training is True)
            if fits and str(other.graph) == str(trace.graph):
                other.training = None
                return other
        return None

    def _add(self, trace: Trace) -> Trace:
        trace.layer = self._layering.assign(trace)
        self.found.append(trace)
        if len(self.found) > KEPT:
            del self.found[1]  # the first defines the layers
        return trace


def _with_rows(leaf: Any, rows: int) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.dim():
        return torch.empty((rows, *leaf.shape[1:]), dtype=leaf.dtype, device="meta")
    return leaf


def _kind(leaf: Any) -> tuple[Any, ...]:
    """Returns the properties of an input that a trace may depend on."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return type(leaf), leaf if isinstance(leaf, Hashable) else repr(leaf)


def _traced(
    way: str,
    model: nn.Module,
    known: frozenset[str],
    norms: frozenset[str],
    call: Call,
    *,
    example: bool,
    number: int = 0,
) -> Trace:
    with _exact():
        if way == FX:
            return fx_capture.trace(model, known, call, example=example)
        if not example:
            raise NoExampleError
        return export_capture.trace(model, call, norms, number=number)


def _exact() -> AbstractContextManager[None]:
    """Disables autocast during tracing: it applies to the stages' operators at run time, as in the model itself.

    Autocast also caches cast weights, so a second run of the model would run other operators than the first.
    """
    return uncast(torch.device("cuda"))
