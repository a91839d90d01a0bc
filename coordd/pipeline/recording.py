"""Recording of a pipeline run: the plan, its expected timeline, and its measured timeline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from coordd.errors import ArgumentError
from coordd.pipeline.action import Action
from coordd.pipeline.export import check_ending, save
from coordd.pipeline.measured import measured
from coordd.pipeline.plan import Plan
from coordd.pipeline.simulate import Costs, Span, Timeline, simulate
from coordd.pipeline.units import Units

__all__ = ["Recording", "check_name", "check_recording"]

_PAIRS = ("transfer", "volume")


@dataclass(frozen=True)
class Recording:
    """A run of all ranks.

    Attributes:
        plan: the plan that was executed, lowered.
        spans: for each rank its passes and optimizer steps, in seconds of one clock.
        costs: the expected time and memory of passes.
        units: of the costs.
    """

    plan: Plan
    spans: tuple[tuple[Span, ...], ...]
    costs: Costs
    units: Units = field(default_factory=Units)

    @property
    def predicted(self) -> Timeline:
        """The predicted timeline."""
        return simulate(self.plan, self.costs)

    @property
    def measured(self) -> Timeline:
        """The measured timeline."""
        return measured(self.plan, self.spans, self.costs)

    def __str__(self) -> str:
        predicted, measured = self.predicted, self.measured
        text = (
            f"{self.plan.name}: {1e3 * measured.makespan:.0f} ms and {measured.bubble:.1%} idle, "
            f"predicted {1e3 * predicted.makespan:.0f} ms and {predicted.bubble:.1%}"
        )
        return f"{text}; {1e3 * measured.step:.0f} ms to change the weights" if measured.steps else text

    def picture(self) -> str:
        """Returns an SVG of both timelines, one below the other, on the same scale."""
        from coordd.pipeline.picture import draw  # most runs are never drawn, and this imports `html`

        return draw(self.plan, self.predicted, measured=self.measured, units=self.units)

    def write(self, path: Path) -> None:
        """Writes the recording as a ``.json``, or as a picture.

        Raises:
            ArgumentError: the file's extension is neither, or the converter is not installed.
            OSError: the file cannot be written.
        """
        if path.suffix == ".json":
            path.write_text(json.dumps(self._document()), "utf-8")
        else:
            save(self.picture(), path)

    def _document(self) -> dict[str, Any]:
        spans = [[(str(action), begin, end) for action, begin, end in mine] for mine in self.spans]
        costs = {name: value for name, value in asdict(self.costs).items() if name not in _PAIRS}
        pairs = {name: [(*pair, value) for pair, value in getattr(self.costs, name).items()] for name in _PAIRS}
        return {"plan": str(self.plan), "spans": spans, "costs": costs | pairs, "units": asdict(self.units)}

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Reads a recording from a ``.json``.

        Raises:
            ArgumentError: the file is not a recording.
            OSError: it cannot be read.
        """
        try:
            document = json.loads(path.read_text("utf-8"))
            spans = (
                tuple(Span(Action.parse(action), begin, end) for action, begin, end in mine)
                for mine in document["spans"]
            )
            return cls(
                Plan.parse(document["plan"]), tuple(spans), _costs(document["costs"]), Units(**document["units"])
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ArgumentError(
                f"{path} is no recording of a pipeline: {error!r}; `Pipeline.record` writes one"
            ) from error


def check_name(path: Path) -> None:
    """Checks that a recording can be written to a file of this name.

    Raises:
        ArgumentError: the format is unknown, or its converter is not installed.
    """
    if path.suffix != ".json":
        check_ending(path)


def check_recording(path: str | Path | None) -> None:
    """Checks that `Pipeline.record` can write such a file, before a long training rather than after it.

    Raises:
        ArgumentError: the format is unknown, or its converter is not installed.
    """
    if path is not None:
        check_name(Path(path))


def _costs(document: Mapping[str, Any]) -> Costs:
    pairs = {name: {(one, other): value for one, other, value in document[name]} for name in _PAIRS}
    return Costs(**{**document, **pairs})
