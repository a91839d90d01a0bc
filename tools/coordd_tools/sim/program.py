"""The main thread of a simulated rank: computes, submits, waits, leaves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from coordd.errors import PeerError
from coordd.ops.messages import Kind, Refused
from coordd_tools.sim.ledger import Submission, demand
from coordd_tools.sim.letters import Letter, Receipt
from coordd_tools.sim.scenes import Call, Crossing
from coordd_tools.sim.script import Round
from coordd_tools.sim.setting import Setting

__all__ = ["Pause", "Worker", "program"]

_COMPUTE, _BURST, _STALL = 5e-4, 5e-6, 20.0
_DUPLICATED, _STALLED = 0.15, 0.02
_THREAD = 0.1
_TRIES = 200

Made = Submission | Receipt
Pause = float | list[Made] | tuple[Made, float]
"""Seconds of computing, operations to wait for, or an operation and the seconds until an exception ends the wait."""


class Worker(Protocol):
    """The requests that a program may make of its daemon."""

    rank: int

    @property
    def busy_beside(self) -> bool:
        """Whether another thread has yet to submit something."""
        ...

    def submit(self, turn: Round, *, duplicate: bool = False) -> Submission:
        """Submits this rank's part of a round; it fails at once if the job has failed."""
        ...

    def busy(self, name: str) -> bool:
        """Returns whether a submission under this name would be a duplicate now."""
        ...

    def exchange(self, letter: Letter) -> Receipt | None:
        """Sends or starts to receive a message; returns None for the send of a small one, which needs no wait."""
        ...

    def submit_beside(self, turns: Sequence[tuple[float, Round]]) -> list[Made]:
        """Submits rounds on another thread, each after some seconds; returns the list that will contain them."""
        ...

    def refuse(self, refused: Refused) -> None:
        """Reports that this rank has left a collective call by an exception, or refuses its part of an operation."""
        ...

    def say_goodbye(self) -> None:
        """Leaves the job."""
        ...


def program(worker: Worker, setting: Setting) -> Iterator[Pause]:
    """Runs the script of one rank, as a generator of its pauses."""
    orders = [order[worker.rank] for order in setting.script.orders]
    last_step, last_round = setting.script.leavers.get(worker.rank, (len(orders), 0))
    mine: dict[str, Submission] = {}
    for step, order in enumerate(orders[:last_step]):
        yield from _step(worker, setting, order, mine)
        scene = setting.scenes.after.get(step)
        if scene is not None or not setting.swarm.overlap:
            yield [*mine.values()]
        if isinstance(scene, Call) and worker.rank in scene.members:
            yield from _call(worker, setting, scene)
        elif isinstance(scene, Crossing):
            yield from _cross(worker, setting, scene)
    for order in orders[last_step : last_step + 1]:
        yield from _step(worker, setting, order[:last_round], mine)
    yield from _exchange(worker, setting)
    if not last_round:  # a rank that leaves within a step must not wait: ranks might wait for its missing tensors
        yield [*mine.values()]
    worker.say_goodbye()


def _exchange(worker: Worker, setting: Setting) -> Iterator[Pause]:
    """Runs the last sends and receives, while other ranks leave."""
    made: list[Made] = []
    for letter, waits in setting.scenes.last[worker.rank] if setting.scenes.last else ():
        yield setting.rng.expovariate(1 / _COMPUTE)
        if (begun := worker.exchange(letter)) is not None:
            made.append(begun)
            if waits:
                yield [begun]
    yield made
    _hear(made)


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
        if worker.rank in turn.refusers:
            worker.refuse(_refusal(worker, turn.name, turn.parts[worker.rank].request.members))
            continue
        mine[turn.name] = worker.submit(turn)
        if turn.parts[worker.rank].request.kind is Kind.JOIN:
            yield [mine[turn.name]]
        if rng.random() < setting.settings.early:
            yield [rng.choice([*mine.values()])]
        if swarm.duplicates and rng.random() < _DUPLICATED:
            yield from _duplicate(worker, turn, setting)


