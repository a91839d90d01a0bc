"""The order in which engines run in a round.

    round   0    1    2    3    4    5
    turns  ABC  CBA  BCA  ACB  CAB  BAC

Engines alternate in short blocks, so that a machine that becomes slower affects all of them; and the order changes
from round to round, so that no engine always runs with the caches that the same other engine left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

__all__ = ["turns"]

T = TypeVar("T")


def turns(engines: Sequence[T], round_number: int) -> list[T]:
    """Returns the engines in the order of one round; three engines see all six orders in six rounds."""
    if not engines:
        return []
    shift = round_number // 2 % len(engines)
    turned = [*engines[shift:], *engines[:shift]]
    return turned[::-1] if round_number % 2 else turned
