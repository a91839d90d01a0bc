"""`horovod.torch`, which is `coordd.torch` with Horovod's `init` and its questions about the build."""

from coordd.torch import __all__ as _coordd
from horovod.common.basics import __all__ as _basics
from horovod.common.exceptions import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt
from horovod.torch import elastic
from horovod.torch.mpi_ops import *  # noqa: F403

__all__ = [  # noqa: PLE0604 - strings, all of them
    *_coordd,
    *_basics,
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "elastic",
]
