"""How bugs are planted, and how the simulator finds them."""

from __future__ import annotations

from collections.abc import Callable

from coordd_tools.sim.ledger import Violation
from coordd_tools.sim.simulation import simulate

__all__ = ["Mutants", "fails"]

Mutant = Callable[..., None]


class Mutants(dict[str, Mutant]):
    """Bugs, by the names of the functions that plant them."""

    def enter(self, write: Mutant) -> Mutant:
        """Enters a bug; a decorator."""
        self[write.__name__] = write
        return write


def fails(seed: int) -> bool:
    """Whether a run violates an invariant."""
    try:
        simulate(seed)
    except Violation:
        return True
    return False
