"""A Keras model and its optimizer in words, by which ranks that have different ones are told."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import keras

from coordd_keras.pipeline.graph import Graph, is_seed, variables_of

__all__ = ["described", "initial_values"]

_VALUES = 256
"""Of each variable so many values are compared, spread over all of it."""

_APART = frozenset({"name", "seed", "shared_object_id", "inbound_nodes", "input_layers", "output_layers"})
"""What may differ: layers are numbered by each process, in names and what refers to them, and some choose a seed."""


def described(graph: Graph, optimizer: Any) -> dict[str, str]:
    """Writes down what is to be the same on all ranks, by what errors call it."""
    found = {"the number of layers": str(len(graph.calls))}
    for place, call in enumerate(graph.calls):
        kind = type(call.operation).__name__
        found[f"layer {place}"] = kind
        found |= _settings(f"{kind} {place}'s", call.operation)
        found[f"what {kind} {place} reads"] = str(call.reads)
    found["the optimizer"] = type(optimizer).__name__
    return found | _settings("the optimizer's", optimizer)


def initial_values(graph: Graph) -> list[str]:
    """Lists what variables start with: their values or, where these are yet to be made, what makes them."""
    variables = [variable for call in graph.calls for variable in variables_of(call.operation)]
    found = [f"initial values of {graph.key(each)} ({_start(each)})" for each in variables if not is_seed(each)]
    return list(dict.fromkeys(found))


def _start(variable: Any) -> str:
    if variable._value is None:  # noqa: SLF001 - Keras has no public way to see what a scope has put off
        initializer = variable._initializer  # noqa: SLF001 - as above
        seed = getattr(initializer, "seed", None)
        return f"{type(initializer).__name__}, seed {seed if isinstance(seed, (int, str)) else ''}"
    flat = keras.ops.convert_to_numpy(variable).reshape(-1)
    return f"{zlib.crc32(flat[:: max(1, flat.size // _VALUES)].tobytes()):08x}"


def _settings(whose: str, thing: Any) -> dict[str, str]:
    try:
        config = thing.get_config()
    except NotImplementedError:  # of a layer that cannot be saved
        return {}
    return {f"{whose} {key}": _text(value) for key, value in config.items() if key not in _APART}


def _text(value: Any) -> str:
    """Writes a value, without what may differ; of an object that may tell where it lies in memory, its type."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_text(each)}' for key, each in value.items() if key not in _APART)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__
