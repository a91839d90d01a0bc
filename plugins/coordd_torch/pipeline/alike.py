"""What must be equal on all ranks that make a pipeline: the model's structure, and the values with which it starts."""

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

from coordd.errors import MismatchError
from coordd.objects import gathered
from coordd.operations import Operations
from coordd.process_sets import global_process_set
from coordd_torch.checksums import checksum
from coordd_torch.pipeline.build import ALONE, materialise
from coordd_torch.pipeline.capture import Captured

__all__ = ["materialised", "structure", "title", "values"]

_ADDRESS = re.compile(r" at 0x[0-9a-f]+|0x[0-9a-f]+")
_SEEDS = {"torch": "torch.manual_seed", "random": "random.seed", "numpy": "numpy.random.seed"}
_SIMPLE = (bool, int, float, str)


def structure(captured: Captured) -> Iterator[str]:
    """Lists parameters, modules and what is computed between them, one thing a line."""
    model = captured.model
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield f"{name} {tuple(tensor.shape)} {str(tensor.dtype)[6:]}"
    for name, module in model.named_modules():
        yield _ADDRESS.sub("", f"{name or 'the model'}: {type(module).__name__}({_details(module)})")
    for name, nodes in captured.layers:
        told = "\n".join(_ADDRESS.sub("", str(node.format_node())) for node in nodes)
        yield f"what layer {name} computes ({_digest(told.encode())})"


def _details(module: nn.Module) -> str:
    return " ".join(module.extra_repr().split())


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=4).hexdigest()


def title(what: Any) -> str:
    """Names a loss or a weight: a function with what was given to it before, or a module with its settings and values.

    What a function finds in its surroundings, and what an object of the user's keeps, may differ: the rank, say.
    """
    if isinstance(what, nn.Module):
        parts = [f"{type(module).__name__}({_settings(module)})" for module in what.modules()]
        return _ADDRESS.sub("", " ".join([*parts, *map(_told, (*what.parameters(), *what.buffers()))]))
    if isinstance(what, functools.partial):
        given = [*map(_told, what.args), *(f"{key}={_told(value)}" for key, value in sorted(what.keywords.items()))]
        return f"{title(what.func)} with {', '.join(given)}"
    return str(getattr(what, "__qualname__", type(what).__name__))


def _settings(module: nn.Module) -> str:
    """What a module was made with; losses of PyTorch do not show that, but have nothing else as attributes."""
    if not type(module).__module__.startswith("torch."):
        return _details(module)
    return ", ".join(
        f"{key}={value!r}" for key, value in vars(module).items() if key[0] != "_" and isinstance(value, _SIMPLE)
    )


def _told(value: Any) -> str:
    """What is said of a setting: a number or a text itself, of a tensor a checksum, else what it is."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {checksum(value)}"
    return repr(value) if value is None or isinstance(value, _SIMPLE) else title(value)


def values(model: nn.Module) -> Iterator[str]:
    """Lists what all parameters of a built model start with."""
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
    """Builds this rank's part of a model, as `materialise`; all ranks do, and find out whether it is the same model.

    No rank has all initial values, but builders that draw the same random numbers make the same ones.

    Args:
        builder: of the whole model.
        names: of this rank's parameters.
        operations: of the daemon.
        name: of the pipeline.
        lines: what was found out about the model; where ranks differ in that, the caller tells them.

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
    """The states of the generators that builders may use."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - it is what builders may use
    return {
        "torch": _digest(torch.get_rng_state().numpy().tobytes()),
        "random": _digest(repr(random.getstate()).encode()),
        "numpy": _digest(repr((kind, np.asarray(keys).tolist(), rest)).encode()),
    }
