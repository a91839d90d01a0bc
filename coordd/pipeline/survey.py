"""What one rank finds out for all: the layers' costs, which are to be the same everywhere."""

from __future__ import annotations

from collections.abc import Callable

from coordd import api
from coordd.errors import ArgumentError
from coordd.objects import broadcast_object
from coordd.pipeline.profile import Profile

__all__ = ["surveyed"]


def surveyed(measure: Callable[[], Profile], *, name: str) -> Profile:
    """Has rank 0 measure the layers, and gives all ranks what it found.

    Args:
        measure: the layers, on rank 0 alone.
        name: of what is sent; the same on all ranks.

    Raises:
        ArgumentError: on all ranks: they cannot be measured.
    """
    found: Profile | str = ""
    if api.rank() == 0:
        try:
            found = measure()
        except Exception as error:  # noqa: BLE001 - layers raise whatever they like, and the others wait for an answer
            found = f"the layers cannot be measured: {error!r}; split by 'parameters' or 'layers'"
    found = broadcast_object(found, 0, name=name)
    if isinstance(found, str):
        raise ArgumentError(found)
    return found
