"""The path from which scripts take the callbacks."""

from coordd_keras.callbacks import *  # noqa: F403
