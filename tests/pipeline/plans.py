"""Every schedule, for the tests of what is true of all of them."""

from __future__ import annotations

from functools import partial

from coordd.pipeline.lowering import chain, lower
from coordd.pipeline.plan import Plan
from coordd.pipeline.schedules.schedule import (
    eager,
    gpipe,
    interleaved,
    one_f_one_b,
    pipedream,
    two_buffered,
    zero_bubble,
    zero_bubble_far,
    zero_bubble_far_lean,
    zero_bubble_lean,
    zero_bubble_v,
)

SIZES = [(ranks, microbatches) for ranks in range(2, 9) for microbatches in range(ranks, 4 * ranks + 1)]
FLUSHING = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "1f1b-eager": eager,
    "interleaved": interleaved,
    "interleaved by 3": partial(interleaved, chunks=3),
    "zb-h1": zero_bubble,
    "zb-h2": zero_bubble_far,
    "zb-lean": zero_bubble_lean,
    "zb-h2-lean": zero_bubble_far_lean,
    "zb-v": zero_bubble_v,
}
STALE = {"pipedream": pipedream, "2bw": partial(two_buffered, steps=3)}
ALL = FLUSHING | STALE


def chained(plan: Plan) -> Plan:
    """Lowers a plan for stages of which each takes what the one before gives."""
    return lower(plan, chain(plan.stages))
