"""Training steps of TensorFlow: what they take, and what the exchange adds to them; read as those of `step`."""

from __future__ import annotations

from functools import partial

from coordd_tools.bench.step import columns, report_beside

__all__ = ["COLUMNS", "report"]

PEER = "mwms"
COLUMNS = columns(PEER)
report = partial(report_beside, PEER)
