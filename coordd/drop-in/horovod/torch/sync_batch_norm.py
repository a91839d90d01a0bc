"""The path from which some scripts take `SyncBatchNorm`."""

from coordd.torch import *  # noqa: F403
