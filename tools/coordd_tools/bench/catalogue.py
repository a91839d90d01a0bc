"""The engines by name: which ones each benchmark compares, and which modules each needs."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

__all__ = ["ENGINES", "defaults", "missing"]

ENGINES = {
    "step": ("none", "coordd", "ddp", "horovod", "ddp-view", "sketch"),
    "tf": ("none", "coordd", "mwms"),
    "allreduce": ("coordd", "coordd-negotiated", "coordd-window", "memory", "gloo", "mpi", "horovod"),
    "idle": ("mpi", "coordd", "gloo", "horovod"),
    "memory": ("none", "coordd", "ddp", "horovod", "ddp-view"),
    "startup": ("coordd", "gloo", "horovod"),
    "sets": ("idle", "stalled"),
    "pipeline": (
        *("none", "gpipe", "1f1b", "1f1b-eager", "interleaved", "zb-h1", "zb-h2", "zb-lean", "zb-h2-lean", "zb-v"),
        *("torch-gpipe", "torch-1f1b", "torch-interleaved", "torch-zb", "torch-zb-v"),
    ),
}
"""The engines available for each benchmark; for ``sets`` they are two states of coordd."""

_BY_REQUEST = frozenset({"ddp-view", "sketch", "coordd-negotiated", "coordd-window", "memory"})
_WHERE_INSTALLED = frozenset({"horovod"})
_COORDD = ("coordd.torch", "coordd_torch")
_NEEDS = {
    "coordd": _COORDD,
    "sketch": _COORDD[:1],
    "coordd-negotiated": _COORDD,
    "coordd-window": _COORDD,
    "idle": _COORDD,
    "stalled": _COORDD,
    "horovod": ("horovod.torch",),
    **dict.fromkeys(
        ("gpipe", "1f1b", "1f1b-eager", "interleaved", "zb-h1", "zb-h2", "zb-lean", "zb-h2-lean", "zb-v"), _COORDD
    ),
}
_ALL_NEED = ("torch", "mpi4py")
_TENSORFLOW_NEEDS = ("tensorflow", "keras", "mpi4py")


def defaults(noun: str) -> tuple[str, ...]:
    """Returns the engines that a benchmark compares by default; Horovod only if it is installed."""
    return tuple(
        name
        for name in ENGINES[noun]
        if name not in _BY_REQUEST and not (name in _WHERE_INSTALLED and missing((name,)))
    )


def missing(engines: Sequence[str], noun: str = "") -> list[str]:
    """Returns the modules that these engines need for a benchmark and that are not installed; imports none of them."""
    if noun == "tf":
        return [module for module in _TENSORFLOW_NEEDS if not _installed(module)]
    needed = [*_ALL_NEED, *(module for name in engines for module in _NEEDS.get(name, ()))]
    return [module for module in dict.fromkeys(needed) if not _installed(module)]


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is not installed
        return False
