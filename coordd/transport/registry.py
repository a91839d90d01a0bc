"""Registry of data planes by name: the built-in ones, and entry points of other packages."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from coordd.errors import ConfigError

__all__ = ["announced", "require"]

_GROUP = "coordd.transports"
_OWN = ("auto", "local", "mpi")  # known without a scan of the installed packages, which is slow


def announced() -> dict[str, EntryPoint]:
    """Returns the registered entry points by name."""
    return {entry.name: entry for entry in entry_points(group=_GROUP)}


def require(name: str, *, source: str) -> None:
    """Checks that a name denotes a data plane.

    Raises:
        ConfigError: it does not; the text names ``source`` and the known names.
    """
    if name not in _OWN and name not in (found := announced()):
        raise ConfigError.illegal(source, name, f"one of {', '.join(sorted({*_OWN, *found}))}")
