"""The JSON document that ``--json`` writes: the job, the machine, every figure, every ratio."""

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
"""Grows when a reader of the document would have to change."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One run, with all that is needed to repeat and judge it; ``started`` is in UTC (ISO 8601)."""

    command: Sequence[str]
    started: str
    ranks: int
    job: Job
    launcher: str
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    report: Report

    def plain(self) -> dict[str, Any]:
        """The document as JSON knows it."""
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
        """Writes the document, indented, for people too."""
        path.write_text(json.dumps(self.plain(), indent=1, ensure_ascii=False) + "\n")


def _flat(figure: Figure) -> dict[str, Any]:
    """Lifts a figure's summary to its own level."""
    row: dict[str, Any] = dataclasses.asdict(figure)
    summary: dict[str, Any] = row.pop("summary")
    return row | summary
