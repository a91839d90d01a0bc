"""Modules that have the same weights because the user names them, not because the model holds them in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from coordd.errors import ArgumentError
from coordd.pipeline.config import Reuse
from coordd.pipeline.graph import Layer
from coordd_torch.pipeline.statistics import Norm

__all__ = ["check_statistics", "copied", "tied"]


def tied(model: nn.Module | Callable[[], nn.Module], reuse: Reuse) -> nn.Module | Callable[[], nn.Module]:
    """Gives modules under one key the parameters of the first of them, in a model or in what a function builds.

    Raises:
        ArgumentError: there is no such module, or they have no parameter of a name and a shape in common.
    """
    if not isinstance(reuse, Mapping):
        return model
    if isinstance(model, nn.Module):
        return _tie(model, reuse)
    return lambda: _tie(model(), reuse)


def copied(layers: Sequence[Layer], reuse: Reuse) -> list[str]:
    """Names the modules that a cut may separate from their other calls."""
    if not isinstance(reuse, Mapping):
        return list(reuse)
    known = {layer.module for layer in layers}
    return [name for names in reuse.values() for name in names if name in known]


def check_statistics(model: nn.Module, holders: Mapping[str, Sequence[int]]) -> None:
    """Refuses normalisation of which several stages would track the statistics, each those of its own calls.

    Args:
        model: the whole of it.
        holders: the stages that have each parameter or buffer.

    Raises:
        ArgumentError: there is one; names it and the stages.
    """
    for name, module in model.named_modules():
        stages = holders.get(f"{name}.running_mean", ()) if isinstance(module, Norm) else ()
        frozen = model.training and not module.training
        if len(stages) > 1 and not frozen:
            raise ArgumentError(
                f"{name!r} is called in stages {', '.join(map(str, stages))}, and tracks running statistics, which "
                "would drift apart: let no cut separate its calls, or freeze it with eval(), or set "
                "track_running_stats=False"
            )


def _tie(model: nn.Module, reuse: Mapping[str, Sequence[str]]) -> nn.Module:
    modules = dict(model.named_modules(remove_duplicate=False))
    for key, names in reuse.items():
        if missing := [name for name in names if name not in modules]:
            raise ArgumentError(
                f"reuse names {missing[0]!r} under {key!r}, and the model has no such module; there are: "
                f"{', '.join(filter(None, modules))}"
            )
        first, *others = names
        for other in others:
            if not _share(modules[first], modules[other]):
                raise ArgumentError(
                    f"reuse ties {other!r} to {first!r} under {key!r}, but they have no parameter of a name and a "
                    "shape in common"
                )
    return model


def _share(first: nn.Module, other: nn.Module) -> int:
    """Has a module take the parameters of another one that are like its own; says how many."""
    given = dict(first.named_parameters(remove_duplicate=False))
    count = 0
    for prefix, module in other.named_modules(remove_duplicate=False):
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            found = given.get(f"{prefix}.{name}" if prefix else name)
            if found is not None and found.shape == parameter.shape:
                setattr(module, name, found)
                count += 1
    return count
