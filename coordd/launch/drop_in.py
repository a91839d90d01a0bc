"""Where ``import horovod`` finds coordd: a folder that ranks get on their path, and nobody else.

Its name is no identifier, so that no import reaches it by way of `coordd`. Being on ``PYTHONPATH`` it also holds for
what a script starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

__all__ = ["FOLDER", "overshadowed", "python_path"]

FOLDER = Path(__file__).resolve().parents[1] / "drop-in"


def python_path(environment: Mapping[str, str]) -> str:
    """Composes a ``PYTHONPATH`` on which the folder comes first."""
    return os.pathsep.join(filter(None, [str(FOLDER), environment.get("PYTHONPATH", "")]))


def overshadowed() -> tuple[str, ...]:
    """Tells of a Horovod that is installed beside this interpreter, and will not be what the script imports."""
    try:
        installed = version("horovod")
    except PackageNotFoundError:
        return ()
    return (f"--as-horovod: 'import horovod' is coordd, not the Horovod {installed} that is installed",)
