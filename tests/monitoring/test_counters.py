from __future__ import annotations

import numpy as np

from coordd.monitoring.counters import Traffic
from coordd.negotiation.tensor_table import Entry
from coordd.ops.handles import Handle
from coordd.ops.messages import Kind, Request


def entry(kind, count):
    return Entry(Request(kind, "w"), np.zeros(count), Handle("w"))


def test_operations_and_bytes_are_added_up_by_kind():
    traffic = Traffic()
    traffic.count([entry(Kind.ALLREDUCE, 3), entry(Kind.ALLREDUCE, 1)])
    traffic.count([entry(Kind.ALLREDUCE, 2)])
    traffic.count([entry(Kind.BROADCAST, 1)])
    assert {kind: count for kind, count in traffic.operations.items() if count} == {
        Kind.ALLREDUCE: 3,
        Kind.BROADCAST: 1,
    }
    assert {kind: count for kind, count in traffic.bytes.items() if count} == {Kind.ALLREDUCE: 48, Kind.BROADCAST: 8}
