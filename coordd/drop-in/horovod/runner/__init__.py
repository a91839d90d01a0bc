"""The path from which some scripts take `horovod.run`."""

from horovod import run

__all__ = ["run"]
