from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.monitoring.straggler import Lead, behind
from coordd.negotiation.tensor_table import Entry
from coordd.ops.handles import Handle
from coordd.ops.messages import Kind, Request

times = st.lists(st.floats(0.0, 10.0), min_size=3, max_size=3)


def entry(submitted, *, kind=Kind.ALLREDUCE, members=(), patient=False):
    handle = Handle("w")
    handle.submitted = submitted
    found = Entry(Request(kind, "w", members=members), np.zeros(1), handle)
    found.patient = patient
    return found


@given(st.lists(times, min_size=1, max_size=80))
def test_the_difference_of_averages_is_the_average_difference(operations):
    """Whenever results arrive: it is the same moment for all."""
    leads, late = [Lead() for _ in range(3)], [0.0] * 3
    for number, come in enumerate(operations, 1):
        for rank, lead in enumerate(leads):
            lead.observe([entry(come[rank])], max(come) + 0.1)
            late[rank] += (come[rank] - late[rank]) * max(1 / 32, 1 / number)
    found = behind({rank: lead.seconds for rank, lead in enumerate(leads)})
    assert found == pytest.approx({rank: one - min(late) for rank, one in enumerate(late)}, abs=1e-6)


def test_what_was_long_ago_is_forgotten():
    lead = Lead()
    for submitted in [0.0, *[9.0] * 300]:
        lead.observe([entry(submitted)], 10.0)
    assert lead.seconds == pytest.approx(1.0, abs=0.01)


def test_a_bucket_counts_from_when_its_last_tensor_is_there():
    lead = Lead()
    lead.observe([entry(1.0), entry(7.0)], 10.0)
    assert lead.seconds == 3.0


@pytest.mark.parametrize("other", [{"kind": Kind.BROADCAST}, {"members": (0, 1)}, {"patient": True}])
def test_what_other_ranks_do_not_count_is_left_out(other):
    lead = Lead()
    lead.observe([entry(1.0, **other)], 10.0)
    assert lead.seconds == 0.0


def test_who_has_counted_nothing_is_not_compared():
    assert behind({0: 0.5, 1: 0.0, 2: 0.25}) == {0: 0.0, 2: 0.25}
    assert behind({}) == {}
