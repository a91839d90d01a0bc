"""Finds faster settings while the job trains, from step times alone.

```
 step time
     │ ───── incumbent ─────┐           ┌── incumbent ── …
     │       └──before──┘   └─candidate─┘ └──after──┘
     └──────────────────────────────────────────────────▶ steps
```

A candidate runs for a few steps and is compared with the incumbent right before and after. It takes the incumbent's
place only when several such comparisons say that it is faster by more than the noise; one that says it is not ends the
trial. The one rule: a candidate's steps are paid from a credit that grows by a share of every step.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

import msgspec

from coordd.errors import ArgumentError
from coordd.pace import Pace
from coordd.settings import Settings, Space

__all__ = ["Outcome", "Progress", "Proposer", "Trial", "Tuner", "judge"]

_WARMUP = 10  # first steps: memory is allocated, caches are cold
_WINDOW = 6
_GLIMPSE = 3  # steps after which a hopeless candidate is seen
_HOPELESS = 1.3
_PATIENCE = 14  # candidates without a faster one that make a plateau
_WORTH = 0.01  # a gain that is worth a change
_SURE = 3.0  # standard errors
_ENOUGH, _MOST = 3, 8  # comparisons before a candidate is taken, before it is given up
_MEDIAN = 1.25  # standard error of a median, in those of a mean
_DEAREST = 10.0  # a pause during a trial must not cost all credit for long


class Outcome(enum.Enum):
    """How a trial ended."""

    OPEN = "open"
    FASTER = "faster"
    NO_GAIN = "no gain"
    UNCLEAR = "unclear"


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate, and how it compared.

    Attributes:
        settings: the candidate.
        base: step time of the incumbent that it ran against, over that of the start.
        ratios: one for each comparison: its step time over the incumbent's.
        seconds: the median step time of its last window.
        outcome: what came of it.
    """

    settings: Settings
    base: float = 1.0
    ratios: tuple[float, ...] = ()
    seconds: float = 0.0
    outcome: Outcome = Outcome.OPEN

    @property
    def relative(self) -> float:
        """Step time over that of the start: 0.9 is a tenth faster."""
        return self.base * median(self.ratios) if self.ratios else self.base


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """All that a search knows: enough to show it, and to go on with it another day.

    Attributes:
        start: the settings without tuning.
        best: the fastest that are known.
        relative: their step time over that of the start.
        noise: standard deviation of one comparison, relative.
        steps: steps so far.
        spent: those that trials took, changes to and fro included.
        credit: steps that trials may still take.
        done: whether the plateau is found.
        trials: in the order in which they were begun; only the last one may be open.
    """

    start: Settings
    best: Settings
    relative: float = 1.0
    noise: float = 0.0
    steps: int = 0
    spent: int = 0
    credit: float = 0.0
    done: bool = False
    trials: tuple[Trial, ...] = ()


class Proposer(Protocol):
    """Says what to try next. Learns from what was tried, in this run or an earlier one."""

    def propose(self) -> Settings | None:
        """Proposes settings that it has not learned about; none means that there are no others."""
        ...

    def learn(self, settings: Settings, relative: float) -> None:
        """Takes the step time of settings, over that of the start."""
        ...


def judge(ratios: Sequence[float], noise: float, *, least: int = 1) -> Outcome:
    """Says what comparisons prove.

    Args:
        ratios: step time over that of the incumbent, of each comparison.
        noise: standard deviation of one of them.
        least: comparisons before a candidate is dropped.
    """
    middle = median(ratios)
    if middle > 1 - _WORTH:
        return Outcome.NO_GAIN if len(ratios) >= least else Outcome.OPEN
    error = _MEDIAN * noise / math.sqrt(len(ratios))
    if len(ratios) >= _ENOUGH and middle < 1 - _SURE * error:
        return Outcome.FASTER
    return Outcome.UNCLEAR if len(ratios) >= _MOST else Outcome.OPEN


