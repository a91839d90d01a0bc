"""The path from which some scripts take process sets."""

from coordd.torch import *  # noqa: F403
