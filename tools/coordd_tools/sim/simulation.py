"""One run: drawn from one seed, carried out in virtual time, and checked at the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from coordd.negotiation.aggregator import hub
from coordd.negotiation.channel import Lost
from coordd.ops.messages import Message
from coordd_tools.sim.agenda import Agenda
from coordd_tools.sim.caches import Caches, leftovers
from coordd_tools.sim.exchange import Exchange
from coordd_tools.sim.hub import Hub
from coordd_tools.sim.ledger import Ledger, Violation, demand
from coordd_tools.sim.letters import Routes
from coordd_tools.sim.network import Network
from coordd_tools.sim.payload import Payload
from coordd_tools.sim.process import Process
from coordd_tools.sim.scenes import draw, in_phases, with_refusals
from coordd_tools.sim.script import Script, write
from coordd_tools.sim.setting import Setting, Settings
from coordd_tools.sim.swarm import Swarm, aside
from coordd_tools.sim.trace import Trace
from coordd_tools.sim.words import Words

__all__ = ["Outcome", "Simulation", "simulate"]

_PATIENCE = 1e5
_PHASES = 3
_FREEZE = 1.0


@dataclass(frozen=True)
class Outcome:
    """The summary of a run."""

    seed: int
    swarm: Swarm
    ranks: int
    digest: str
    submissions: int
    messages: int
    plans: int
    locks: int
    locked: int
    refused: int
    events: int
    seconds: float


class Simulation:
    """A job of several ranks, all in this thread."""

    def __init__(
        self,
        settings: Settings,
        swarm: Swarm,
        script: Script,
        rng: Random,
        *,
        show: Callable[[str], None] | None = None,
    ) -> None:
        """Creates the ranks; nothing happens before `run`.

        Args:
            settings: the job's settings.
            swarm: the switches: which events can happen.
            script: the rounds that the ranks submit.
            rng: the random generator.
            show: called with each line of the trace.
        """
        self.agenda = Agenda()
        self.trace = Trace(self.agenda, show)
        self.ledger = Ledger(script)
        self.network = Network(self.agenda, rng, spikes=swarm.spikes, deliver=self._deliver)
        self._swarm = swarm
        self._script = script
        self._rng = rng
        exchange = Exchange(self.agenda, rng, self.ledger, fusion_bytes=settings.fusion_bytes)
        caches = Caches()
        self.payload = Payload(Random(rng.getstate()[1][0]), settings.places)  # noqa: S311 - repeatable, like all of it
        slow = Random(rng.getstate()[1][2]) if swarm.phases else None  # noqa: S311 - as above
        self.words = Words(self.agenda, rng, self.ledger, exchange, size=settings.size, slow=slow)
        setting = Setting(
            settings,
            swarm,
            script,
            draw(aside(rng), settings.size, swarm, script),
            rng,
            self.agenda,
            self.trace,
            self.network,
            exchange,
            self.words,
            self.ledger,
            caches,
            self.payload,
            Routes(self.agenda, aside(rng), self.ledger),
        )
        self.ledger.waits.ranks = tuple(range(settings.size))
        self.hub = Hub(settings, self.trace, self.ledger, caches)
        self.ranks = [
            Process(post.rank, setting, hub(post, lambda _: self.hub, batch=settings.batch)) for post in settings.posts
        ]

    def run(self) -> None:
        """Runs the job to its end.

        Raises:
            Violation: an invariant does not hold.
        """
        for process in self.ranks:
            process.start()
        self._plan_faults()
        demand(self.agenda.run(limit=_PATIENCE), f"the job has not ended after {_PATIENCE} s; {self.ledger.waiting()}")
        self._look_back()

    def _plan_faults(self) -> None:
        """Draws the ranks and times of the faults."""
        horizon = 5e-3 * (1 + len(self._script.steps))
        for wanted, strike in (
            (self._swarm.crash, self._rng.choice((Process.crash, Process.crash_when_leaving))),
            (self._swarm.abort, Process.raise_error),
            (self._swarm.freeze, lambda process: process.freeze(self._rng.expovariate(1 / _FREEZE))),
        ):
            for _ in range(self._rng.randint(1, 2) if wanted else 0):
                self.agenda.at(self._rng.uniform(0, horizon), partial(strike, self._rng.choice(self.ranks)))

    def _deliver(self, receiver: int, sender: int, message: Message | Lost) -> None:
        if not self.ranks[receiver].closed:
            self.ranks[receiver].arrive(sender, message)

    def _look_back(self) -> None:
        """Checks the invariants that hold at the end."""
        dead = [process.rank for process in self.ranks if process.crashed]
        culprits = [process.rank for process in self.ranks if process.crashed or process.raised]
        self.ledger.close(dead=dead, fatal=self.ledger.failed)
        for process in self.ranks:
            demand(process.closed, f"rank {process.rank} never ended")
            informed = process.crashed or process.failure is not None or process.member.stopped
            demand(informed, f"rank {process.rank} does not know why it ended")
            if (failure := process.failure) is not None:
                blamed = failure.rank in culprits or failure.reason.startswith("kept")
                demand(blamed, f"rank {process.rank} blames rank {failure.rank} ({failure.reason}), who is innocent")
        self.payload.close(failed=self.ledger.failed)
        if not self.ledger.failed:
            self.words.close()
            kept = leftovers(self.hub)
            for table in ("announced", "table", "complete", "refused"):
                demand(not kept[table], f"the coordinator keeps {kept[table]} in its {table} table")
            given_up = self._swarm.leave or self._swarm.crossings or self._swarm.refusals
            demand(not kept["owed"] or given_up, f"{kept['owed']} refusals were never collected")
            demand(not kept["parts"], "the coordinator keeps refused operations of which all members have heard")
            demand(not kept["calls"], "the coordinator keeps calls that all members have left")
            demand(not kept["absent"], "the coordinator thinks that somebody has joined")


def simulate(seed: int, *, show: Callable[[str], None] | None = None, scenes: bool = True) -> Outcome:
    """Runs the job of a seed.

    Args:
        seed: everything is drawn from it.
        show: called with each line of the trace.
        scenes: whether ranks may refuse what others submit, and wait for each other.

    Raises:
        Violation: an invariant does not hold, or the protocol has raised an error, which is then the cause.
    """
    rng = Random(seed)  # noqa: S311 - a repeatable source is the point
    swarm = Swarm.draw(rng, scenes=scenes)
    settings = Settings.draw(rng, swarm)
    script = write(rng, settings.size, swarm, steps=settings.steps * (_PHASES if swarm.phases else 1))
    if swarm.refusals:
        script = with_refusals(aside(rng), script)
    if swarm.phases:
        script = in_phases(Random(rng.getstate()[1][3]), script)  # noqa: S311 - a repeatable source is the point
    run = Simulation(settings, swarm, script, rng, show=show)
    try:
        run.run()
    except Violation:
        raise
    except Exception as error:
        text = f"the protocol has raised {type(error).__name__}: {error}"
        raise Violation(text) from error
    return Outcome(
        seed,
        swarm,
        settings.size,
        run.trace.digest,
        len(run.ledger.submissions),
        run.network.carried,
        run.hub.plans,
        run.hub.locks,
        run.words.locked,
        run.words.refused,
        run.agenda.events,
        run.agenda.now,
    )
