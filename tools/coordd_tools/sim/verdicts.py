"""The error text of a mismatch as the simulator computes it, for comparison with the protocol's."""

from __future__ import annotations

from coordd.errors import MismatchError
from coordd.ops.messages import Kind, Request
from coordd_tools.sim.script import ROOTLESS, Round

__all__ = ["quarrel_text"]


def quarrel_text(turn: Round) -> str:
    """Returns the error text of a round whose parts disagree: each value, its ranks, and where they submitted it."""
    if turn.quarrel == ROOTLESS:
        root = next(iter(turn.parts.values())).request.root
        return f"broadcast of {turn.name!r} from rank {root}, which has joined and has nothing to send"
    by_value: dict[str, list[int]] = {}
    for rank in turn.members:
        by_value.setdefault(_shown(turn.parts[rank].request, turn.quarrel), []).append(rank)
    told = []
    for value, ranks in by_value.items():
        lines = dict.fromkeys(turn.parts[rank].line for rank in ranks)
        told.append((value, ranks, [f"train.py:{line}" for line in lines]))
    return str(MismatchError(turn.name, turn.quarrel, told))


def _shown(request: Request, attribute: str) -> str:
    shape = request.shape
    if request.kind in {Kind.ALLGATHER, Kind.ALLTOALL}:
        shown = "(any" + "".join(f", {length}" for length in shape[1:]) + ")"
    else:
        shown = str(shape)
    return {
        "operation": request.kind.name.lower(),
        "dtype": request.dtype,
        "shape": shown,
        "reduction": request.op.name.lower(),
        "scale factors": f"prescale {request.prescale!r}, postscale {request.postscale!r}",
        "root rank": str(request.root),
    }[attribute]
