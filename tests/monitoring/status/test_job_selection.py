from __future__ import annotations

import pytest

from coordd.monitoring.status.address import Address
from coordd.monitoring.status.job_selection import NoJobError, choose, jobs

PARENTS = {101: 50, 102: 50, 201: 60, 50: 1, 60: 1}


def address(pid, rank, job, *, turn=0, met=1):
    return Address(0, pid, turn, met, rank, 2, job)


def ancestors(pid):
    while pid > 1:
        yield pid
        pid = PARENTS[pid]


A = [address(101, 0, "a"), address(102, 1, "a")]
B = [address(201, 1, "77.0")]
BOTH = jobs([*B, *reversed(A)])


def test_ranks_are_sorted_by_job():
    assert BOTH == {"77.0": B, "a": A}


def test_the_latest_address_of_a_process_counts():
    early = address(101, 0, "a", met=0)
    late = address(101, 5, "a", turn=1)
    assert jobs([late, early]) == {"a": [late]}


def test_the_only_job_needs_no_name():
    assert choose({"a": A}, "", ancestors=ancestors) == A


@pytest.mark.parametrize(("word", "found"), [("a", A), ("102", A), ("50", A), ("60", B), ("77", B), ("77.0", B)])
def test_a_job_is_found_by_its_name_a_rank_or_what_has_started_it(word, found):
    assert choose(BOTH, word, ancestors=ancestors) == found


@pytest.mark.parametrize("word", ["", "7", "1000", "b"])
def test_what_does_not_tell_one_job_gets_a_list(word):
    with pytest.raises(NoJobError) as caught:
        choose(BOTH, word, ancestors=ancestors)
    text = str(caught.value)
    assert "coordd status 101  # 2 ranks, job a" in text
    assert "coordd status 201  # 1 of 2 ranks, job 77.0" in text


def test_no_job_at_all_is_said():
    with pytest.raises(NoJobError, match="no job of yours runs on this host"):
        choose({}, "", ancestors=ancestors)
