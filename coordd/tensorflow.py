"""The TensorFlow facade: ``import coordd.tensorflow as cd``."""

from coordd_tensorflow import *  # noqa: F403
from coordd_tensorflow import __all__ as __all__  # noqa: PLC0414 - what is public there is public here
from coordd_tensorflow import __getattr__ as __getattr__  # noqa: PLC0414 - what it has only on demand, too
