"""coordd for PyTorch, under Horovod's names; use it as ``import coordd.torch as cd``."""

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
from coordd.parallel.grid import Grid, ProcessSet, add_process_set, global_process_set, remove_process_set
from coordd.parallel.objects import allgather_object, broadcast_object
from coordd_torch.alltoall import alltoall, alltoall_async
from coordd_torch.compression import Compression, Compressor
from coordd_torch.differentiable import allgather, allreduce, broadcast, grouped_allgather, grouped_allreduce
from coordd_torch.operations import (
    Adasum,
    Average,
    AveragePresent,
    Max,
    Min,
    Product,
    Sum,
    allgather_async,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather_async,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    join,
    poll,
    recv,
    recv_async,
    send,
    send_async,
    synchronize,
)
from coordd_torch.optimizer import DistributedOptimizer
from coordd_torch.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from coordd_torch.sparse import sparse_allreduce_async
from coordd_torch.state import broadcast_optimizer_state, broadcast_parameters
from coordd_torch.sync_batch_norm import SyncBatchNorm
from coordd_torch.tensors import empty_common
from coordd_torch.uncompiled import keep_uncompiled

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
    "DistributedOptimizer",
    "DuplicateNameError",
    "ForkedProcessError",
    "Grid",
    "HandleError",
    "Max",
    "Min",
    "MismatchError",
    "NonFiniteError",
    "NotInitializedError",
    "PeerError",
    "ProcessSet",
    "Product",
    "RefusedError",
    "ShutdownError",
    "StartError",
    "Sum",
    "SyncBatchNorm",
    "WorkerProcessError",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "empty_common",
    "global_process_set",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "leaving",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "recv",
    "recv_async",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "send",
    "send_async",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

_PIPELINE = {
    "Pipeline": "coordd_torch.pipeline.pipeline",
    "PipelineConfig": "coordd.pipeline.config",
    "check_recording": "coordd.pipeline.recording",
    "profile_model": "coordd_torch.pipeline.profiling_driver",
}


def __getattr__(name: str) -> Any:
    """Imports the pipeline modules on first use, because their import takes as long as all the others together."""
    if name not in _PIPELINE:
        text = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(text)
    import importlib

    return getattr(importlib.import_module(_PIPELINE[name]), name)


keep_uncompiled()
