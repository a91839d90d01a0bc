"""How bugs are planted, and how the simulator finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from coordd_tools.sim.ledger import Violation
from coordd_tools.sim.simulation import simulate

__all__ = ["Mutants", "found"]

Mutant = Callable[..., None]


def plain(seed: int) -> object:
    """Runs a job in which no rank refuses a call, and none waits for others in a circle."""
    return simulate(seed, scenes=False)


class Mutants(dict[str, Mutant]):
    """Bugs, by the names of the functions that plant them."""

    def enter(self, write: Mutant) -> Mutant:
        """Enters a bug; a decorator."""
        self[write.__name__] = write
        return write


def found(seeds: Iterable[int], known: int | None = None, *, run: Callable[[int], object] = plain) -> bool:
    """Whether the run of any seed violates an invariant.

    Args:
        seeds: those to try.
        known: one that does, for chance takes long; it has to be replaced when the simulator draws something else.
        run: simulates a seed.
    """
    if known is not None and _fails(run, known):
        return True
    first = next((seed for seed in seeds if _fails(run, seed)), None)
    assert known is None or first is None, f"seed {known} does not find this bug any more, but {first} does: enter that"
    return first is not None


def _fails(run: Callable[[int], object], seed: int) -> bool:
    try:
        run(seed)
    except Violation:
        return True
    return False
