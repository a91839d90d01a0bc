"""`horovod.tensorflow`, which is `coordd.tensorflow` with Horovod's `init` and its questions about the build."""

from __future__ import annotations

from typing import Any

from coordd.ops.messages import ReduceOp
from coordd.tensorflow import *  # noqa: F403
from coordd.tensorflow import Average, Compression, SyncBatchNormalization, global_process_set
from coordd.tensorflow import __all__ as _coordd
from coordd_keras import optimizer as _keras
from horovod.common.basics import *  # type: ignore[assignment]  # noqa: F403 - its `init` instead of coordd's
from horovod.common.basics import __all__ as _basics
from horovod.common.exceptions import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt
from horovod.refused import Refused
from horovod.tensorflow import elastic

__all__ = [  # noqa: PLE0604 - strings, all of them
    *_coordd,
    *_basics,
    "BroadcastGlobalVariablesHook",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "SyncBatchNormalization",
    "broadcast_global_variables",
    "elastic",
]

_WHY = "TensorFlow 2 keeps no list of all variables; use hvd.broadcast_variables(model.variables, root_rank=0)"
broadcast_global_variables = Refused("horovod.tensorflow.broadcast_global_variables", _WHY)
BroadcastGlobalVariablesHook = Refused("horovod.tensorflow.BroadcastGlobalVariablesHook", _WHY)


def DistributedOptimizer(  # noqa: N802, PLR0913, PLR0917 - Horovod's name and signature
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,  # noqa: ARG001 - as above
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Makes a Keras optimizer average its gradients; arguments as of `coordd.keras.DistributedOptimizer`.

    Raises:
        ArgumentError: it is another optimizer; wrap the tape then.
    """
    return _keras.DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
