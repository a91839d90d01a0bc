"""Describes a Keras model and its optimizer as text, to report differences between ranks."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from typing import Any

import keras

from coordd_keras.pipeline.graph import Graph, is_seed, variables_of

__all__ = ["described", "initial_values"]

_VALUES = 256
"""Number of values of each variable that are compared, spread over the variable."""

_APART = frozenset({"name", "seed", "shared_object_id", "inbound_nodes", "input_layers", "output_layers"})
"""Keys that may differ: each process numbers its layers in names and references; some layers choose a seed."""


def described(graph: Graph, optimizer: Any, *, compiled: Mapping[str, Any], weight: Any) -> dict[str, str]:
    """Returns the settings that must be equal on all ranks, by their names in error messages.

    Args:
        graph: the layers.
        optimizer: the optimizer.
        compiled: loss and metrics, as `keras.Model.compile` takes them.
        weight: the function that weighs microbatches, or None.
    """
    found = {"the number of layers": str(len(graph.calls))}
    for place, call in enumerate(graph.calls):
        kind = type(call.operation).__name__
        found[f"layer {place}"] = kind
        found |= _settings(f"{kind} {place}'s", call.operation)
        found[f"what {kind} {place} reads"] = str(call.reads)
    found["the optimizer"] = type(optimizer).__name__
    found |= _settings("the optimizer's", optimizer)
    return found | {name: _title(value) for name, value in {**compiled, "weight": weight}.items()}


def initial_values(graph: Graph, assigned: Mapping[int, Any]) -> list[str]:
    """Lists the variables' initial values, or the initializers of variables without values yet.

    Args:
        graph: the layers.
        assigned: values that a function which makes the model assigned to its variables, by the variables' ids.
    """
    variables = [variable for call in graph.calls for variable in variables_of(call.operation)]
    found = [
        f"initial values of variable {graph.key(each)} ({_start(each, assigned)})"
        for each in variables
        if not is_seed(each)
    ]
    return list(dict.fromkeys(found))


def _start(variable: Any, assigned: Mapping[int, Any]) -> str:
    if id(variable) in assigned:
        variable = assigned[id(variable)]
    elif variable._value is None:  # noqa: SLF001 - no public way to see whether it is deferred
        initializer = variable._initializer  # noqa: SLF001 - as above
        seed = getattr(initializer, "seed", None)
        return f"{type(initializer).__name__}, seed {seed if isinstance(seed, (int, str)) else ''}"
    flat = keras.ops.convert_to_numpy(variable).reshape(-1)
    return f"{zlib.crc32(flat[:: max(1, flat.size // _VALUES)].tobytes()):08x}"


def _settings(whose: str, thing: Any) -> dict[str, str]:
    try:
        config = thing.get_config()
    except NotImplementedError:  # the layer cannot be saved
        return {}
    return {f"{whose} {key}".strip(): _text(value) for key, value in config.items() if key not in _APART}


def _text(value: Any) -> str:
    """Returns a value as text without keys that may differ; for objects whose repr may hold an address, the type."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_text(each)}' for key, each in value.items() if key not in _APART)}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def _title(value: Any) -> str:
    """Describes losses, metrics or a function, without closures and attributes of users' objects, which may differ."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_title(each)}' for key, each in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_title, value))}]"
    if isinstance(value, functools.partial):
        arguments = [*map(_title, value.args), *(f"{key}={_title(each)}" for key, each in value.keywords.items())]
        return f"{_title(value.func)} with {', '.join(arguments)}"
    if isinstance(value, (bool, int, float, str, type(None))):
        return repr(value)
    if not hasattr(value, "get_config"):
        return str(getattr(value, "__qualname__", type(value).__name__))
    # Such as the delta of Huber's loss, which is not part of its configuration.
    given: Mapping[str, Any] = getattr(value, "_fn_kwargs", {})
    settings = _settings("", value) | {key: _title(each) for key, each in given.items()}
    return f"{type(value).__name__}({', '.join(f'{key}={text}' for key, text in settings.items())})"
