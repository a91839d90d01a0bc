"""The switches of one run: which of the possible events happen in it.

Swarm testing (Groce et al., ISSTA 2012): a run with all faults at once hides more than a run with a random half.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from random import Random

__all__ = ["Swarm", "aside"]

_CHANCES = {"crash": 0.2, "abort": 0.1, "impatience": 0.1, "locks": 0.75, "polling": 0.2}
_LATE = {"calls": 0.25, "blocks": 0.8, "crossings": 0.8, "refusals": 0.4, "letters": 0.5, "phases": 0.2, "unread": 0.4}


def aside(rng: Random) -> Random:
    """Returns a random generator derived from the state of another, without drawing from that one."""
    return Random(rng.getstate()[1][1])  # noqa: S311 - repeatable, like all of it


@dataclass(frozen=True)
class Swarm:
    """Switches; the first are a user's normal life, the others are faults."""

    sets: bool = False
    shared_names: bool = False
    fillers: bool = False
    transients: bool = False
    reshape: bool = False
    lines: bool = False
    overlap: bool = False
    burst: bool = False
    steady: bool = False
    locks: bool = False
    early: bool = False
    polling: bool = False
    reorder: bool = False
    tree: bool = False
    spikes: bool = False
    mismatch: bool = False
    contradiction: bool = False
    join: bool = False
    duplicates: bool = False
    leave: bool = False
    freeze: bool = False
    stall: bool = False
    crash: bool = False
    abort: bool = False
    impatience: bool = False
    calls: bool = False
    blocks: bool = False
    crossings: bool = False
    refusals: bool = False
    letters: bool = False
    phases: bool = False
    unread: bool = False

    @classmethod
    def draw(cls, rng: Random, *, scenes: bool = True) -> Swarm:
        """Draws the switches: half of them are on, those that end the job more rarely, some more often.

        Args:
            rng: the random generator.
            scenes: whether ranks may refuse what others submit, wait for each other, ignore errors, and change from
                phase to phase; without this all other switches stay the same.
        """
        side = aside(rng)  # so that the other switches of a seed stay the same
        late = {name: side.random() < chance and scenes for name, chance in _LATE.items()}
        old = [field.name for field in fields(cls) if field.name not in late]
        drawn = {name: rng.random() < _CHANCES.get(name, 0.5) for name in old}
        # Ranks that contradict each other may also wait for each other, and get either error.
        late["blocks"] = late["blocks"] and not drawn["contradiction"]
        # An operation that fails because a rank has left, or contradicts, may be refused by another rank before or
        # after.
        late["refusals"] = late["refusals"] and not (drawn["contradiction"] or drawn["leave"])
        if late["phases"]:  # they are those of a program that repeats itself, and goes on while data moves
            drawn |= {"steady": True, "locks": True, "overlap": True}
        return cls(**drawn, **late)

    @property
    def fatal(self) -> bool:
        """Whether the job may end with a failure."""
        return self.crash or self.abort or self.impatience

    def __str__(self) -> str:
        return " ".join(field.name for field in fields(self) if getattr(self, field.name)) or "nothing"
