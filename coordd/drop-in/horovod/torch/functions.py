"""The path from which some scripts take `broadcast_parameters` and its like."""

from coordd.torch import *  # noqa: F403
