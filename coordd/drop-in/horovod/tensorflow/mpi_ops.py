"""The operations, and the path from which many scripts take them."""

from coordd.tensorflow import *  # noqa: F403
from horovod.common.basics import *  # type: ignore[assignment]  # noqa: F403 - its `init` instead of coordd's
