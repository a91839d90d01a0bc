"""Candidates from Optuna, which is imported when the first one is wanted, on rank 0 only.

First come single steps away from the start; then what the sampler (a tree of Parzen estimators) makes
of all that was learned. The study lives in memory: no database, no network.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import msgspec

from coordd.errors import ConfigError
from coordd.settings import Settings, Space

if TYPE_CHECKING:
    import optuna

__all__ = ["Proposals", "require_optuna"]

_LEAP = 2  # choices from the start to the first candidates, where the knob has an order
_DRAWS = 100  # of settings already known, before there seem to be no others


def require_optuna() -> None:
    """Checks that a search could begin, without importing anything.

    Raises:
        ConfigError: Optuna is not installed; the message says how to get it.
    """
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("autotune needs Optuna, which is not installed: pip install 'coordd[tune]'")


class Proposals:
    """A `Proposer` that asks Optuna."""

    def __init__(self, space: Space, start: Settings, *, seed: int = 0) -> None:
        """Prepares it.

        Args:
            space: the choices.
            start: where the first candidates are near.
            seed: of the sampler; equal seeds and equal step times give equal candidates.
        """
        self._space = space
        self._start = start
        self._seed = seed
        self._learned: dict[Settings, float] = {}
        self._asked: dict[Settings, optuna.Trial] = {}
        self._study: optuna.Study | None = None

    def propose(self) -> Settings | None:
        """Proposes settings that it has not learned about; none means that there are no others.

        Raises:
            ConfigError: Optuna is not installed.
        """
        if len(self._learned) >= self._space.size:
            return None
        if self._study is None:
            self._study = self._begun()
        study = self._study
        for _ in range(_DRAWS):
            trial = study.ask(self._distributions())
            settings = self._decoded(trial.params)
            if settings not in self._learned:
                self._asked[settings] = trial
                return settings
            study.tell(trial, state=_optuna().trial.TrialState.FAIL)
        return None

    def learn(self, settings: Settings, relative: float) -> None:
        """Takes the step time of settings, over that of the start."""
        self._learned[settings] = relative
        if self._study is None:
            return
        if settings in self._asked:
            self._study.tell(self._asked.pop(settings), relative)
        else:
            self._add(self._study, settings, relative)

    def _begun(self) -> optuna.Study:
        """Makes the study, with all that was learned before it was needed."""
        module = _optuna()
        moves = self._moves()
        sampler = module.samplers.TPESampler(seed=self._seed, n_startup_trials=len(moves))
        spoken = module.logging.get_verbosity()
        module.logging.set_verbosity(module.logging.WARNING)  # the user's own studies keep their level
        study: optuna.Study = module.create_study(sampler=sampler, storage=module.storages.InMemoryStorage())
        module.logging.set_verbosity(spoken)
        for settings, relative in self._learned.items():
            self._add(study, settings, relative)
        for settings in moves:
            study.enqueue_trial(self._encoded(settings))
        return study

    def _add(self, study: optuna.Study, settings: Settings, relative: float) -> None:
        trial = _optuna().trial.create_trial(
            params=self._encoded(settings), distributions=self._distributions(), value=relative
        )
        study.add_trial(trial)

    def _moves(self) -> list[Settings]:
        """Steps away from the start.

        Most change one knob. The first one changes two that need each other: more buckets only leave earlier if they do
        not wait in the batching window.
        """
        early = {
            "cycle_ms": self._near("cycle_ms", len(self._space.cycle_ms))[0],
            "buckets": self._near("buckets", 1)[1],
        }
        one_knob = [{knob: value} for knob in self._space.tuned for value in self._near(knob, _LEAP)]
        found = [msgspec.structs.replace(self._start, **change) for change in (early, *one_knob)]
        return [settings for settings in dict.fromkeys(found) if settings not in self._learned]

    def _near(self, knob: str, leap: int) -> tuple[Any, ...]:
        """The choices so many places below and above the start's, or at the end; all of them, if they have no order."""
        choices: tuple[Any, ...] = self._space.choices(knob)
        if isinstance(choices[0], str):
            return choices
        place = choices.index(getattr(self._start, knob))
        return choices[max(place - leap, 0)], choices[min(place + leap, len(choices) - 1)]

    def _distributions(self) -> dict[str, optuna.distributions.BaseDistribution]:
        """Each knob's choices: a number by its place in the order, a word as it is."""
        made: dict[str, optuna.distributions.BaseDistribution] = {}
        distributions = _optuna().distributions
        for knob in self._space.tuned:
            choices = self._space.choices(knob)
            if isinstance(choices[0], str):
                made[knob] = distributions.CategoricalDistribution(choices)
            else:
                made[knob] = distributions.IntDistribution(0, len(choices) - 1)
        return made

    def _encoded(self, settings: Settings) -> dict[str, Any]:
        values = {knob: getattr(settings, knob) for knob in self._space.tuned}
        return {
            knob: value if isinstance(value, str) else self._space.choices(knob).index(value)
            for knob, value in values.items()
        }

    def _decoded(self, parameters: dict[str, Any]) -> Settings:
        values = {
            knob: value if isinstance(value, str) else self._space.choices(knob)[value]
            for knob, value in parameters.items()
        }
        return msgspec.structs.replace(self._start, **values)


def _optuna() -> Any:
    require_optuna()
    import optuna

    return optuna
