"""The path from which some scripts take `SyncBatchNormalization`."""

from coordd_tensorflow.sync_batch_norm import *  # noqa: F403
