"""The path from which some scripts take the optimizer."""

from coordd.torch import *  # noqa: F403
