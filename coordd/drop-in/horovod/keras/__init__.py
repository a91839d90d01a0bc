"""`horovod.keras`, which is `coordd.keras` with Horovod's `init` and its questions about the build."""

from coordd.keras import *  # noqa: F403
from coordd.keras import __all__ as _coordd
from horovod.common.basics import *  # type: ignore[assignment]  # noqa: F403 - its `init` instead of coordd's
from horovod.common.basics import __all__ as _basics
from horovod.common.exceptions import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt
from horovod.keras import elastic

__all__ = [  # noqa: PLE0604 - strings, all of them
    *_coordd,
    *_basics,
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "elastic",
]
