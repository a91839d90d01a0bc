"""Names of an optimizer's parameters: given by the user, or made of their group and index."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from coordd.errors import ArgumentError

__all__ = ["beside", "listed", "names_of"]


def listed(named_parameters: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Returns a list of the user's named parameters, as they may be an iterator; empty if not iterable, as a model."""
    try:
        return list(named_parameters)
    except TypeError:
        return []


def names_of(
    optimizer: torch.optim.Optimizer, named: list[tuple[str, torch.Tensor]] | None
) -> list[tuple[str, torch.Tensor]]:
    """Returns every trained parameter of the optimizer with its name.

    Raises:
        ArgumentError: `named` has no pairs of a name and a parameter, repeats a name, or lacks a parameter.
    """
    places = [
        (f"param.{index}.{place}", parameter)
        for index, group in enumerate(optimizer.param_groups)
        for place, parameter in enumerate(group["params"])
        if parameter.requires_grad
    ]
    if named is None:
        return places
    if not named or any(type(item) is not tuple or len(item) != 2 for item in named):
        text = (
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
        raise ArgumentError(text)
    names = [name for name, _ in named]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        text = f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}"
        raise ArgumentError(text)
    known = {id(parameter): name for name, parameter in named}
    if unnamed := [place for place, parameter in places if id(parameter) not in known]:
        text = (
            "named_parameters was specified, but one or more model parameters were not named: "
            f"{', '.join(unnamed)} (group and place in the optimizer)"
        )
        raise ArgumentError(text)
    return [(known[id(parameter)], parameter) for _, parameter in places]


def beside(
    optimizer: torch.optim.Optimizer, given: list[tuple[str, torch.Tensor]] | None
) -> list[tuple[str, torch.Tensor]]:
    """Returns the parameters that are not trained now but may be later: frozen ones, and other named tensors."""
    if given is None:
        return [
            (f"param.{index}.{place}", parameter)
            for index, group in enumerate(optimizer.param_groups)
            for place, parameter in enumerate(group["params"])
            if not parameter.requires_grad
        ]
    known = (parameter for group in optimizer.param_groups for parameter in group["params"])
    trained = {id(parameter) for parameter in known if parameter.requires_grad}
    return [(name, value) for name, value in given if id(value) not in trained]
