"""All traces of one model: each mode and each kind of inputs gets its own when it first appears."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from coordd.errors import ArgumentError
from coordd_torch.pipeline import export_capture, fx_capture
from coordd_torch.pipeline.batch_norms import tracking
from coordd_torch.pipeline.chain import INPUT, chain
from coordd_torch.pipeline.cut import VALUE
from coordd_torch.pipeline.failure import CaptureError
from coordd_torch.pipeline.inputs import Call, only
from coordd_torch.pipeline.layers import Layering, units
from coordd_torch.pipeline.trace import Trace
from coordd_torch.pipeline.trial import Trial, TrialError
from coordd_torch.pipeline.twin import bare

__all__ = ["KEPT", "Traces"]

KEPT = 256
"""So many traces, and so many kinds of inputs, are remembered."""

FX, EXPORT, SEQUENTIAL, CUTS = "fx", "export", "sequential", "cuts"


class Traces:
    """The traces of one model, and what makes new ones; holds no data of the model's.

    Attributes:
        way: how the model is traced: ``sequential``, ``cuts``, ``fx`` or ``export``.
        first: the trace that says what the layers are.
        found: all of them.
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
        self._by_kind: dict[tuple[Any, ...], Trace] = {}  # those that came last, the last one last
        self._calls: dict[tuple[str, ...], Call] = {}
        self._add(first)

    @property
    def names(self) -> list[str]:
        """The names of the layers."""
        return self._layering.names

    @classmethod
    def of_chain(cls, model: nn.Module, way: str, parts: Sequence[str]) -> Traces:
        """Calls the parts one after another, whatever the inputs are."""
        plain = bare(model)
        return cls(plain, way, Layering(frozenset(parts)), chain(plain, parts))

    @classmethod
    def of_model(cls, model: nn.Module, call: Call, *, example: bool, depth: int) -> Traces:
        """Traces any model; as the last resort with its direct children as layers, whatever they hold.

        Raises:
            CaptureError: neither torch.fx nor torch.export could.
        """
        plain = bare(model)
        if not plain.training:  # layers are those of training, in which alone gradients matter
            plain.train()
        norms = tracking(plain)
        errors: list[tuple[str, Exception]] = []
        for way, opened in ((FX, depth), (EXPORT, depth), (FX, 0)):
            known = units(model, opened)
            try:
                first = _traced(way, plain, known, norms, call, example=example)
            except Exception as error:  # noqa: BLE001 - user code, fx and export raise whatever they like
                errors.append((way, error))
            else:
                traces = cls(plain, way, Layering(known), first, norms)
                traces.learn(call)
                return traces
        raise CaptureError.composed(model, errors) from errors[-1][1]

    def call(self, batch: Any) -> dict[str, Any]:
        """A batch as the values that stages take; it tells how such a batch is passed to the model, too.

        Raises:
            ArgumentError: the model does not take it.
        """
        if self.way in {SEQUENTIAL, CUTS}:
            return {INPUT: only(self._model, batch)}
        call = Call.bound(self._model, batch)
        self.learn(call)
        return call.values

    def find(self, values: Mapping[str, Any], *, training: bool) -> Trace:
        """The trace for these inputs, made if there is none yet.

        Raises:
            ArgumentError: nobody asked `call` how a batch of this kind is passed to the model.
            CaptureError: the model cannot be traced with them.
        """
        if self.way in {SEQUENTIAL, CUTS}:
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

    def learn(self, call: Call) -> None:
        """Remembers how such a batch is passed to the model."""
        self._calls.setdefault(call.names, call.without_leaves())

    def _stands(self, trace: Trace, call: Call) -> bool:
        """Whether a trace that was made without an example does what the model does with these types of inputs.

        Raises:
            ArgumentError: it does, but the layers are not those that it needs.
        """
        types = (call.names, *map(type, call.leaves))
        if trace.tried is None or types in trace.tried:
            return True
        with suppress(TrialError):
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
            trace = _traced(self.way, self._model, self._layering.units, self._norms, call, example=True)
        except Exception as error:
            raise CaptureError.composed(self._model, [(self.way, error)]) from error
        finally:
            for module, mode in zip(self._model.modules(), modes, strict=True):
                module.training = mode
        return self._same_in_both_modes(trace, call) or self._add(trace)

    def _same_in_both_modes(self, trace: Trace, call: Call) -> Trace | None:
        """The trace of the other mode, if it is the same: layers that are leaves know their mode by themselves."""
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
            del self.found[1]  # the first says what the layers are
        return trace


def _kind(leaf: Any) -> tuple[Any, ...]:
    """What a trace may depend on."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    return type(leaf), leaf if isinstance(leaf, Hashable) else repr(leaf)


def _traced(
    way: str, model: nn.Module, known: frozenset[str], norms: frozenset[str], call: Call, *, example: bool
) -> Trace:
    if way == FX:
        return fx_capture.trace(model, known, call, example=example)
    if not example:
        raise ArgumentError("it needs an example of a batch")
    return export_capture.trace(model, call, norms)
