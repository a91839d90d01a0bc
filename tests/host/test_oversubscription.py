from __future__ import annotations

import logging

import pytest

from coordd import api
from coordd.host import oversubscription
from coordd.host.cores import Cores
from coordd.host.oversubscription import Crowd, oversubscribed, threads_asked
from coordd.host.world import World

FOUR = Cores(((0,), (1,), (2,), (3,)))


@pytest.mark.parametrize(
    ("cores", "local_size", "threads", "crowded"),
    [(2, 2, 1, False), (2, 2, 2, True), (2, 3, 1, True), (8, 2, 4, False)],
)
def test_more_threads_than_cores_take_turns(cores, local_size, threads, crowded):
    assert oversubscribed(cores, local_size, threads) is crowded


@pytest.mark.parametrize(("text", "threads"), [("4", 4), (" 4,2 ", 4), ("", 0), ("many", 0)])
def test_the_outermost_number_of_threads_counts(text, threads):
    assert threads_asked({"OMP_NUM_THREADS": text}) == threads
    assert threads_asked({}) == 0


def test_a_rank_that_was_told_nothing_has_a_thread_for_each_core_that_it_may_use(monkeypatch):
    halves = {(): FOUR.without(frozenset({2, 3})), (7, 8): FOUR}
    monkeypatch.setattr(oversubscription, "cores_here", lambda *pids: halves[pids])
    assert Crowd.of((7, 8), {}) == Crowd(cores=4, local_size=2, threads=2)
    assert Crowd.of((7, 8), {"OMP_NUM_THREADS": "3"}) == Crowd(4, 2, 3)


@pytest.mark.parametrize(
    ("found", "advice"),
    [
        (Crowd(4, 2, 2), ""),
        (
            Crowd(4, 2, 4),
            (
                "2 ranks of 4 threads take turns on 4 of this host's cores: set OMP_NUM_THREADS=2, or start the ranks "
                "with `coordd run`, which does"
            ),
        ),
        (Crowd(4, 6, 1), "6 ranks take turns on 4 of this host's cores: start fewer here, or ask for more cores"),
    ],
)
def test_too_many_threads_are_told_what_to_do(found, advice):
    assert found.advice == advice


MISSPELT = "COORDD_FUSION_MBS is no setting of coordd and has no effect; did you mean COORDD_FUSION_MB?"


class Ranks:
    """As much of a daemon as the warning looks at."""

    neighbours = (7, 8)

    def __init__(self, rank):
        self.world = World(rank, ("a", "a", "b"))


@pytest.mark.parametrize(("rank", "launched", "warnings"), [(0, False, 1), (1, False, 0), (0, True, 0)])
def test_one_rank_of_a_host_warns_unless_the_launcher_has(rank, launched, warnings, monkeypatch, caplog):
    monkeypatch.setattr(oversubscription, "cores_here", lambda *pids: FOUR)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    if launched:
        monkeypatch.setenv("COORDD_LAUNCHED", "1")
    else:
        monkeypatch.delenv("COORDD_LAUNCHED", raising=False)
    with caplog.at_level(logging.WARNING, "coordd"):
        api._advise(Ranks(rank))
    assert len(caplog.records) == warnings


@pytest.mark.parametrize(("rank", "launched", "warnings"), [(0, False, 1), (1, False, 0), (2, False, 0), (0, True, 0)])
def test_one_rank_of_all_warns_of_a_misspelt_setting_unless_the_launcher_has(
    rank, launched, warnings, monkeypatch, caplog
):
    monkeypatch.setattr(oversubscription, "cores_here", lambda *pids: FOUR)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COORDD_FUSION_MBS", "4")
    monkeypatch.delenv("COORDD_LAUNCHED", raising=False)
    if launched:
        monkeypatch.setenv("COORDD_LAUNCHED", "1")
    with caplog.at_level(logging.WARNING, "coordd"):
        api._advise(Ranks(rank))
    assert [record.getMessage() for record in caplog.records] == [MISSPELT] * warnings
