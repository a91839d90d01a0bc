"""Benchmark of TensorFlow training steps: their time, and the overhead of the gradient exchange; as in `step`."""

from __future__ import annotations

from functools import partial

from coordd_tools.bench.step import columns, report_beside

__all__ = ["COLUMNS", "report"]

PEER = "mwms"
COLUMNS = columns(PEER)
report = partial(report_beside, PEER)
