"""The folder in which ``import horovod`` finds coordd; only ranks have it on their ``PYTHONPATH``.

The folder's name is not an identifier, so it cannot be imported through `coordd`. ``PYTHONPATH`` also applies to the
processes that a script starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["FOLDER", "overshadowed", "python_path"]

FOLDER = Path(__file__).resolve().parents[1] / "drop-in"


def python_path(environment: Mapping[str, str]) -> str:
    """Returns the ``PYTHONPATH`` with the folder in front."""
    return os.pathsep.join(filter(None, [str(FOLDER), environment.get("PYTHONPATH", "")]))


def overshadowed() -> tuple[str, ...]:
    """Returns a note if this interpreter has a Horovod installed, which the script will not import."""
    try:
        installed = version("horovod")
    except PackageNotFoundError:
        return ()
    return (f"--as-horovod: 'import horovod' is coordd, not the Horovod {installed} that is installed",)
