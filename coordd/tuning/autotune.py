"""Finds faster settings while the job trains, from step times alone.

```
 step time
     │ ───── incumbent ─────┐           ┌── incumbent ── …
     │       └──before──┘   └─candidate─┘ └──after──┘
     └──────────────────────────────────────────────────▶ steps
```

A candidate runs for a few steps and is compared with the incumbent right before and after. It replaces the incumbent
only when several such comparisons show that it is faster by more than the noise; one that shows no gain ends the trial.
Rule: a candidate's steps are paid from a credit that grows by a share of every step.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

import msgspec

from coordd.errors import ArgumentError
from coordd.tuning.settings import Settings, Space
from coordd.tuning.step_times import Pace

__all__ = ["Outcome", "Progress", "Proposer", "Trial", "Tuner", "judge"]

_WARMUP = 10  # first steps: memory is allocated, caches are cold
_WINDOW = 6
_GLIMPSE = 3  # steps after which a hopeless candidate is dropped
_HOPELESS = 1.3
_PATIENCE = 14  # consecutive candidates without a faster one that make a plateau
_WORTH = 0.01  # smallest relative gain that justifies a change
_SURE = 3.0  # standard errors
_ENOUGH, _MOST = 3, 8  # comparisons: fewest before a candidate is accepted, most before it is given up
_MEDIAN = 1.25  # standard error of a median, relative to that of a mean
_DEAREST = 10.0  # most that one step may cost: a pause during a trial must not use up the credit for long


class Outcome(enum.Enum):
    """How a trial ended."""

    OPEN = "open"
    FASTER = "faster"
    NO_GAIN = "no gain"
    UNCLEAR = "unclear"


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate, and how it compared with the incumbent.

    Attributes:
        settings: the candidate.
        base: step time of its incumbent, relative to that of the start.
        ratios: one per comparison: its step time over the incumbent's.
        seconds: the median step time of its last window.
        outcome: how the trial ended.
    """

    settings: Settings
    base: float = 1.0
    ratios: tuple[float, ...] = ()
    seconds: float = 0.0
    outcome: Outcome = Outcome.OPEN

    @property
    def relative(self) -> float:
        """Step time relative to that of the start: 0.9 is a tenth faster."""
        return self.base * median(self.ratios) if self.ratios else self.base


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a search: enough to show it, and to resume it in a later run.

    Attributes:
        start: the settings without tuning.
        best: the fastest known settings.
        relative: their step time relative to that of the start.
        noise: standard deviation of one comparison, relative.
        steps: number of steps so far.
        spent: steps that trials took, changes back and forth included.
        credit: steps that trials may still take.
        done: whether the plateau is found.
        trials: in the order in which they began; only the last one may be open.
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
    """Proposes what to try next; learns from trials of this run or an earlier one."""

    def propose(self) -> Settings | None:
        """Returns settings that it has not learned about; None if there are no others."""
        ...

    def learn(self, settings: Settings, relative: float) -> None:
        """Learns the step time of settings, relative to that of the start."""
        ...


def judge(ratios: Sequence[float], noise: float, *, least: int = 1) -> Outcome:
    """Decides a trial from its comparisons.

    Args:
        ratios: step time over that of the incumbent, of each comparison.
        noise: standard deviation of one comparison.
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
    """A search that runs while the job trains."""

    def __init__(  # noqa: PLR0913 - the full configuration of a search
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
        """Begins a search, or resumes one.

        Args:
            space: the choices.
            start: the settings without tuning.
            proposer: source of candidates.
            share: largest share of all steps that trials may take; a slow step counts in proportion to its time.
            settle: unmeasured steps after each change.
            limit: steps after which no trial begins.
            progress: state of an earlier run; then `settings` are its best.

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
        """The settings that run now, or from the next step boundary on."""
        return self._settings

    @property
    def done(self) -> bool:
        """Whether the search has ended; the best settings run from then on."""
        return self._done

    @property
    def measured(self) -> int:
        """Number of comparisons so far: `progress` is worth saving again when it has grown."""
        return sum(len(trial.ratios) for trial in self._trials)

    @property
    def progress(self) -> Progress:
        """The state of the search, to be saved."""
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
        """Takes the time of one training step, in seconds; returns new settings if they should change.

        All ranks must apply them at one step boundary, at most ``settle`` - 1 steps from now.

        Raises:
            ArgumentError: the time is not a positive finite number.
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
        """Phase: the incumbent runs."""
        return self._begin() if self._pace.add(seconds) else None

    def _try(self, seconds: float) -> Settings | None:
        """Phase: the candidate runs."""
        self._window.append(seconds)
        if len(self._window) < _WINDOW and not self._hopeless:
            return None
        return self._change(self._best, self._return)

    def _return(self, seconds: float) -> Settings | None:
        """Phase: the incumbent runs again, for the comparison."""
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
        """Begins a trial, or another comparison of the open one, once the credit covers it."""
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
        """Returns the next candidate; the last is the start, which wins if the best is no longer faster."""
        if self._queue:
            return self._queue.pop(0)
        if self._since_gain() < _PATIENCE and (found := self._proposer.propose()) is not None:
            return found
        last = self._trials[-1].settings if self._trials else self._start
        return self._start if self._start not in (self._best, last) else None

    def _since_gain(self) -> int:
        """Counts the trials since the last one that found something faster."""
        outcomes = [trial.outcome for trial in reversed(self._trials)]
        return outcomes.index(Outcome.FASTER) if Outcome.FASTER in outcomes else len(outcomes)

    def _crown(self, trial: Trial) -> Settings:
        self._best, self._relative = trial.settings, trial.relative
        return self._change(self._best, self._watch)

    def _end(self, trial: Trial) -> Settings | None:
        """Evaluates the final trial, of the start.

        In doubt the start wins; otherwise its one fresh comparison replaces the product of the earlier ones.
        """
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
