"""Measures the layers' costs on one rank for all, because they must be equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable

from coordd import api
from coordd.errors import ArgumentError
from coordd.parallel.objects import broadcast_object
from coordd.pipeline.profile import Profile

__all__ = ["surveyed"]


def surveyed(measure: Callable[[], Profile], *, name: str) -> Profile:
    """Measures the layers on rank 0, and returns the result on all ranks.

    Args:
        measure: measures the layers; called on rank 0 only.
        name: of the broadcast; the same on all ranks.

    Raises:
        ArgumentError: on all ranks: the layers cannot be measured.
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
