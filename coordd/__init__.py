"""coordd: a background coordination daemon for distributed training.

Framework users import `coordd.torch`; this package itself works on NumPy arrays. Its names are imported on first use,
because `coordd run`, and the small guard process that it starts before every rank, must start without the daemon and
NumPy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from coordd.version import VERSION

if TYPE_CHECKING:
    from coordd.api import (
        allgather,
        allreduce,
        barrier,
        broadcast,
        cross_rank,
        cross_size,
        init,
        is_homogeneous,
        is_initialized,
        launcher_variables,
        leaving,
        local_rank,
        local_size,
        rank,
        shutdown,
        size,
    )
    from coordd.ops.messages import ReduceOp
    from coordd.ops.process_sets import ProcessSet, global_process_set

__version__ = VERSION

__all__ = [
    "ProcessSet",
    "ReduceOp",
    "__version__",
    "allgather",
    "allreduce",
    "barrier",
    "broadcast",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "launcher_variables",
    "leaving",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]

_ELSEWHERE = {"ProcessSet": "ops.process_sets", "ReduceOp": "ops.messages", "global_process_set": "ops.process_sets"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"coordd.{_ELSEWHERE.get(name, 'api')}"), name)