class Tuner:
    """A search that rides along with the training."""

    def __init__(  # noqa: PLR0913 - a search's whole frame
        self,
        space: Space,
        start: Settings,
        proposer: Proposer,
        *,
        share: float = 0.01,
        settle: int = 2,
        limit: float = math.inf,
        progress: Progress | None = None,
    ) -> None:
        """Begins a search, or goes on with one.

        Args:
            space: the choices.
            start: the settings without tuning.
            proposer: where candidates come from.
            share: most steps of all that trials may take; a slow one counts for as many as it lasts.
            settle: steps after each change that are not measured.
            limit: steps after which no trial begins any more.
            progress: of an earlier run; then `settings` are its best.

        Raises:
            ArgumentError: the start, or the best of the earlier run, lies outside the space.
        """
        known = progress or Progress(start=start, best=start)
        for settings in (start, known.best):
            if settings not in space:
                raise ArgumentError(f"{settings} is not one of the choices: {space}")
        self._space, self._proposer = space, proposer
        self._share, self._settle, self._limit = share, settle, limit
        self._start, self._best, self._relative = known.start, known.best, known.relative
        self._past, self._steps, self._spent, self._credit = known.steps, 0, known.spent, min(known.credit, self._price)
        self._trials = [trial for trial in known.trials if trial.settings in space]
        tried = {known.start, known.best, *(trial.settings for trial in self._trials)}
        self._queue = [] if start in tried else [start]
        self._done = known.done and not self._queue
        self._pace = Pace(_WINDOW)
        self._window: list[float] = []
        self._settings = known.best
        self._phase: Callable[[float], Settings | None] = self._watch
        self._skip = _WARMUP
        self._proposer.learn(known.start, 1.0)
        for trial in self._trials:
            if trial.outcome is not Outcome.OPEN:
                self._proposer.learn(trial.settings, trial.relative)

    @property
    def settings(self) -> Settings:
        """What runs now, or from the next step boundary on."""
        return self._settings

    @property
    def done(self) -> bool:
        """Whether the search has ended; the best settings run from then on."""
        return self._done

    @property
    def measured(self) -> int:
        """Number of comparisons so far: what is worth keeping has changed when this has."""
        return sum(len(trial.ratios) for trial in self._trials)

    @property
    def progress(self) -> Progress:
        """All that is known, for the record."""
        return Progress(
            start=self._start,
            best=self._best,
            relative=self._relative,
            noise=self._pace.noise if self._pace.known else 0.0,
            steps=self._past + self._steps,
            spent=self._spent,
            credit=self._credit,
            done=self._done,
            trials=tuple(self._trials),
        )

    def tell(self, step_seconds: float) -> Settings | None:
        """Takes the time of one training step; returns other settings when they should change.

        They are to be applied on all ranks at one step boundary, at the latest ``settle`` - 1 steps from now.

        Raises:
            ArgumentError: a time that is not a positive number.
        """
        if not 0 < step_seconds < math.inf:
            raise ArgumentError(f"a step cannot take {step_seconds} seconds: tell the time between two step boundaries")
        self._steps += 1
        self._credit += self._share
        if self._phase == self._try or (self._phase == self._return and self._skip):
            self._spent += 1
            self._credit -= min(max(1.0, step_seconds / self._pace.latest), _DEAREST)
        if self._skip:
            self._skip -= 1
            return None
        return self._phase(step_seconds)

    def _watch(self, seconds: float) -> Settings | None:
        """The incumbent runs."""
        return self._begin() if self._pace.add(seconds) else None

    def _try(self, seconds: float) -> Settings | None:
        """The candidate runs."""
        self._window.append(seconds)
        if len(self._window) < _WINDOW and not self._hopeless:
            return None
        return self._change(self._best, self._return)

    def _return(self, seconds: float) -> Settings | None:
        """The incumbent runs again, to be compared with."""
        if not self._pace.add(seconds):
            return None
        self._phase = self._watch
        trial = self._trials[-1]
        took = median(self._window)
        ratios = (*trial.ratios, took / self._pace.around)
        last_word = trial.settings == self._start
        outcome = judge(ratios, self._pace.noise, least=_ENOUGH if last_word else 1)
        trial = msgspec.structs.replace(trial, ratios=ratios, seconds=took, outcome=outcome)
        self._trials[-1] = trial
        if outcome is Outcome.OPEN:
            return self._begin()
        self._proposer.learn(trial.settings, trial.relative)
        if last_word:
            return self._end(trial)
        return self._crown(trial) if outcome is Outcome.FASTER else self._begin()

    def _begin(self) -> Settings | None:
        """Begins a trial, or another comparison of the open one, as soon as it can be paid."""
        if self._done or not self._pace.known or self._credit < self._price or self._past_limit:
            return None
        trial = self._open_trial()
        if trial is None:
            self._done = True
            return None
        self._window = []
        return self._change(trial.settings, self._try)

    def _open_trial(self) -> Trial | None:
        if not self._trials or self._trials[-1].outcome is not Outcome.OPEN:
            candidate = self._candidate()
            if candidate is None:
                return None
            self._trials.append(Trial(settings=candidate, base=self._relative))
        return self._trials[-1]

    def _candidate(self) -> Settings | None:
        """Finds what to try next. The last word has the start: it wins if the best has lost its edge meanwhile."""
        if self._queue:
            return self._queue.pop(0)
        if self._since_gain() < _PATIENCE and (found := self._proposer.propose()) is not None:
            return found
        last = self._trials[-1].settings if self._trials else self._start
        return self._start if self._start not in (self._best, last) else None

    def _since_gain(self) -> int:
        """Counts the trials after the last one that found something faster."""
        outcomes = [trial.outcome for trial in reversed(self._trials)]
        return outcomes.index(Outcome.FASTER) if Outcome.FASTER in outcomes else len(outcomes)

    def _crown(self, trial: Trial) -> Settings:
        self._best, self._relative = trial.settings, trial.relative
        return self._change(self._best, self._watch)

    def _end(self, trial: Trial) -> Settings | None:
        """Hears the last word. In doubt the start wins; else one fresh comparison replaces a chain of old ones."""
        self._done = True
        if trial.outcome is Outcome.NO_GAIN:
            self._relative = 1 / median(trial.ratios)
            return None
        self._best, self._relative = self._start, 1.0
        return self._change(self._best, self._watch)

    def _change(self, settings: Settings, phase: Callable[[float], Settings | None]) -> Settings:
        self._settings, self._phase, self._skip = settings, phase, self._settle
        return settings

    @property
    def _hopeless(self) -> bool:
        return len(self._window) == _GLIMPSE and median(self._window) > _HOPELESS * self._pace.latest

    @property
    def _price(self) -> float:
        """Steps that one comparison takes."""
        return _WINDOW + 2.0 * self._settle

    @property
    def _past_limit(self) -> bool:
        return self._steps + self._price + _WINDOW > self._limit
