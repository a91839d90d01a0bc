"""Starts one rank: limits its memory before anything is imported, runs the task, and saves rank 0's result."""

from __future__ import annotations

import importlib
import json
import resource
import sys
from pathlib import Path


def main() -> None:
    """Runs the task that the command line names, with the settings in the folder that it names."""
    task, directory = sys.argv[1], Path(sys.argv[2])
    settings = json.loads((directory / "settings.json").read_text())
    if limit := settings.pop("data_limit", None):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    found = importlib.import_module(f"coordd_tools.stages.worker.{task}").measure(**settings)
    if found is not None:
        (directory / "found.json").write_text(json.dumps(found))


main()
