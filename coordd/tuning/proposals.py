"""Proposes candidates with Optuna, which is imported for the first proposal, on rank 0 only.

The first candidates are single changes of the start settings; later ones come from the sampler (tree-structured Parzen
estimator), based on all measured step times. The study is in memory: no database, no network.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import msgspec

from coordd.errors import ConfigError
from coordd.tuning.settings import Settings, Space

if TYPE_CHECKING:
    import optuna

__all__ = ["Proposals", "require_optuna"]

_LEAP = 2  # distance, in choices, of the first candidates from the start, for knobs with an order
_DRAWS = 100  # samples of known settings after which the search counts as exhausted


def require_optuna() -> None:
    """Checks that Optuna is installed, without importing it.

    Raises:
        ConfigError: Optuna is not installed; the message says how to get it.
    """
    if importlib.util.find_spec("optuna") is None:
        raise ConfigError("autotune needs Optuna, which is not installed: pip install 'coordd[tune]'")


class Proposals:
    """A `Proposer` that uses Optuna."""

    def __init__(self, space: Space, start: Settings, *, seed: int = 0) -> None:
        """Prepares the proposals; Optuna is not imported yet.

        Args:
            space: the choices of each knob.
            start: the settings that the first candidates are close to.
            seed: seed of the sampler; equal seeds and equal step times give equal candidates.
        """
        self._space = space
        self._start = start
        self._seed = seed
        self._learned: dict[Settings, float] = {}
        self._asked: dict[Settings, optuna.Trial] = {}
        self._study: optuna.Study | None = None

    def propose(self) -> Settings | None:
        """Returns settings that were not measured yet; None if there are no others.

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
        """Records the step time of settings, relative to the start."""
        self._learned[settings] = relative
        if self._study is None:
            return
        if settings in self._asked:
            self._study.tell(self._asked.pop(settings), relative)
        else:
            self._add(self._study, settings, relative)

    def _begun(self) -> optuna.Study:
        """Creates the study, with all step times that are already known."""
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
        """Returns the first candidates, close to the start.

        Most change one knob. The first one changes two knobs that depend on each other: more buckets start earlier only
        if they do not wait in the batching window.
        """
        early = {
            "cycle_ms": self._near("cycle_ms", len(self._space.cycle_ms))[0],
            "buckets": self._near("buckets", 1)[1],
        }
        one_knob = [{knob: value} for knob in self._space.tuned for value in self._near(knob, _LEAP)]
        found = [msgspec.structs.replace(self._start, **change) for change in (early, *one_knob)]
        return [settings for settings in dict.fromkeys(found) if settings not in self._learned]

    def _near(self, knob: str, leap: int) -> tuple[Any, ...]:
        """Returns the choices ``leap`` places below and above the start's, clipped; all if they have no order."""
        choices: tuple[Any, ...] = self._space.choices(knob)
        if isinstance(choices[0], str):
            return choices
        place = choices.index(getattr(self._start, knob))
        return choices[max(place - leap, 0)], choices[min(place + leap, len(choices) - 1)]

    def _distributions(self) -> dict[str, optuna.distributions.BaseDistribution]:
        """Returns the distribution of each knob's choices: numbers by their index, words as categories."""
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
