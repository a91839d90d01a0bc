"""The PyTorch facade: ``import coordd.torch as cd``."""

from coordd_torch import *  # noqa: F403
from coordd_torch import __all__ as __all__  # noqa: PLC0414 - what is public there is public here
from coordd_torch import __getattr__ as __getattr__  # noqa: PLC0414 - what it has only on demand, too
