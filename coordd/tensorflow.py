"""The TensorFlow facade: ``import coordd.tensorflow as cd``."""

try:
    from coordd_tensorflow import *  # noqa: F403
    from coordd_tensorflow import __all__ as __all__  # noqa: PLC0414 - what is public there is public here
    from coordd_tensorflow import __getattr__ as __getattr__  # noqa: PLC0414 - what it has only on demand, too
except ModuleNotFoundError as error:
    if error.name not in {"keras", "tensorflow"}:
        raise
    text = f"coordd.tensorflow needs TensorFlow, and {error.name} is not installed: pip install 'coordd[tensorflow]'"
    raise ModuleNotFoundError(text, name=error.name) from error
