"""The Keras facade: ``import coordd.keras as cd``."""

from coordd_keras import *  # noqa: F403
from coordd_keras import __all__ as __all__  # noqa: PLC0414 - what is public there is public here
