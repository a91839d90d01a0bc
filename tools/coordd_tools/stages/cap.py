"""A model that needs three times as much memory as a rank may have, trained on four ranks.

Training needs memory for the weights, as much again for gradients, and twice as much for AdamW's state. The cap is a
third of that. It is the kernel's own (``RLIMIT_DATA``), set before anything is imported, and covers all private data of
a process: interpreter, libraries' data, thread stacks, weights, gradients, state, activations, messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from coordd_tools.bench.group import GroupError
from coordd_tools.stages.memory import RETURNED
from coordd_tools.stages.ranks import Outcome, attempt

__all__ = ["PARTS", "STATE", "WIDTH", "Row", "layers_of", "measure"]

PARTS, STATE, WIDTH = 3, 4, 2048
"""The need divided by the cap, values per parameter, and the width of the layers."""


@dataclass(frozen=True)
class Row:
    """One way to train the model.

    Attributes:
        way: a description.
        ranks: the number of ranks.
        limit: bytes of data that each rank may have; 0 for no limit.
        losses: the losses of the steps; empty if training failed.
        peaks: peak resident bytes of each rank, shared ones included.
        failure: the last line of stderr, if training failed.
    """

    way: str
    ranks: int
    limit: int
    losses: tuple[float, ...]
    peaks: tuple[int, ...]
    failure: str = ""


def layers_of(need: int) -> int:
    """Returns the number of layers whose training needs this many bytes."""
    return need // (STATE * 4 * WIDTH * WIDTH)


def measure(need: int, ranks: int) -> Iterator[Row]:
    """Trains the model in one piece without a cap, in one piece under the cap, and in stages under the cap.

    Raises:
        GroupError: a run that should have trained failed, or a run that should have failed trained.
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
