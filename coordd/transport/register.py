"""The data planes by name: two of our own, and what other packages announce as entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from coordd.errors import ConfigError

__all__ = ["announced", "require"]

_GROUP = "coordd.transports"
_OWN = ("auto", "local", "mpi")  # known without a look at what is installed, which takes a while


def announced() -> dict[str, EntryPoint]:
    """Finds what is announced."""
    return {entry.name: entry for entry in entry_points(group=_GROUP)}


def require(name: str, *, source: str) -> None:
    """Refuses a name that means nothing.

    Raises:
        ConfigError: naming ``source`` and the names that there are.
    """
    if name not in _OWN and name not in (found := announced()):
        raise ConfigError.illegal(source, name, f"one of {', '.join(sorted({*_OWN, *found}))}")
