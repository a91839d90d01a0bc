"""Horovod's exceptions. What Horovod's core raises is `HorovodInternalError`; here every error of coordd's is one."""

from __future__ import annotations

from coordd.errors import CoorddError as HorovodInternalError

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """Ranks were added or removed; coordd never raises it, for its ranks stay the same."""

    def __init__(self, skip_sync: bool = False) -> None:
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Horovod was compiled against another framework; coordd never raises it, for it is not compiled."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} {installed_version} is installed, but Horovod was made for {version}")
        self.version = version
        self.installed_version = installed_version
