"""Checks that all ranks of a pipeline have the same model structure and the same initial values."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import nn

from coordd.daemon.operations import Operations
from coordd.errors import MismatchError
from coordd.ops.process_sets import global_process_set
from coordd.parallel.objects import gathered
from coordd_torch.checksums import checksum
from coordd_torch.pipeline.build import ALONE, materialise
from coordd_torch.pipeline.capture import Captured

__all__ = ["materialised", "structure", "title", "values"]

_ADDRESS = re.compile(r" at 0x[0-9a-f]+|0x[0-9a-f]+")
_SEEDS = {"torch": "torch.manual_seed", "random": "random.seed", "numpy": "numpy.random.seed"}
_SIMPLE = (bool, int, float, str)


def structure(captured: Captured) -> Iterator[str]:
    """Yields the parameters, the modules and the computation of each layer, one item per line."""
    model = captured.model
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        yield f"{name} {tuple(tensor.shape)} {str(tensor.dtype)[6:]}{', frozen' * frozen}"
    for name, module in model.named_modules():
        frozen = model.training and not module.training  # it stays so in training
        what = f"{type(module).__name__}({_details(module)}){', in evaluation mode' * frozen}"
        yield _ADDRESS.sub("", f"{name or 'the model'}: {what}")
    for name, nodes in captured.layers:
        told = "\n".join(_ADDRESS.sub("", str(node.format_node())) for node in nodes)
        yield f"what layer {name} computes ({_digest(told.encode())})"


def _details(module: nn.Module) -> str:
    return " ".join(module.extra_repr().split())


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=4).hexdigest()


def title(what: Any) -> str:
    """Describes a loss or a weight: a function with its bound arguments, or a module with its settings and values.

    Closures and attributes of user objects are ignored, as they may differ between ranks, for example the rank itself.
    """
    if isinstance(what, nn.Module):
        parts = [f"{type(module).__name__}({_settings(module)})" for module in what.modules()]
        return _ADDRESS.sub("", " ".join([*parts, *map(_told, (*what.parameters(), *what.buffers()))]))
    if isinstance(what, functools.partial):
        given = [*map(_told, what.args), *(f"{key}={_told(value)}" for key, value in sorted(what.keywords.items()))]
        return f"{title(what.func)} with {', '.join(given)}"
    return str(getattr(what, "__qualname__", type(what).__name__))


def _settings(module: nn.Module) -> str:
    """Returns the settings of a module; PyTorch's losses do not show them, but have no other attributes."""
    if not type(module).__module__.startswith("torch."):
        return _details(module)
    return ", ".join(
        f"{key}={value!r}" for key, value in vars(module).items() if key[0] != "_" and isinstance(value, _SIMPLE)
    )


def _told(value: Any) -> str:
    """Describes a setting: a number or string by its `repr`, a tensor by a checksum, anything else by its title."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {checksum(value)}"
    return repr(value) if value is None or isinstance(value, _SIMPLE) else title(value)


def values(model: nn.Module) -> Iterator[str]:
    """Yields a checksum of the initial values of each real parameter of a built model."""
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and parameter.layout is torch.strided and parameter.numel():
            yield f"initial values of {name} ({checksum(parameter)})"


def materialised(
    builder: Callable[[], nn.Module],
    names: AbstractSet[str],
    operations: Operations,
    *,
    name: str,
    lines: Sequence[str],
) -> nn.Module:
    """Builds this rank's part of a model with `materialise`, and checks that all ranks build the same model.

    No rank holds all initial values, but builders that draw the same random numbers produce the same values.

    Args:
        builder: of the whole model.
        names: of this rank's parameters.
        operations: of the daemon.
        name: of the pipeline.
        lines: description of the model; if ranks differ in it, the caller reports the difference.

    Raises:
        MismatchError: on all ranks: their builders have drawn different numbers.
    """
    with ALONE:
        before = _generators()
        model = materialise(builder, names)
        after = _generators()
    known = _digest("\n".join(lines).encode())
    found = gathered(operations, (before, after, known), f"{name}.drawn", global_process_set)
    if any(model_of != known for *_, model_of in found):
        return model
    for kind in before:
        states = [then[kind] for _, then, _ in found]
        # A generator that no builder has drawn from may differ: Python's does in every process that does not seed it.
        if len(set(states)) > 1 and any(one[kind] != then[kind] for one, then, _ in found):
            told = "; ".join(f"rank {rank}: state {state} afterwards" for rank, state in enumerate(states))
            text = (
                f"the ranks of a pipeline build models with different initial values, from different random numbers of "
                f"{kind} ({told}): let the function that builds the model begin with {_SEEDS[kind]}, or call it "
                "before, alike on all"
            )
            raise MismatchError.told("Pipeline", "initial values", text)
    return model


def _generators() -> dict[str, str]:
    """Returns a digest of the state of each random generator that builders may use."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - builders may use it
    return {
        "torch": _digest(torch.get_rng_state().numpy().tobytes()),
        "random": _digest(repr(random.getstate()).encode()),
        "numpy": _digest(repr((kind, np.asarray(keys).tolist(), rest)).encode()),
    }
