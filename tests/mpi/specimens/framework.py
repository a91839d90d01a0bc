"""Stands where a framework's facade stands in a real session."""

_started: list[str] = []


def init() -> None:
    """Notes the start."""
    _started.append("init")


def is_initialized() -> None:
    """Sees that the start came before the cases."""
    assert _started == ["init"]


def shutdown() -> None:
    """Shows that the end comes, too."""
    raise RuntimeError("shutdown was called")
