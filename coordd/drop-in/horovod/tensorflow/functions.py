"""The path from which some scripts take `broadcast_variables` and its like."""

from coordd.tensorflow import *  # noqa: F403
