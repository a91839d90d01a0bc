"""coordd: a background coordination daemon for distributed training.

Framework users want `coordd.torch`; this package itself works on NumPy arrays.
"""

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
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from coordd.messages import ReduceOp
from coordd.process_sets import ProcessSet, global_process_set
from coordd.version import VERSION

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
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]
