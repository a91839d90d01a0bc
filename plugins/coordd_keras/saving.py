"""Loads models that were saved with a distributed optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from coordd import api
from coordd.ops.messages import ReduceOp
from coordd.parallel.collective_calls import CollectiveCall, collective
from coordd_keras.compression import Compression
from coordd_keras.optimizer import distribute

__all__ = ["load_model"]


@collective("load_model", namespace=True, everywhere=True)
def load_model(
    _call: CollectiveCall,
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
    *,
    op: ReduceOp = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
) -> Any:
    """Loads a model like `keras.models.load_model`, and wraps its optimizer in a `DistributedOptimizer` again.

    All ranks call it. They wait for each other first, so that they find what rank 0 has saved before its own call. The
    file holds the plain optimizer, so give the settings of the `DistributedOptimizer` again.

    Args:
        filepath: a file that ``model.save`` wrote.
        custom_optimizers: optimizer classes that Keras does not know.
        custom_objects: other objects, by name, that Keras does not know.
        compression: as for `DistributedOptimizer`.
        legacy_opts: ignored.
        op: as for `DistributedOptimizer`.
        backward_passes_per_step: as for `DistributedOptimizer`.
        average_aggregated_gradients: as for `DistributedOptimizer`.

    Raises:
        MismatchError: on all ranks, if they load different models or pass different settings.
        RefusedError: another rank raised an error in this call, for example because it does not find the file.
    """
    api.barrier()
    known = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    _call.lines += [f"{variable.path} {tuple(variable.shape)}" for variable in model.variables]
    if getattr(model, "optimizer", None) is None:
        _call.lines.append("no optimizer")
    else:
        distribute(
            _call,
            model.optimizer,
            compression=compression,
            op=op,
            passes=backward_passes_per_step,
            average=average_aggregated_gradients,
        )
    return model
