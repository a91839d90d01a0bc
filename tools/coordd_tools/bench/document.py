"""The JSON document that ``--json`` writes: the job, the machine, all figures and ratios."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordd_tools.bench.jobs import Job
from coordd_tools.bench.report import Figure, Report

__all__ = ["SCHEMA", "Document"]

SCHEMA = 1
"""Version of the format; increases when readers of the document must change."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One run, with everything needed to repeat and judge it; ``started`` is in UTC (ISO 8601)."""

    command: Sequence[str]
    started: str
    ranks: int
    job: Job
    launcher: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    report: Report

    def plain(self) -> dict[str, Any]:
        """Returns the document as JSON-compatible values."""
        return {
            "schema": SCHEMA,
            "bench": self.job.noun,
            "command": shlex.join(self.command),
            "started": self.started,
            "ranks": self.ranks,
            "seed": self.job.seed,
            "job": dataclasses.asdict(self.job),
            "launcher": self.launcher,
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "figures": [_flat(figure) for figure in self.report.figures],
            "ratios": [dataclasses.asdict(ratio) for ratio in self.report.ratios],
        }

    def write(self, path: Path) -> None:
        """Writes the document as indented JSON."""
        path.write_text(json.dumps(self.plain(), indent=1, ensure_ascii=False) + "\n")


def _flat(figure: Figure) -> dict[str, Any]:
    """Flattens a figure: moves the fields of its summary to the top level."""
    row: dict[str, Any] = dataclasses.asdict(figure)
    summary: dict[str, Any] = row.pop("summary")
    return row | summary
