"""coordd for TensorFlow, with Horovod's names: ``import coordd.tensorflow as cd``."""

from typing import Any

from coordd.api import (
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    leaving,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from coordd.errors import (
    ArgumentError,
    ChangedError,
    ConfigError,
    CoorddError,
    DiscardedStepError,
    DuplicateNameError,
    ForkedProcessError,
    HandleError,
    MismatchError,
    NonFiniteError,
    NotInitializedError,
    PeerError,
    RefusedError,
    ShutdownError,
    StartError,
    WorkerProcessError,
)
from coordd.ops.messages import ReduceOp
from coordd.parallel.grid import Grid, ProcessSet, add_process_set, global_process_set, remove_process_set
from coordd_tensorflow.compression import Compression, Compressor
from coordd_tensorflow.operations import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from coordd_tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from coordd_tensorflow.variables import (
    allgather_object,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)

Adasum = ReduceOp.ADASUM
Average = ReduceOp.AVERAGE
AveragePresent = ReduceOp.AVERAGE_PRESENT
Max = ReduceOp.MAX
Min = ReduceOp.MIN
Product = ReduceOp.PRODUCT
Sum = ReduceOp.SUM

__all__ = [
    "Adasum",
    "ArgumentError",
    "Average",
    "AveragePresent",
    "ChangedError",
    "Compression",
    "Compressor",
    "ConfigError",
    "CoorddError",
    "DiscardedStepError",
    "DistributedGradientTape",
    "DuplicateNameError",
    "ForkedProcessError",
    "Grid",
    "HandleError",
    "Max",
    "Min",
    "MismatchError",
    "NonFiniteError",
    "NotInitializedError",
    "PartialDistributedGradientTape",
    "PeerError",
    "ProcessSet",
    "Product",
    "RefusedError",
    "ShutdownError",
    "StartError",
    "Sum",
    "WorkerProcessError",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "leaving",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]

_KERAS = {
    "DistributedOptimizer": "coordd_keras.optimizer",
    "SyncBatchNormalization": "coordd_tensorflow.sync_batch_norm",
}


def __getattr__(name: str) -> Any:
    """Imports names that need Keras only on access."""
    if name not in _KERAS:
        text = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(text)
    import importlib

    return getattr(importlib.import_module(_KERAS[name]), name)
