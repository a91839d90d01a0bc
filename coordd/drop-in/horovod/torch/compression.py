"""The path from which some scripts take compressors."""

from coordd_torch.compression import *  # noqa: F403
