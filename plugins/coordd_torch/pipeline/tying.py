"""Weight tying by name: modules that the user declares to share weights, though the model does not share them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from coordd.errors import ArgumentError
from coordd.pipeline.config import Reuse
from coordd.pipeline.graph import Layer
from coordd_torch.pipeline.statistics import Norm

__all__ = ["check_statistics", "copied", "tied"]


def tied(model: nn.Module | Callable[[], nn.Module], reuse: Reuse) -> nn.Module | Callable[[], nn.Module]:
    """Makes all modules under one key use the parameters of the first, in a model or in the model a function builds.

    Raises:
        ArgumentError: a named module does not exist, or two modules have no parameter with the same name and shape.
    """
    if not isinstance(reuse, Mapping):
        return model
    if isinstance(model, nn.Module):
        return _tie(model, reuse)
    return lambda: _tie(model(), reuse)


def copied(layers: Sequence[Layer], reuse: Reuse) -> list[str]:
    """Returns the names of the modules whose calls a cut may separate."""
    if not isinstance(reuse, Mapping):
        return list(reuse)
    known = {layer.module for layer in layers}
    return [name for names in reuse.values() for name in names if name in known]


def check_statistics(model: nn.Module, holders: Mapping[str, Sequence[int]]) -> None:
    """Rejects a normalisation layer whose running statistics several stages would track, each from its own calls.

    Args:
        model: the whole model.
        holders: the stages that hold each parameter or buffer, by its name.

    Raises:
        ArgumentError: the model has such a layer; the message names it and the stages.
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
    """Replaces parameters of `other` by those of `first` with the same name and shape; returns how many."""
    given = dict(first.named_parameters(remove_duplicate=False))
    count = 0
    for prefix, module in other.named_modules(remove_duplicate=False):
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            found = given.get(f"{prefix}.{name}" if prefix else name)
            if found is not None and found.shape == parameter.shape:
                setattr(module, name, found)
                count += 1
    return count
