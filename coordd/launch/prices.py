"""What the stages of a planned pipeline cost: as the user says, or as the layers of a model measure."""

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
    """What passes cost.

    Attributes:
        profile: of the model's layers, if there is one.
        units: of times and peaks.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        """Reads the options, and measures the model.

        Raises:
            ConfigError: there is no such model or sample, or times are given as well.
            ArgumentError: the model cannot be split, or measured.
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
        """What activations may take, where nothing else is known."""
        return self._cap if self.profile is None else None

    def costs(self, plan: Plan, stages: int, chunks: int) -> Costs:
        """What stages cost; a pass that no time is given for takes as long as a forward pass.

        Args:
            plan: a step with so many stages, which says what is kept at a time.
            stages: how many.
            chunks: how many of them a rank has.

        Raises:
            ArgumentError: the model cannot be split like this.
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
        """The layers of each stage of the model."""
        assert self.profile is not None  # noqa: S101 - who calls has looked
        return self.profile.split(plan.stages, by=self._options.split, memory=self.memory(plan))

    def memory(self, plan: Plan) -> Memory:
        """What a stage of the model holds, and may hold."""
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
    except Exception as error:  # user code raises whatever it likes
        raise ConfigError(f"the layers of {options.model} cannot be measured: {error!r}") from error
    return found


def _found(text: str) -> Callable[[], Any]:
    """Finds ``module:function``, in the working directory first."""
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
