"""The result of one check of `coordd doctor`."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Self

__all__ = ["Finding", "Health"]


class Health(enum.Enum):
    """The severity of a finding. Only a problem makes `coordd doctor` fail."""

    GOOD = "good"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """The result of one check, and what to do about it."""

    what: str
    found: str
    health: Health = Health.GOOD
    advice: str = ""

    @classmethod
    def note(cls, what: str, found: str, advice: str = "") -> Self:
        """Creates a finding that is worth knowing but not a problem."""
        return cls(what, found, Health.NOTE, advice)

    @classmethod
    def problem(cls, what: str, found: str, advice: str) -> Self:
        """Creates a finding that needs action."""
        return cls(what, found, Health.PROBLEM, advice)
