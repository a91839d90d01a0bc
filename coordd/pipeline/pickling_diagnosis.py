"""Finds the part of a value that cannot be pickled, to name it in an error. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["culprit"]


def culprit(value: Any, attempt: Callable[[Any], object]) -> tuple[str, Any]:
    """Descends from a value that an attempt fails on to its smallest part that the attempt still fails on.

    Returns:
        The path to the part, such as ``value['mask'][2].fn``, and the part.
    """
    path, seen = "value", {id(value)}
    while True:
        for step, part in _parts(value):
            if id(part) not in seen and _fails(part, attempt):
                seen.add(id(part))
                path, value = path + step, part
                break
        else:
            return path, value


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    elif not isinstance(value, type) and hasattr(value, "__dict__"):
        yield from ((f".{name}", part) for name, part in vars(value).items())


def _fails(part: Any, attempt: Callable[[Any], object]) -> bool:
    try:
        attempt(part)
    except Exception:  # noqa: BLE001 - whatever a class's own pickling raises
        return True
    return False