def _refusal(worker: Worker, name: str, members: tuple[int, ...]) -> Refused:
    return Refused(worker.rank, "", "refused its part", members, (name,))


def _duplicate(worker: Worker, turn: Round, setting: Setting) -> Iterator[Pause]:
    """Submits the same name again, at once or after a while, as long as it is in flight."""
    if setting.rng.randrange(2):
        yield setting.rng.expovariate(1 / _COMPUTE)
    if worker.busy(turn.name):
        worker.submit(turn, duplicate=True)


def _call(worker: Worker, setting: Setting, call: Call) -> Iterator[Pause]:
    """Runs a collective call; leaves it where this rank refuses it, or where one of its operations fails."""
    rng, made = setting.rng, dict[str, Submission]()
    members = call.rounds[0].parts[worker.rank].request.members
    refused = Refused(worker.rank, call.call, "refused it", members)
    for place, turn in enumerate(call.rounds):
        yield rng.expovariate(1 / _COMPUTE)
        if call.refusals.get(worker.rank) == place:
            worker.refuse(refused)
            yield [*made.values()]
            return
        if turn.name in made or rng.random() < 0.3:
            yield [*made.values()]
        if any(one.failed for one in made.values()):
            break
        made[turn.name] = worker.submit(turn)
    yield [*made.values()]
    if any(one.failed for one in made.values()):
        worker.refuse(refused)


def _cross(worker: Worker, setting: Setting, scene: Crossing) -> Iterator[Pause]:
    """Submits rounds in this rank's own order, up to the first that fails; then agrees with all ranks to continue."""
    rng, made = setting.rng, list[Made]()
    order, reads = scene.orders[worker.rank], worker.rank not in scene.unread
    yield from _refuse(worker, setting, scene)
    if worker.rank in scene.threads:
        made = worker.submit_beside([(rng.expovariate(1.0), turn) for turn, _ in order[1:] if isinstance(turn, Round)])
        order = order[:1]
    for turn, waits in order:
        yield rng.expovariate(1 / _COMPUTE)
        begun = worker.submit(turn) if isinstance(turn, Round) else worker.exchange(turn)
        if begun is None:
            continue
        made.append(begun)
        if waits:
            limit = scene.limits.get((worker.rank, turn))
            yield [made[-1]] if limit is None else (made[-1], limit)
        if reads and made[-1].failed:
            break
    yield from _end(worker, made)
    if reads:
        _hear(made)
    yield from _agree(worker, scene.agreement)


def _end(worker: Worker, made: Sequence[Made]) -> Iterator[Pause]:
    """Waits until all operations have ended, those of another thread too."""
    while any(not one.poll() for one in made) or worker.busy_beside:
        yield [*made]
        if worker.busy_beside:
            yield _THREAD


def _refuse(worker: Worker, setting: Setting, scene: Crossing) -> Iterator[Pause]:
    """Refuses this rank's part of a crossing, if it has one to refuse."""
    if name := scene.refused.get(worker.rank):
        yield setting.rng.expovariate(1 / _COMPUTE)
        worker.refuse(_refusal(worker, name, scene.members))


def _hear(made: Sequence[Made]) -> None:
    """Reads the errors: only now the script knows of them, whenever they occurred."""
    for one in made:
        one.error()


def _agree(worker: Worker, turn: Round) -> Iterator[Pause]:
    """Repeats a barrier until it succeeds or a rank has failed.

    Raises:
        Violation: it does not succeed in `_TRIES` tries.
    """
    for _ in range(_TRIES):
        agreed = worker.submit(turn)
        yield [agreed]
        if not agreed.failed or isinstance(agreed.error(), PeerError):
            return
    demand(holds=False, text=f"rank {worker.rank} has not come together with the others in {_TRIES} tries")
