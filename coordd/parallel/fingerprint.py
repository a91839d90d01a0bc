"""Compares data of all ranks: a short fingerprint first and, only if that differs, all of it. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from coordd.errors import spans

__all__ = ["ROUNDING", "alike", "differences", "fingerprint"]

ROUNDING = 0.02
"""Smaller differences, relative to a parameter's largest value, may come from rounding, of bfloat16 too."""
_SHOWN = 5


def fingerprint(lines: Iterable[str]) -> list[int]:
    """Hashes lines to two numbers, h and -h; their maxima over the ranks are `alike` if all have the same lines."""
    digest = hashlib.sha256("\n".join(lines).encode()).digest()
    number = int.from_bytes(digest[:7], "little")
    return [number, -number]


def alike(greatest: Sequence[int]) -> bool:
    """Returns whether all fingerprints were equal, given their element-wise maxima: max(h) equals min(h)."""
    return greatest[0] == -greatest[1]


def differences(everybody: Sequence[tuple[int, Iterable[str]]]) -> str:
    """Lists the lines that not all ranks have, given the lines of each rank."""
    had: dict[str, list[int]] = {}
    for rank, lines in everybody:
        for line in lines:
            had.setdefault(line, []).append(rank)
    partial = [f"{line} on {_ranks(owners)} only" for line, owners in had.items() if len(owners) < len(everybody)]
    rest = f" and {len(partial) - _SHOWN} more" if len(partial) > _SHOWN else ""
    return "; ".join(partial[:_SHOWN]) + rest


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}"
