"""One thing that `coordd doctor` looked at."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Self

__all__ = ["Finding", "Health"]


class Health(enum.Enum):
    """How good a finding is. Only a problem makes the doctor fail."""

    GOOD = "good"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """What was found, and what to do about it."""

    what: str
    found: str
    health: Health = Health.GOOD
    advice: str = ""

    @classmethod
    def note(cls, what: str, found: str, advice: str = "") -> Self:
        """Makes a finding that is worth knowing and no problem."""
        return cls(what, found, Health.NOTE, advice)

    @classmethod
    def problem(cls, what: str, found: str, advice: str) -> Self:
        """Makes a finding that has to be dealt with."""
        return cls(what, found, Health.PROBLEM, advice)
