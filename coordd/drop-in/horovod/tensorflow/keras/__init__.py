"""`horovod.tensorflow.keras`, which is `horovod.keras`."""

from horovod.keras import *  # noqa: F403
from horovod.keras import __all__ as __all__
