"""Loading models that were saved while their optimizer was distributed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import keras

from coordd_keras.compression import Compression
from coordd_keras.optimizer import DistributedOptimizer

__all__ = ["load_model"]


def load_model(
    filepath: Any,
    custom_optimizers: Iterable[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Loads a model as `keras.models.load_model` does, and makes its optimizer a `DistributedOptimizer` again.

    Args:
        filepath: what ``model.save`` has written.
        custom_optimizers: optimizer classes that Keras does not know.
        custom_objects: other objects, by name, that Keras does not know.
        compression: as for `DistributedOptimizer`.
        legacy_opts: not needed.
    """
    known = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    if model.optimizer is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
