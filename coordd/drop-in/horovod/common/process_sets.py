"""The path from which some scripts take process sets."""

from coordd.process_sets import *  # noqa: F403
