"""Shortens the paths in a survey: files below a folder get relative paths."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from coordd.monitoring.status.probe_result import Sighting, Survey
from coordd.monitoring.status.report import Stack, Standing

__all__ = ["seen_from"]

_replace = msgspec.structs.replace


def seen_from(folder: str, survey: Survey) -> Survey:
    """Makes the paths of files below a folder relative to it; other paths stay as they are."""
    prefix = folder.rstrip("/") + "/"
    if prefix == "/":
        return survey

    def shorten(place: str) -> str:
        return place.removeprefix(prefix)

    return _replace(survey, sightings=tuple(_sighting(seen, shorten) for seen in survey.sightings))


def _sighting(seen: Sighting, shorten: Callable[[str], str]) -> Sighting:
    standing = seen.standing and _standing(seen.standing, shorten)
    return _replace(seen, standing=standing, stacks=_stacks(seen.stacks, shorten))


def _standing(standing: Standing, shorten: Callable[[str], str]) -> Standing:
    last = standing.last and _replace(standing.last, site=shorten(standing.last.site))
    return _replace(standing, last=last, stacks=_stacks(standing.stacks, shorten))


def _stacks(stacks: tuple[Stack, ...], shorten: Callable[[str], str]) -> tuple[Stack, ...]:
    return tuple(_replace(stack, lines=tuple(map(shorten, stack.lines))) for stack in stacks)
