"""Units in which times and memory sizes are formatted. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from coordd.errors import ArgumentError
from coordd.ops.checks import finite

__all__ = ["Units", "in_bytes"]

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_SIZES = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
_AMOUNT = re.compile(r"(\d+(?:\.\d*)?)\s*([KMG]iB|B|)")


def in_bytes(size: float | str) -> float:
    """Parses a memory size, given in bytes or as a text such as ``"2GiB"`` or ``"1.5 MiB"``; returns bytes.

    Raises:
        ArgumentError: the value is not a memory size.
    """
    if not isinstance(size, str):
        return finite(size, "an amount of memory", above=0)
    if (found := _AMOUNT.fullmatch(size.strip())) is None:
        raise ArgumentError(f"{size!r} is no amount of memory: write bytes, or a number with KiB, MiB or GiB")
    factors = {name: factor for factor, name in _SIZES}
    return float(found[1]) * factors[found[2] or "B"]


@dataclass(frozen=True)
class Units:
    """The units of a `Timeline`. Seconds and bytes get a fitting prefix; other units are printed by name.

    Attributes:
        time: unit of the `Timeline`'s times; ``"s"`` for seconds.
        memory: unit of its memory peaks; ``"B"`` for bytes.
    """

    time: str = "s"
    memory: str = "B"

    def clock(self, longest: float) -> tuple[float, str]:
        """Returns the best unit for a time axis that ends at ``longest``: its length in `time` units, and its name."""
        return _fitting(_TIMES, longest) if self.time == "s" else (1.0, self.time)

    def span(self, time: float) -> str:
        """Formats a duration."""
        return _write(time, self.clock(time))

    def size(self, amount: float) -> str:
        """Formats a memory size."""
        return _write(amount, _fitting(_SIZES, amount) if self.memory == "B" else (1.0, self.memory))


def _fitting(choice: tuple[tuple[float, str], ...], amount: float) -> tuple[float, str]:
    if not amount:
        return next(unit for unit in choice if unit[0] == 1)
    return next((unit for unit in choice if amount >= unit[0]), choice[-1])


def _write(amount: float, unit: tuple[float, str]) -> str:
    number, name = f"{amount / unit[0]:.4g}", unit[1]
    return f"{number} {name.removesuffix('s') if number == '1' and len(name) > len('ms') else name}".strip()
