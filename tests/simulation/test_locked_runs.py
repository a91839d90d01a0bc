"""Simulated jobs with a locked plan: a steady program falls silent, and bugs of the lock are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from coordd.negotiation.worker import Member
from coordd.ops.messages import Kind, Request
from coordd_tools.sim import simulation
from coordd_tools.sim.caches import leftovers
from coordd_tools.sim.scenes import Crossing, Scenes
from coordd_tools.sim.script import Part, Round, Script
from coordd_tools.sim.setting import Settings
from coordd_tools.sim.simulation import Simulation
from coordd_tools.sim.swarm import Swarm
from tests.simulation.lock_mutants import LOCK_MUTANTS
from tests.simulation.planting import found

RANKS, NAMES = 3, "abcdefg"
STEPS = 20
LOCKS = Swarm(locks=True)
ENOUGH = 2000
LATE = {"holds_back_what_is_waited_for": 1189, "lets_fillers_in": 300, "lets_other_shapes_in": 157}


def script(steps: int, *, other: range = range(0)) -> Script:
    """Steps that are equal, but for some in which one tensor has another shape; all ranks submit in the same order."""
    written = tuple(
        tuple(turn(step, name, 3 if name == "c" and step in other else 2) for name in NAMES) for step in range(steps)
    )
    return Script(written, tuple((step,) * RANKS for step in written), {})


def turn(step: int, name: str, length: int) -> Round:
    part = Part(Request(Kind.ALLREDUCE, name, "float32", (length,)), 1, filler=False)
    return Round(step, name, dict.fromkeys(range(RANKS), part), "")


def run(
    job: Script,
    *,
    lock_steps: int = 3,
    seed: int = 0,
    swarm: Swarm = LOCKS,
    stall_seconds: float = 5.0,
    show: Callable[[str], None] | None = None,
) -> Simulation:
    settings = Settings(
        size=RANKS,
        cache_capacity=64,
        fusion_bytes=16,
        stall_seconds=stall_seconds,
        abort_seconds=0.0,
        lock_steps=lock_steps,
        early=0.0,
        steps=len(job.steps),
    )
    made = Simulation(settings, swarm, job, Random(seed), show=show)
    made.run()
    return made


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(1, 5))])
def test_a_steady_program_locks_once_and_sends_nothing_from_then_on(seed):
    short, long = (run(script(steps), seed=seed) for steps in (20, 200))
    assert short.hub.locks == long.hub.locks == 1
    assert long.words.locked > 8 * short.words.locked > 0
    assert long.network.carried <= short.network.carried + 2 * RANKS  # chance cuts the first steps into plans
    assert run(script(200), lock_steps=0).network.carried > 10 * long.network.carried


def test_a_step_that_differs_ends_the_lock_and_a_few_equal_ones_make_the_next():
    made = run(script(60, other=range(30, 31)))
    assert made.hub.locks == 2
    assert made.words.locked > 40 * len(NAMES) / 2


def test_memory_is_flat_while_locks_come_and_go():
    made = run(script(300, other=range(0, 300, 10)))
    assert made.hub.locks == 30
    assert leftovers(made.hub)["locks"] <= 1
    assert not any(process.member._locks for process in made.ranks)


@pytest.mark.parametrize("seed", range(5))
def test_ranks_that_wait_for_each_others_words_are_told(seed, monkeypatch):
    """Each has given its word on the bucket that it waits for; the stall check, which breaks locks too, is too late."""
    first, second = (replace(turn(STEPS, name, 5), free=True) for name in "ab")  # 20 bytes, a bucket of its own
    ahead, back = ((first, True), (second, True)), ((second, True), (first, True))
    barrier = Part(Request(Kind.BARRIER, "agreement", transient=True), 1, filler=False)
    agreement = Round(STEPS + 1, "agreement", dict.fromkeys(range(RANKS), barrier), "", free=True)
    crossing = Crossing((ahead, back, ahead), {}, frozenset(), agreement)
    monkeypatch.setattr(simulation, "draw", lambda *_: Scenes({STEPS - 1: crossing}))
    steps = tuple(tuple(turn(step, name, 5) for name in "ab") for step in range(STEPS))
    job = Script(steps, tuple((step,) * RANKS for step in steps), {})
    shown: list[str] = []
    made = run(job, seed=seed, swarm=Swarm(locks=True, blocks=True), stall_seconds=1e4, show=shown.append)
    assert made.hub.locks == 1
    assert any("attribute='order'" in line for line in shown)
    assert made.agenda.now < 10.0


@pytest.mark.parametrize("plant", LOCK_MUTANTS.values(), ids=LOCK_MUTANTS.keys())
def test_a_bug_is_found(plant, monkeypatch):
    plant(monkeypatch)
    assert found(filter(may_lock, range(ENOUGH)), LATE.get(plant.__name__))


def may_lock(seed: int) -> bool:
    swarm = Swarm.draw(Random(seed))
    return swarm.locks and swarm.steady


def in_two_phases() -> Script:
    """A tensor in each step, then another one: when the second is locked, data of the first may still move."""
    names = "aaaaaaaa" + 30 * "b"
    written = tuple((turn(step, name, 2),) for step, name in enumerate(2 * names))
    return Script(written, tuple((step,) * RANKS for step in written), {})


def run_all_phases() -> None:
    for seed in range(20):
        run(in_two_phases(), seed=seed, swarm=PHASES, lock_steps=2)


PHASES = Swarm(locks=True, overlap=True, phases=True)


def test_a_lock_may_begin_while_data_of_the_one_before_moves():
    """Votes on buckets with the same index are given in the same order on all ranks."""
    run_all_phases()


def test_votes_that_are_given_before_those_of_an_older_lock_are_found(monkeypatch):
    monkeypatch.setattr(Member, "_give", lambda self, word: self._words.append(word))
    with pytest.raises(RuntimeError, match="comes after"):
        run_all_phases()
