"""A batch as the model's forward takes it: named leaves.

A batch is a tuple (positional arguments), a mapping (keyword arguments), or, where forward does not take it like that, the
one argument. A leaf is named after the argument and its path in it: ``input_ids``, ``batch_image``, ``states_0``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from coordd.errors import ArgumentError

__all__ = ["Call", "only"]


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a model.

    Attributes:
        names: of the leaves.
        leaves: tensors, numbers, None, whatever.
        spec: the structure of ``(args, kwargs)``.
    """

    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec

    @property
    def values(self) -> dict[str, Any]:
        """The leaves by name."""
        return dict(zip(self.names, self.leaves, strict=True))

    def arguments(self, leaves: Sequence[Any] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, with other leaves if any are given."""
        args, kwargs = pytree.tree_unflatten(self.leaves if leaves is None else leaves, self.spec)
        return args, kwargs

    def without_leaves(self) -> Call:
        """How the arguments are passed, without keeping them."""
        return Call(self.names, (), self.spec)

    @classmethod
    def bound(cls, model: nn.Module, batch: Any) -> Call:
        """Takes a batch apart.

        Raises:
            ArgumentError: the model's forward takes other arguments.
        """
        arguments = _arguments(model, batch)
        found, spec = pytree.tree_flatten_with_path((arguments.args, arguments.kwargs))
        parameters = list(arguments.signature.parameters.values())
        names = tuple(_name(parameters, path) for path, _ in found)
        return cls(names, tuple(leaf for _, leaf in found), spec)

    @classmethod
    def assumed(cls, model: nn.Module) -> Call:
        """Each argument without a default is one leaf; there is no example of it."""
        signature = inspect.signature(model.forward)
        plain = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
        needed = [
            name
            for name, parameter in signature.parameters.items()
            if parameter.kind in plain and parameter.default is parameter.empty
        ]
        return cls.bound(model, tuple(None for _ in needed))


def only(model: nn.Module, batch: Any) -> Any:
    """The one argument that a batch is for a model that takes one.

    Raises:
        ArgumentError: the model's forward takes other arguments.
    """
    arguments = list(_arguments(model, batch).arguments.values())
    if len(arguments) != 1:
        raise ArgumentError(f"{type(model).__name__} is cut as a chain, which takes one argument, not {len(arguments)}")
    return arguments[0]


def _arguments(model: nn.Module, batch: Any) -> inspect.BoundArguments:
    signature = inspect.signature(model.forward)
    error: TypeError | None = None
    for args, kwargs in _forms(batch):
        try:
            return signature.bind(*args, **kwargs)
        except TypeError as refused:
            error = error or refused
    form = f"{type(model).__name__}.forward{signature}"
    raise ArgumentError(f"{form} does not take this batch, a {type(batch).__name__}: {error}") from error


def _forms(batch: Any) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
        yield batch, {}
    elif isinstance(batch, Mapping) and all(isinstance(key, str) for key in batch):
        yield (), dict(batch)
    yield (batch,), {}


def _name(parameters: list[inspect.Parameter], path: pytree.KeyPath) -> str:
    """The argument's name, then the keys on the way to the leaf, as one identifier."""
    kind, argument, *rest = (_key(key) for key in path)
    if kind == 0:
        parameter = parameters[min(argument, len(parameters) - 1)]
        several = parameter.kind is inspect.Parameter.VAR_POSITIONAL
        first = f"{parameter.name}_{argument}" if several else parameter.name
    else:
        first = argument
    joined = "_".join(map(str, [first, *rest]))
    return "".join(letter if letter.isidentifier() or letter.isdigit() else "_" for letter in joined)


def _key(key: Any) -> Any:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key
