"""Profiles the layers of a Keras model: runs a few microbatches forward and backward, layer by layer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from coordd.pipeline.config import PipelineConfig
from coordd.pipeline.profile import Profile
from coordd.pipeline.survey import surveyed
from coordd_keras.pipeline.autodiff import Call, Computation, autodiff, floats
from coordd_keras.pipeline.graph import Graph, arrays_of
from coordd_keras.pipeline.layout import Layout, unmeasured

__all__ = ["measured"]

_ROUNDS = 5
"""Number of measured rounds; the minimum counts, because noise only adds time."""


def measured(graph: Graph, inputs: Mapping[str, np.ndarray], config: PipelineConfig, *, name: str) -> Profile:
    """Measures the layers on rank 0 and broadcasts the profile.

    Args:
        graph: the model with its weights, which do not change.
        inputs: inputs of one microbatch, by tensor number.
        config: how the model is split.
        name: of the broadcast; the same on all ranks.

    Raises:
        ArgumentError: on all ranks, if a layer cannot run.
    """
    numbered = {int(number): array for number, array in inputs.items()}
    return surveyed(lambda: _profile(graph, numbered, config), name=name)


def _profile(graph: Graph, values: dict[int, Any], config: PipelineConfig) -> Profile:
    """Measures one-layer stages."""
    known = unmeasured(graph, config)
    stages = Layout(graph, [range(at, at + 1) for at in range(len(graph.calls))])
    loads = []
    for stage, load in enumerate(known.loads):
        part, reads, writes = stages.parts[stage]
        state = arrays_of(part.non_trainable_variables)
        outputs, forward, backward = _paced(part, [values[number] for number in reads])
        for variable, value in zip(part.non_trainable_variables, state, strict=True):
            variable.assign(value)
        values |= zip(writes, outputs, strict=True)
        loads.append(replace(load, forward=forward, backward=backward, inward=backward))
    return replace(known, loads=tuple(loads))


def _paced(part: keras.Model, values: list[Any]) -> tuple[list[Any], float, float]:
    """Returns the layers' outputs and the seconds of forward and backward; drops the first round, a warm-up."""
    computed = autodiff(Computation(part, last=False), part.trainable_variables)
    call = Call(values, [None] * len(values), training=True)
    entering = [place for place, value in enumerate(values) if not isinstance(value, np.ndarray) and floats(value)]
    forward, backward, outputs = [], [], []
    for _ in range(1 + _ROUNDS):
        begin = time.perf_counter()
        found, kept = computed.record(call, entering)
        forward.append(time.perf_counter() - begin)
        roots = [(output, keras.ops.ones_like(output)) for output in found.outputs if floats(output)]
        begin = time.perf_counter()
        computed.back(kept, roots)
        backward.append(time.perf_counter() - begin)
        outputs = list(found.outputs)
    return outputs, min(forward[1:]), min(backward[1:])
