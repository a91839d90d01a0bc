"""Which of the things that can happen do happen in one run.

Swarm testing (Groce et al., ISSTA 2012): a run in which everything goes wrong at once hides more than one in which a
random half does.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from random import Random

__all__ = ["Swarm", "aside"]

_CHANCES = {"crash": 0.2, "abort": 0.1, "impatience": 0.1, "locks": 0.75, "polling": 0.2}
_LATE = {"calls": 0.25, "blocks": 0.8, "crossings": 0.8, "refusals": 0.4, "letters": 0.5}


def aside(rng: Random) -> Random:
    """Makes chance of its own from a source, without drawing from that."""
    return Random(rng.getstate()[1][1])  # noqa: S311 - repeatable, like all of it


@dataclass(frozen=True)
class Swarm:
    """Switches; the first ones are a user's normal life, the others are faults."""

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

    @classmethod
    def draw(cls, rng: Random, *, scenes: bool = True) -> Swarm:
        """Throws the dice: half of the switches are on, those that end the job seldom, some things more often.

        Args:
            rng: chance.
            scenes: whether ranks may refuse what others submit, and wait for each other; without them all else is the
                same.
        """
        side = aside(rng)  # so that the other switches of a seed stay what they were
        late = {name: side.random() < chance and scenes for name, chance in _LATE.items()}
        old = [field.name for field in fields(cls) if field.name not in late]
        drawn = {name: rng.random() < _CHANCES.get(name, 0.5) for name in old}
        # Ranks that contradict each other may also wait for each other, and get the one error or the other.
        late["blocks"] = late["blocks"] and not drawn["contradiction"]
        # What fails because a rank has left, or contradicts, may have been refused by another before, or after that.
        late["refusals"] = late["refusals"] and not (drawn["contradiction"] or drawn["leave"])
        return cls(**drawn, **late)

    @property
    def fatal(self) -> bool:
        """Whether the job may end with a failure."""
        return self.crash or self.abort or self.impatience

    def __str__(self) -> str:
        return " ".join(field.name for field in fields(self) if getattr(self, field.name)) or "nothing"
