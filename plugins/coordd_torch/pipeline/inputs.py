"""A batch as named leaves, in the way the model's forward takes it.

A batch is a tuple (positional arguments), a mapping (keyword arguments, if forward takes them), or the only argument. A
leaf is named after the argument and its path in it: ``input_ids``, ``batch_image``, ``x_0``.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree

from coordd.errors import ArgumentError

__all__ = ["Call", "only"]

_CACHE = "use_cache"


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a model.

    Attributes:
        names: of the leaves.
        leaves: tensors, numbers, None or any other object.
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
        """Returns the positional and keyword arguments, with other leaves if given."""
        args, kwargs = pytree.tree_unflatten(self.leaves if leaves is None else leaves, self.spec)
        return args, kwargs

    def without_leaves(self) -> Call:
        """Returns the structure of the call without its values."""
        return Call(self.names, (), self.spec)

    @classmethod
    def bound(cls, model: nn.Module, batch: Any) -> Call:
        """Flattens a batch into named leaves.

        Raises:
            ArgumentError: the model's forward takes other arguments.
        """
        arguments = _uncached(model, _arguments(model, batch))
        found, spec = pytree.tree_flatten_with_path((arguments.args, arguments.kwargs))
        parameters = list(arguments.signature.parameters.values())
        names: list[str] = []
        for path, _ in found:
            name = _name(parameters, path)
            names.append(next(each for each in _tried(name) if each not in names))
        return cls(tuple(names), tuple(leaf for _, leaf in found), spec)

    @classmethod
    def assumed(cls, model: nn.Module) -> Call:
        """Creates a call without an example: each argument without a default is one leaf."""
        signature = inspect.signature(model.forward)
        plain = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
        needed = [
            name
            for name, parameter in signature.parameters.items()
            if parameter.kind in plain and parameter.default is parameter.empty
        ]
        return cls.bound(model, tuple(None for _ in needed))


def only(model: nn.Module, batch: Any) -> Any:
    """Returns the single argument that a batch is for a chain model; a tuple of several elements is one argument.

    Raises:
        ArgumentError: the model's forward takes other arguments.
    """
    several = isinstance(batch, tuple) and len(batch) != 1
    arguments = list(_arguments(model, (batch,) if several else batch).arguments.values())
    if len(arguments) != 1:
        raise ArgumentError(f"{type(model).__name__} is cut as a chain, which takes one argument, not {len(arguments)}")
    return arguments[0]


def _arguments(model: nn.Module, batch: Any) -> inspect.BoundArguments:
    signature = inspect.signature(model.forward)
    try:
        if isinstance(batch, tuple) and not hasattr(batch, "_fields"):
            return signature.bind(*batch)
        if isinstance(batch, Mapping) and _knows(signature, batch):
            return signature.bind(**batch)
        return signature.bind(batch)
    except TypeError as error:
        given = (
            f"{type(batch).__name__} of {len(batch)}" if isinstance(batch, tuple | Mapping) else type(batch).__name__
        )
        form = f"{type(model).__name__}.forward{signature}"
        raise ArgumentError(f"{form} does not take this batch, a {given}: {error}") from error


def _uncached(model: nn.Module, arguments: inspect.BoundArguments) -> inspect.BoundArguments:
    """Disables the key/value cache of a `transformers` model, unless the batch sets `use_cache`.

    The model returns one by default, which only serves generation; all stages would have to send theirs to the last
    one.
    """
    kinds = {name: parameter.kind for name, parameter in arguments.signature.parameters.items()}
    rest = next((name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_KEYWORD), None)
    given = {**arguments.arguments, **(arguments.arguments.get(rest, {}) if rest else {})}
    if _CACHE in given or not getattr(getattr(model, "config", None), _CACHE, False):
        return arguments
    if _CACHE in kinds:
        arguments.arguments[_CACHE] = False
    elif rest is not None:
        arguments.arguments[rest] = {**arguments.arguments.get(rest, {}), _CACHE: False}
    return arguments


def _knows(signature: inspect.Signature, batch: Mapping[Any, Any]) -> bool:
    try:
        signature.bind(**batch)
    except TypeError:
        return False
    return True


def _name(parameters: list[inspect.Parameter], path: pytree.KeyPath) -> str:
    """Returns the argument's name, followed by the keys on the path to the leaf, as one identifier."""
    kind, argument, *rest = (_key(key) for key in path)
    if kind == 0:
        kinds = [parameter.kind for parameter in parameters]
        several = inspect.Parameter.VAR_POSITIONAL
        rest_begins = kinds.index(several) if several in kinds else len(kinds)
        name = parameters[min(argument, rest_begins)].name
        first = name if argument < rest_begins else f"{name}_{argument - rest_begins}"
    else:
        first = argument
    joined = "_".join(map(str, [first, *rest]))
    return "".join(letter if letter.isidentifier() or letter.isdigit() else "_" for letter in joined)


def _tried(name: str) -> Iterator[str]:
    """Yields the name, then the name with numbers, which are used where two leaves have the same name."""
    yield name
    yield from (f"{name}_{number}" for number in itertools.count(2))


def _key(key: Any) -> Any:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return getattr(key, attribute)
    return key
