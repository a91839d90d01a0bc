"""A model that needs three times as much memory as a rank may have, on four ranks.

What training it needs: its weights, as much again of gradients, and twice as much of AdamW's state. The cap is a third
of that. It is the kernel's own (``RLIMIT_DATA``), set before anything is imported, and on all that a process has for
itself: interpreter, libraries' data, stacks of threads, weights, gradients, state, activations, messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from coordd_tools.bench.group import GroupError
from coordd_tools.stages.memory import RETURNED
from coordd_tools.stages.ranks import Outcome, attempt

__all__ = ["PARTS", "STATE", "WIDTH", "Row", "layers_of", "measure"]

PARTS, STATE, WIDTH = 3, 4, 2048
"""The cap's part of what is needed, values for each parameter, and how wide the layers are."""


@dataclass(frozen=True)
class Row:
    """One way to train it.

    Attributes:
        way: which.
        ranks: how many.
        limit: bytes of data that each may have; 0 for any.
        losses: of the steps; empty if it failed.
        peaks: bytes that each rank had in memory at most, shared ones included.
        failure: what was said at last, if it failed.
    """

    way: str
    ranks: int
    limit: int
    losses: tuple[float, ...]
    peaks: tuple[int, ...]
    failure: str = ""


def layers_of(need: int) -> int:
    """How many layers need so many bytes to be trained."""
    return need // (STATE * 4 * WIDTH * WIDTH)


def measure(need: int, ranks: int) -> Iterator[Row]:
    """Trains it in one piece with any memory, in one piece under the cap, and in stages under the cap.

    Raises:
        GroupError: what should have trained failed, or what should have failed trained.
    """
    limit = need // PARTS
    yield _row("in one piece", 1, need, 0, fails=False)
    yield _row("in one piece", 1, need, limit, fails=True)
    yield _row(f"in {ranks} stages", ranks, need, limit, fails=False)


def _row(way: str, ranks: int, need: int, limit: int, *, fails: bool) -> Row:
    settings = {"layers": layers_of(need), "width": WIDTH, "whole": ranks == 1, "data_limit": limit}
    outcome = attempt("cap", ranks, settings, variables=RETURNED)
    if fails != (outcome.code != 0):
        raise GroupError(f"{way}, {limit} bytes a rank, exited with {outcome.code}:\n{outcome.said}", code=1)
    return _failed(way, ranks, limit, outcome) if fails else _trained(way, ranks, limit, outcome)


def _failed(way: str, ranks: int, limit: int, outcome: Outcome) -> Row:
    return Row(way, ranks, limit, (), (), outcome.said.strip().splitlines()[-1])


def _trained(way: str, ranks: int, limit: int, outcome: Outcome) -> Row:
    return Row(way, ranks, limit, tuple(outcome.found["losses"]), tuple(outcome.found["peaks"]))
