"""What the main thread of a simulated rank does: computes, submits, waits, leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from coordd.messages import Kind
from coordd_tools.sim.ledger import Submission
from coordd_tools.sim.script import Round
from coordd_tools.sim.setting import Setting

__all__ = ["Pause", "Worker", "program"]

_COMPUTE, _BURST, _STALL = 5e-4, 5e-6, 20.0
_DUPLICATED, _STALLED = 0.15, 0.02

Pause = float | list[Submission]
"""Seconds of computing, or what the thread waits for."""


class Worker(Protocol):
    """What the program may ask of its daemon."""

    rank: int

    def submit(self, turn: Round, *, duplicate: bool = False) -> Submission:
        """Submits this rank's part of a round; fails it at once if the job has failed."""
        ...

    def busy(self, name: str) -> bool:
        """Says whether a submission under this name would be a duplicate now."""
        ...

    def say_goodbye(self) -> None:
        """Leaves the job."""
        ...


def program(worker: Worker, setting: Setting) -> Iterator[Pause]:
    """Runs the script of one rank, as a generator of its pauses."""
    orders = [order[worker.rank] for order in setting.script.orders]
    last_step, last_round = setting.script.leavers.get(worker.rank, (len(orders), 0))
    mine: dict[str, Submission] = {}
    for order in orders[:last_step]:
        yield from _step(worker, setting, order, mine)
        if not setting.swarm.overlap:
            yield [*mine.values()]
    for order in orders[last_step : last_step + 1]:
        yield from _step(worker, setting, order[:last_round], mine)
    if not last_round:  # who leaves in the middle of a step does not wait: others might, for what he has not submitted
        yield [*mine.values()]
    worker.say_goodbye()


def _step(worker: Worker, setting: Setting, order: tuple[Round, ...], mine: dict[str, Submission]) -> Iterator[Pause]:
    """Submits one step's tensors."""
    rng, swarm = setting.rng, setting.swarm
    pause = 1 / (_BURST if swarm.burst else _COMPUTE)
    for turn in order:
        yield rng.expovariate(pause)
        if swarm.stall and rng.random() < _STALLED:
            yield rng.expovariate(1 / _STALL)
        if turn.name in mine:
            yield [mine[turn.name]]
        mine[turn.name] = worker.submit(turn)
        if turn.parts[worker.rank].request.kind is Kind.JOIN:
            yield [mine[turn.name]]
        if rng.random() < setting.settings.early:
            yield [rng.choice([*mine.values()])]
        if swarm.duplicates and rng.random() < _DUPLICATED:
            yield from _duplicate(worker, turn, setting)


def _duplicate(worker: Worker, turn: Round, setting: Setting) -> Iterator[Pause]:
    """Submits the same name again, at once or after a while, as long as it is in flight."""
    if setting.rng.randrange(2):
        yield setting.rng.expovariate(1 / _COMPUTE)
    if worker.busy(turn.name):
        worker.submit(turn, duplicate=True)
