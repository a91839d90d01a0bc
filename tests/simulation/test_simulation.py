"""Simulated jobs: nothing lost, nothing twice, the same order everywhere, bounded memory.

A hundred in `make test`, a thousand in `make test-all`; more: ``python -m coordd_tools.sim --seeds 100000``.
"""

from __future__ import annotations

import linecache
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType

import pytest

from coordd.negotiation import (
    absence,
    aggregator,
    ballot,
    coordinator_lock,
    cycle_detector,
    deadlock,
    leavers,
    locked_plan,
    message_table,
    pending_errors,
    rejections,
    response_cache,
    roll,
    tally,
    validation,
    worker,
)
from coordd_tools.sim.cli import main
from coordd_tools.sim.ledger import Violation
from coordd_tools.sim.simulation import simulate
from tests.simulation.mutants import MUTANTS
from tests.simulation.planting import found

BLOCK = 100
BLOCKS = [0, *(pytest.param(first, marks=pytest.mark.sweep) for first in range(BLOCK, 1000, BLOCK))]
ENOUGH = 3000
LATE = {"takes_a_dead_rank_for_one_that_has_left": 67, "takes_fillers_for_the_real_thing": 45}


@pytest.mark.parametrize("first", BLOCKS)
def test_the_invariants_hold(first):
    for seed in range(first, first + BLOCK):
        try:
            simulate(seed)
        except Violation as violation:
            pytest.fail(f"seed {seed}: {violation}\nsee: python -m coordd_tools.sim --seed {seed} --trace")


def test_what_was_agreed_lands_even_if_a_rank_is_frozen_while_all_leave():
    simulate(40_071_859)


def test_a_stall_may_be_told_of_a_rank_whose_failure_is_on_its_way():
    """One seed in tens of thousands: a rank complains and fails before the coordinator has looked into it."""
    simulate(20_031_716)


def test_what_is_submitted_after_a_refusal_is_not_gathered_for_a_lock_that_was_made_before():
    simulate(2_059_558)


def test_ranks_may_be_told_to_have_waited_for_each_other_after_one_has_broken_its_wait_off():
    """Its next operation is under way to the coordinator then, behind the word that it does not wait any more."""
    simulate(2_008_823)


@pytest.mark.parametrize("plant", MUTANTS.values(), ids=MUTANTS.keys())
def test_a_bug_is_found(plant, monkeypatch):
    plant(monkeypatch)
    assert found(range(ENOUGH), LATE.get(plant.__name__))


def test_the_same_seed_gives_the_same_run():
    lines: list[list[str]] = [[], []]
    first, again = (simulate(4649, show=shown.append) for shown in lines)
    assert first == again
    assert lines[0] == lines[1]
    assert len({simulate(seed).digest for seed in range(10)}) == 10


def test_the_run_does_not_depend_on_the_process():
    """Neither on the order of sets nor on addresses in memory."""
    here = simulate(11)
    for salt in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": salt, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-m", "coordd_tools.sim", "--seed", "11"]
        run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=60)
        assert here.digest in run.stdout


PURE = (
    absence,
    ballot,
    response_cache,
    deadlock,
    aggregator,
    coordinator_lock,
    leavers,
    locked_plan,
    worker,
    message_table,
    pending_errors,
    rejections,
    cycle_detector,
    roll,
    tally,
    validation,
)
RARE = (
    210,
    517,
    157,
    66,
    114,
    186,
    695,
    272,
    22,
    274,
    321,
    339,
    113,
    140,
    34,
    23,
    7,
    0,
    3,
    10,
    12,
    16,
    19,
)  # for one, a rank speaks of what is locked before it knows of the lock
# Signs of life come after 256 plans; the long run has them.
SIGNS_OF_LIFE = ("report = Report(self._seen)", "out = [self._report()]")
# `coordd status` looks at these from outside; the protocol itself does not.
LOOKS = ("return self._seen", "return self._lock", "return len(self._lines)")
# In scripts in which ranks leave in the middle none joins, and none refuses a call; `test_member_join` has the one, and
# `test_refusals` the other.
LEAVERS = ("self._end_absence(entry)", "del self._calls[name]", "self._refuse_part(refused, name)")
# What a rank has submitted of a call that it refuses and would announce anew is rare; `test_member_refusals` has it. So
# are refusals of what has failed before, of which `test_refusing` and `test_member_refusals` have some. A lock that
# breaks while a script polls is the loop's affair; `test_liveness` has it.
NOT_SIMULATED = {"held_since", "_fail_refused", "_refuse_part", "claim_refused", "discharge"}
# So is what comes between the error of a deadlock and its acknowledgement; `test_flush` has it.
NOT_SIMULATED |= {"_acknowledge", "_reports", "_restarted_since", "told"}
RECOVERY = (
    "self._later.append(",
    "met = bits(part.inside & ranks)",
    "part.before |= {rank: plan for rank in met",
)


@pytest.mark.sweep
def test_a_few_seeds_reach_every_line_of_the_protocol():
    """Else the thousand would show little: a line that is never run is never wrong."""
    functions = [code for module in PURE for code in _functions(module) if code.co_name not in NOT_SIMULATED]
    missed = {code: set(_lines(code)) for code in functions}

    def enter(frame: FrameType, event: str, argument: object) -> Callable[..., object] | None:
        return visit if missed.get(frame.f_code) else None  # what has been reached is not watched any longer

    def visit(frame: FrameType, event: str, argument: object) -> Callable[..., object] | None:
        missed[frame.f_code].discard(frame.f_lineno)
        return visit

    def unseen() -> list[str]:
        told = [linecache.getline(code.co_filename, line).strip() for code, lines in missed.items() for line in lines]
        return [line for line in told if not line.startswith((*SIGNS_OF_LIFE, *LOOKS, *LEAVERS, *RECOVERY))]

    for seed in (*RARE, *range(200)):
        before = sys.gettrace()
        sys.settrace(enter)
        try:
            simulate(seed)
        finally:
            sys.settrace(before)
        if not unseen():
            break
    assert unseen() == []


def _functions(module: object) -> Iterator[CodeType]:
    """The functions and methods that a module defines; a class's ``__len__`` and the like are not the protocol."""
    owners = [module, *(value for value in vars(module).values() if isinstance(value, type))]
    for owner in owners:
        for name, value in vars(owner).items():
            function = getattr(getattr(value, "fget", value), "__wrapped__", getattr(value, "fget", value))
            code = getattr(function, "__code__", None)
            if code is not None and code.co_filename == module.__file__ and name != "__len__":
                yield code


def _lines(code: CodeType) -> Iterator[int]:
    return (line for _, _, line in code.co_lines() if line and line != code.co_firstlineno)


def test_the_command_runs_one_seed_or_many(capsys):
    assert main(["--seed", "7"]) == 0
    assert simulate(7).digest in capsys.readouterr().out
    assert main(["--seed", "7", "--trace"]) == 0
    assert "coordinator Plan(" in capsys.readouterr().out
    assert main(["--seeds", "3", "--first", "5"]) == 0
    assert capsys.readouterr().out.startswith("3 seeds in ")


def test_the_command_names_the_seed_that_fails(capsys, monkeypatch):
    MUTANTS["releases_before_the_last_member"](monkeypatch)
    assert main(["--seeds", "50"]) == 1
    told = capsys.readouterr().out.splitlines()[-2:]
    seed = told[0].partition(":")[0].removeprefix("seed ")
    assert told[1] == f"see: python -m coordd_tools.sim --seed {seed} --trace"
    assert main(["--seed", seed]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == told[0]
