"""Builds one rank's part of a model, with the same initial weights as the whole model.

The builder is run twice: once without data, to record which tensors it makes and what each is computed from, and once
with data, with meta tensors for the parameters that are not wanted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from coordd.errors import ArgumentError
from coordd_torch.pipeline.meta_init import Ghosts, UnreadableError
from coordd_torch.pipeline.rng_state import untouched

__all__ = ["ALONE", "Builder", "Wanted", "keep", "materialise", "outline"]

Builder = Callable[[], nn.Module]
Wanted = Callable[[str], bool] | AbstractSet[str]
"""Names of parameters and buffers, or a predicate on names."""

_SHOWN = 5
ALONE = threading.RLock()  # random generators are process-wide, and ranks may be threads


def outline(builder: Builder) -> nn.Module:
    """Builds a model on the meta device; the state of the random generators stays as it is.

    Args:
        builder: makes the whole model, and the same model in each call; it is called several times.

    Raises:
        ArgumentError: the builder returns parameters that it did not make, or needs values that it did not just draw.
    """
    with ALONE:
        return _rehearse(builder).model


def materialise(builder: Builder, wanted: Wanted) -> nn.Module:
    """Builds a model in which only the wanted parameters and buffers are real; the others are on the meta device.

    Real values, and the state of the random generators afterwards, are bitwise equal to those of ``builder()``. At most
    the following is in memory at a time: the wanted tensors, the tensors that they are computed from, and one more
    parameter with the tensors that its initialisation needs. If ranks are threads, which share one random generator,
    the builder itself must seed it.

    Args:
        builder: makes the whole model, and the same model in each call; it is called several times.
        wanted: by their names in the built model; one name of a tied parameter is enough.

    Raises:
        ArgumentError: a name does not exist; or the builder makes a different model each time, returns parameters that
            it did not make, or needs values that are no longer in memory.
    """
    with ALONE:
        rehearsal = _rehearse(builder)
        names = _select(rehearsal.needs, wanted)
        kept = frozenset().union(*(rehearsal.needs[name] for name in names))
        with Ghosts(kept, draw=True).entered() as ghosts:
            model = builder()
    shapes = [tensor.shape for tensor in ghosts.made]
    if shapes != rehearsal.shapes:
        raise ArgumentError(
            f"the builder makes something else each time it is called: {len(rehearsal.shapes)} parameters and buffers, "
            f"then {len(shapes)}, or of other shapes; let it depend on nothing that changes"
        )
    keep(model, names)
    return model


def keep(model: nn.Module, wanted: Wanted) -> None:
    """Moves all parameters and buffers that are not wanted to the meta device, which frees their memory.

    Tied tensors stay tied, and are wanted if any of their names is.

    Raises:
        ArgumentError: a name does not exist, or a wanted tensor has no values.
    """
    places = list(_places(model))
    names = _select([place.name for place in places], wanted)
    held = {id(place.tensor) for place in places if place.name in names}
    valueless = [place.name for place in places if place.name in names and place.tensor.is_meta]
    if valueless:
        raise ArgumentError(f"what is wanted has no values, it is on the meta device: {_some(valueless)}")
    ghosts: dict[int, torch.Tensor] = {}
    for place in places:
        if id(place.tensor) not in held:
            empty = ghosts.setdefault(id(place.tensor), _emptied(place.tensor))
            setattr(place.module, place.attribute, empty)  # setattr, as recurrent modules intercept it


@dataclass(frozen=True)
class _Rehearsal:
    model: nn.Module
    needs: dict[str, frozenset[int]]  # name -> numbers of the tensors that must be real
    shapes: list[torch.Size]


class _Place(NamedTuple):
    name: str
    tensor: torch.Tensor
    module: nn.Module
    attribute: str


def _places(model: nn.Module) -> Iterator[_Place]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for held in (module._parameters, module._buffers):  # noqa: SLF001 - no public API lists all names
            for attribute, tensor in held.items():
                if tensor is not None:
                    yield _Place(f"{prefix}.{attribute}" if prefix else attribute, tensor, module, attribute)


def _rehearse(builder: Builder) -> _Rehearsal:
    with untouched():
        with suppress(UnreadableError):
            return _rehearsed(builder, draw=False)
        return _rehearsed(builder, draw=True)  # an initialiser reads the values it has drawn


def _rehearsed(builder: Builder, *, draw: bool) -> _Rehearsal:
    with Ghosts(frozenset(), draw=draw).entered() as ghosts:
        model = builder()
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"the builder returned {type(model).__name__}, not a torch.nn.Module")
    places = list(_places(model))
    made = {id(tensor) for tensor in ghosts.made}
    foreign = [
        place.name for place in places if isinstance(place.tensor, nn.Parameter) and id(place.tensor) not in made
    ]
    if foreign:
        raise ArgumentError(
            f"the builder returns parameters that it has not made itself, or not as torch.nn.Parameter: "
            f"{_some(foreign)}; make all of the model in the builder, or give the built model instead"
        )
    # A tensor replaced by `parameter.data = ...` depends on other tensors, and must itself be real to receive their
    # values.
    itself = {id(tensor): frozenset({number}) for number, tensor in enumerate(ghosts.made)}
    needs = {place.name: ghosts.sources(place.tensor) | itself.get(id(place.tensor), frozenset()) for place in places}
    keep(model, frozenset())
    return _Rehearsal(model, needs, [tensor.shape for tensor in ghosts.made])


def _emptied(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    empty = tensor.detach().to("meta")
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, tensor.requires_grad)
    vars(empty).update(vars(tensor))
    return empty


def _select(names: Collection[str], wanted: Wanted) -> frozenset[str]:
    if callable(wanted):
        return frozenset(filter(wanted, names))
    unknown = sorted(wanted - set(names))
    if unknown:
        raise ArgumentError(f"the model has no parameter or buffer named {_some(unknown)}")
    return frozenset(wanted)


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + rest
