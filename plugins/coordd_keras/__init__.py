"""coordd for Keras 3, under Horovod's names; use it as ``import coordd.keras as cd``.

Keras runs on TensorFlow or PyTorch, as ``KERAS_BACKEND`` selects; the ranks of a job may use different backends.
"""

from coordd.api import (
    barrier,
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
from coordd.parallel.objects import allgather_object, broadcast_object
from coordd.pipeline.config import PipelineConfig
from coordd.pipeline.recording import check_recording
from coordd_keras import callbacks
from coordd_keras.compression import Compression
from coordd_keras.data import shard
from coordd_keras.operations import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    reducescatter,
)
from coordd_keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from coordd_keras.pipeline.pipeline import Pipeline
from coordd_keras.saving import load_model
from coordd_keras.state import KerasState

Adasum = ReduceOp.ADASUM
Average = ReduceOp.AVERAGE
AveragePresent = ReduceOp.AVERAGE_PRESENT
Max = ReduceOp.MAX
Min = ReduceOp.MIN
Product = ReduceOp.PRODUCT
Sum = ReduceOp.SUM
Config = PipelineConfig

__all__ = [
    "Adasum",
    "ArgumentError",
    "Average",
    "AveragePresent",
    "ChangedError",
    "Compression",
    "Config",
    "ConfigError",
    "CoorddError",
    "DiscardedStepError",
    "DistributedOptimizer",
    "DuplicateNameError",
    "ForkedProcessError",
    "Grid",
    "HandleError",
    "KerasState",
    "Max",
    "Min",
    "MismatchError",
    "NonFiniteError",
    "NotInitializedError",
    "PartialDistributedOptimizer",
    "PeerError",
    "Pipeline",
    "PipelineConfig",
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
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "check_recording",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "init",
    "is_homogeneous",
    "is_initialized",
    "leaving",
    "load_model",
    "local_rank",
    "local_size",
    "rank",
    "reducescatter",
    "remove_process_set",
    "shard",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
