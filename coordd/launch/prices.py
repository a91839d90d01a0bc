"""The costs of the stages of a planned pipeline, given by the user or measured on the layers of a model."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordd.errors import ArgumentError, ConfigError

if TYPE_CHECKING:
    from coordd.pipeline.load import Memory
    from coordd.pipeline.plan import Plan
    from coordd.pipeline.profile import Profile
    from coordd.pipeline.simulate import Costs

__all__ = ["Prices"]

_TIMES = ("forward", "backward", "weight", "transfer")


class Prices:
    """The costs of forward and backward passes.

    Attributes:
        profile: profile of the model's layers, or None without a model.
        units: units of times and memory peaks.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        """Reads the options and measures the model.

        Raises:
            ConfigError: the model or sample does not exist, or times are given too.
            ArgumentError: the model cannot be split or measured.
        """
        from coordd.pipeline.units import Units, in_bytes

        self._options = options
        self._cap = None if options.memory is None else in_bytes(options.memory)
        timed = [name for name in _TIMES if getattr(options, name) is not None]
        self.profile = _profile(options) if options.model else None
        self.units = (
            Units() if self.profile is not None else Units(time="s" if timed else "units", memory="activations")
        )

    @property
    def limit(self) -> float | None:
        """Memory limit for activations if no model was measured, else None."""
        return self._cap if self.profile is None else None

    def costs(self, plan: Plan, stages: int, chunks: int) -> Costs:
        """Returns the costs of the stages; a pass without a given time takes as long as a forward pass.

        Args:
            plan: the schedule of a step, which determines the activations that are kept at a time.
            stages: number of stages.
            chunks: number of stages per rank.

        Raises:
            ArgumentError: the model cannot be split into these stages.
        """
        from coordd.pipeline.simulate import Costs

        options = self._options
        if self.profile is not None:
            return self.profile.costs(self.spans(plan), transfer=options.transfer or 0.0)
        forward = 1.0 if options.forward is None else options.forward
        inward, weight = (forward if time is None else time for time in (options.backward, options.weight))
        transfer = {(stage, stage + 1): options.transfer or 0.0 for stage in range(stages - 1)}
        return Costs(
            [forward / chunks] * stages,
            [inward / chunks] * stages,
            [weight / chunks] * stages,
            transfer=transfer,
            activation=[1 / chunks] * stages,
        )

    def spans(self, plan: Plan) -> tuple[range, ...]:
        """Returns the layers of each stage of the model."""
        assert self.profile is not None  # noqa: S101 - who calls has looked
        return self.profile.split(plan.stages, by=self._options.split, memory=self.memory(plan))

    def memory(self, plan: Plan) -> Memory:
        """Returns the memory model of a stage, with the memory limit per stage."""
        from coordd.pipeline.load import Memory

        options = self._options
        cap = None if self._cap is None else self._cap / max(map(len, plan.held))
        return Memory(cap, plan.name, options.microbatches, options.state, plan=plan, recompute=options.recompute)


def _profile(options: argparse.Namespace) -> Profile:
    given = [name for name in _TIMES[:-1] if getattr(options, name) is not None]
    if given:
        raise ConfigError(f"--model measures how long passes take: leave --{given[0]} out")
    if not options.sample:
        raise ConfigError("--model measures layers, which takes inputs: add --sample module:function, which makes some")
    model, sample = (_found(text) for text in (options.model, options.sample))
    try:
        import coordd.torch as cd
    except ImportError as error:
        raise ConfigError(f"--model needs PyTorch, which cannot be loaded: {error}") from error
    config = cd.PipelineConfig(
        microbatches=options.microbatches, data_parallel=options.replicas, recompute=options.recompute
    )
    try:
        found: Profile = cd.profile_model(model, sample(), config)
    except ArgumentError:
        raise
    except Exception as error:  # user code can raise any exception
        raise ConfigError(f"the layers of {options.model} cannot be measured: {error!r}") from error
    return found


def _found(text: str) -> Callable[[], Any]:
    """Imports ``module:function``, looking in the working directory first."""
    module, _, name = text.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Callable[[], Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"there is no {text!r} ({error}): write module:function, as python would import it"
        ) from error
    if not callable(found):
        raise ConfigError(f"{text!r} is {type(found).__name__}, and no function")
    return found
