"""A run of a pipeline, written down: what was planned, what was expected to come of it, and what did."""

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
    """What the ranks have done.

    Attributes:
        plan: what was to be done, lowered.
        spans: for each rank when it computed or changed what, in seconds of one clock.
        costs: what passes were expected to take, and to keep.
        units: of these.
    """

    plan: Plan
    spans: tuple[tuple[Span, ...], ...]
    costs: Costs
    units: Units = field(default_factory=Units)

    @property
    def predicted(self) -> Timeline:
        """What was to come of it."""
        return simulate(self.plan, self.costs)

    @property
    def measured(self) -> Timeline:
        """What came of it."""
        return measured(self.plan, self.spans, self.costs)

    def __str__(self) -> str:
        predicted, measured = self.predicted, self.measured
        text = (
            f"{self.plan.name}: {1e3 * measured.makespan:.0f} ms and {measured.bubble:.1%} idle, "
            f"predicted {1e3 * predicted.makespan:.0f} ms and {predicted.bubble:.1%}"
        )
        return f"{text}; {1e3 * measured.step:.0f} ms to change the weights" if measured.steps else text

    def picture(self) -> str:
        """Both, one below the other, in one scale; an SVG."""
        from coordd.pipeline.picture import draw  # most runs are never drawn, and this brings `html`

        return draw(self.plan, self.predicted, measured=self.measured, units=self.units)

    def write(self, path: Path) -> None:
        """Writes it as a ``.json``, or as a picture.

        Raises:
            ArgumentError: a file of this name is neither, or what makes it is not installed.
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
        """Reads a ``.json``.

        Raises:
            ArgumentError: it is no recording.
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
    """Looks whether a recording can be written to a file of this name.

    Raises:
        ArgumentError: there is no such form, or what makes it is not installed.
    """
    if path.suffix != ".json":
        check_ending(path)


def check_recording(path: str | Path | None) -> None:
    """Looks whether `Pipeline.record` can write such a file, before a long training rather than after it.

    Raises:
        ArgumentError: there is no such form, or what makes it is not installed.
    """
    if path is not None:
        check_name(Path(path))


def _costs(document: Mapping[str, Any]) -> Costs:
    pairs = {name: {(one, other): value for one, other, value in document[name]} for name in _PAIRS}
    return Costs(**{**document, **pairs})
