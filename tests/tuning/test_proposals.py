from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from coordd.errors import ConfigError
from coordd.tuning.proposals import Proposals, require_optuna
from coordd.tuning.settings import Space
from tests.synthetic import START, space_of
from tests.tuning.found import other

optuna = pytest.importorskip("optuna")

SPACE = space_of(compressions=("bf16",))
SMALL = Space(fusion_mb=(32.0,), cycle_ms=(0.0, 20.0), buckets=(1, 2), algorithm=("slices",), compression=("none",))


def proposed(proposals, count, *, relative=lambda _: 1.0):
    found = []
    for _ in range(count):
        settings = proposals.propose()
        if settings is None:
            break
        found.append(settings)
        proposals.learn(settings, relative(settings))
    return found


def fresh(space=SPACE, **options) -> Proposals:
    proposals = Proposals(space, START, **options)
    proposals.learn(START, 1.0)
    return proposals


def test_proposals_are_choices_and_never_twice_the_same():
    found = proposed(fresh(), 80)
    assert len(set(found)) == len(found) == 80
    assert START not in found
    assert all(settings in SPACE for settings in found)


def test_the_first_ones_are_steps_away_from_the_start():
    found = proposed(fresh(), 9)
    assert found[0] == other(cycle_ms=0.0, buckets=2)
    assert {other(fusion_mb=8.0), other(fusion_mb=128.0), other(cycle_ms=5.0), other(algorithm="ring")} <= set(found)
    assert other(compression="bf16") in found


def test_a_small_space_is_exhausted():
    found = proposed(fresh(SMALL), 10)
    assert len(found) == 3
    assert fresh(Space.around(START)).propose() is not None
    one = msgspec.structs.replace(SMALL, cycle_ms=(20.0,), buckets=(1,))
    assert fresh(one).propose() is None


def test_knobs_with_one_choice_stay_as_they_are():
    assert {settings.fusion_mb for settings in proposed(fresh(SMALL), 10)} == {32.0}


def test_they_lean_towards_what_was_fast():
    found = proposed(fresh(seed=2), 60, relative=lambda settings: 0.5 + abs(settings.buckets - 8) / 16)
    late = [settings.buckets for settings in found[30:]]
    assert late.count(8) > len(late) / 3


def test_equal_seeds_propose_the_same_and_others_something_else():
    first, second, third = (proposed(fresh(seed=seed), 25) for seed in (3, 3, 4))
    assert first == second
    assert first != third


def test_a_later_run_goes_on_with_other_candidates():
    first = proposed(fresh(), 15)
    again = fresh()
    for settings in first:
        again.learn(settings, 1.0)
    assert not set(proposed(again, 15)) & set(first)


def test_the_users_own_studies_keep_their_voice():
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.INFO)
    try:
        proposed(fresh(), 2)
        assert optuna.logging.get_verbosity() == optuna.logging.INFO
    finally:
        optuna.logging.set_verbosity(before)


def test_a_missing_optuna_is_named_with_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'coordd\[tune\]'"):
        require_optuna()
    with pytest.raises(ConfigError, match="needs Optuna"):
        fresh().propose()


def test_optuna_is_imported_with_the_first_proposal_only():
    source = (
        "import sys, coordd, coordd.launch.cli, coordd.tuning.session, coordd.tuning.proposals as module\n"
        "module.require_optuna()\n"
        "print('optuna' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_search_needs_neither_network_nor_database():
    source = (
        "import socket, sqlite3, sys\n"
        "def refuse(*_): raise AssertionError('a connection was made')\n"
        "sqlite3.connect = socket.socket.connect = socket.create_connection = refuse\n"
        "from tests.tuning.test_proposals import fresh, proposed\n"
        "proposed(fresh(), 30)\n"
        "print({'sqlalchemy', 'torch', 'scipy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    assert done.stdout == "set()\n", done.stderr
