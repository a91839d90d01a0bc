"""The path from which some scripts take `Compression`."""

from coordd_tensorflow.compression import *  # noqa: F403
