"""The data plane alone: overlapping process sets, slow ranks, queues, words, and slots that are used again and again.

More: ``python -m coordd_tools.sim --data --seeds 100000``.
"""

from __future__ import annotations

import pytest

from coordd_tools.sim.cli import main
from coordd_tools.sim.data import move
from coordd_tools.sim.ledger import Violation
from tests.simulation.data_mutants import DATA_MUTANTS
from tests.simulation.planting import found

BLOCK = 50
ENOUGH = 3000
LATE = {
    "lets_words_on_a_bucket_overtake_each_other": 248,
    "job takes_slots_in_any_order": 17,
    "job gives_slots_to_all_sets_in_turn": 18,
}


@pytest.mark.parametrize("first", range(0, 200, BLOCK))
def test_every_result_is_right_and_everything_ends(first):
    for seed in range(first, first + BLOCK):
        try:
            move(seed)
        except Violation as violation:
            pytest.fail(f"seed {seed}: {violation}\nsee: python -m coordd_tools.sim --data --seed {seed}")


@pytest.mark.parametrize("plant", DATA_MUTANTS.values(), ids=DATA_MUTANTS.keys())
def test_a_bug_is_found(plant, monkeypatch):
    plant(monkeypatch)
    assert found(range(ENOUGH), LATE.get(plant.__name__), run=move)


@pytest.mark.parametrize("name", ["takes_slots_in_any_order", "gives_slots_to_all_sets_in_turn"])
def test_a_simulated_job_finds_that_sets_confuse_their_slots(name, monkeypatch):
    DATA_MUTANTS[name](monkeypatch)
    assert found(range(ENOUGH), LATE.get(f"job {name}"))


def test_the_same_seed_gives_the_same_run():
    assert move(4649) == move(4649)
    assert len({move(seed).turns for seed in range(10)}) > 3


def test_the_command_runs_one_seed_or_many(capsys, monkeypatch):
    assert main(["--data", "--seed", "7"]) == 0
    assert "seed=7" in capsys.readouterr().out
    assert main(["--data", "--seeds", "3", "--first", "5"]) == 0
    assert capsys.readouterr().out.startswith("3 seeds in ")
    DATA_MUTANTS["keeps_what_it_has_borrowed"](monkeypatch)
    assert main(["--data", "--seeds", "50"]) == 1
    told = capsys.readouterr().out.splitlines()[-2:]
    seed = told[0].partition(":")[0].removeprefix("seed ")
    assert told[1] == f"see: python -m coordd_tools.sim --data --seed {seed}"
