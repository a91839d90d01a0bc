"""The Keras facade: ``import coordd.keras as cd``."""

try:
    from coordd_keras import *  # noqa: F403
    from coordd_keras import __all__ as __all__  # noqa: PLC0414 - what is public there is public here
except ModuleNotFoundError as error:
    if error.name not in {"keras", "tensorflow"}:
        raise
    text = f"coordd.keras needs Keras 3, and {error.name} is not installed: pip install 'coordd[tensorflow]'"
    raise ModuleNotFoundError(text, name=error.name) from error
