"""How bugs are planted, and how the simulator finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from coordd_tools.sim.ledger import Violation
from coordd_tools.sim.simulation import simulate

__all__ = ["Mutants", "found"]

Mutant = Callable[..., None]


class Mutants(dict[str, Mutant]):
    """Bugs, by the names of the functions that plant them."""

    def enter(self, write: Mutant) -> Mutant:
        """Enters a bug; a decorator."""
        self[write.__name__] = write
        return write


def found(seeds: Iterable[int], known: int | None = None) -> bool:
    """Whether the run of any seed violates an invariant; one that is known to is tried first, for chance takes long."""
    return any(map(_fails, chain([] if known is None else [known], seeds)))


def _fails(seed: int) -> bool:
    try:
        simulate(seed)
    except Violation:
        return True
    return False
