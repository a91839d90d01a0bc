"""A record with a trial of each outcome."""

from __future__ import annotations

import msgspec

from coordd.tuning.autotune import Outcome, Progress, Trial
from coordd.tuning.key import Key
from coordd.tuning.record import Record
from tests.synthetic import START, space_of

__all__ = ["KEY", "RECORD", "other"]

KEY = Key(model="0123456789abcdef", world="2+2", host="4 x <Fast & Cheap>")


def other(**changes):
    return msgspec.structs.replace(START, **changes)


_TRIALS = (
    Trial(settings=other(fusion_mb=8.0), ratios=(1.08,), seconds=0.0108, outcome=Outcome.NO_GAIN),
    Trial(settings=other(buckets=2), ratios=(0.88, 0.9, 0.92), seconds=0.009, outcome=Outcome.FASTER),
    Trial(settings=other(buckets=16), base=0.9, ratios=(6.0,), seconds=0.054, outcome=Outcome.NO_GAIN),
    Trial(settings=other(cycle_ms=0.0), base=0.9, ratios=(0.97,) * 8, seconds=0.009, outcome=Outcome.UNCLEAR),
    Trial(settings=other(algorithm="ring"), base=0.9, ratios=(0.95,), seconds=0.009),
    Trial(settings=other(algorithm="ring", buckets=2), base=0.9),
)
RECORD = Record(
    key=KEY,
    space=space_of(),
    progress=Progress(
        start=START,
        best=other(buckets=2),
        relative=0.9,
        noise=0.021,
        steps=12_345,
        spent=99,
        trials=_TRIALS,
    ),
)
