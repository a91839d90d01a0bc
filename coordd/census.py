"""Whether all ranks have the same, told by a short print of it first, and, only if not, by all of it. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from coordd.errors import spans

__all__ = ["ROUNDING", "alike", "differences", "fingerprint"]

ROUNDING = 0.02
"""Differences of less, as a part of the largest value of a parameter, may come from rounding, of bfloat16 too."""
_SHOWN = 5


def fingerprint(lines: Iterable[str]) -> list[int]:
    """Makes two numbers of some lines; the greatest of all ranks' are `alike` if all have the same lines."""
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    number = int.from_bytes(digest[:7], "little")
    return [number, -number]


def alike(greatest: Sequence[int]) -> bool:
    """Judges the greatest of all ranks' prints, number by number: the least is equal to it."""
    return greatest[0] == -greatest[1]


def differences(everybody: Sequence[tuple[int, Iterable[str]]]) -> str:
    """Lists what not all ranks have, given the lines of each rank."""
    had: dict[str, list[int]] = {}
    for rank, lines in everybody:
        for line in lines:
            had.setdefault(line, []).append(rank)
    partial = [f"{line} on {_ranks(owners)} only" for line, owners in had.items() if len(owners) < len(everybody)]
    rest = f" and {len(partial) - _SHOWN} more" if len(partial) > _SHOWN else ""
    return "; ".join(partial[:_SHOWN]) + rest


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}"
