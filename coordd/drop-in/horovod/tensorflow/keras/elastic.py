"""The path from which scripts take `KerasState` and its like."""

from horovod.keras.elastic import *  # noqa: F403
