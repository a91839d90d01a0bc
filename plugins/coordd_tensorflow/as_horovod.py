"""Makes coordd's errors also instances of the TensorFlow errors that Horovod's operations raise."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from coordd import api
from coordd.errors import ArgumentError, CoorddError, DuplicateNameError, MismatchError, PeerError, ShutdownError

__all__ = ["as_raised"]

_KINDS: dict[type[CoorddError], Any] = {
    ArgumentError: tf.errors.InvalidArgumentError,
    DuplicateNameError: tf.errors.InvalidArgumentError,
    MismatchError: tf.errors.FailedPreconditionError,
    PeerError: tf.errors.UnknownError,
    ShutdownError: tf.errors.UnknownError,
}
"""TensorFlow's error for each coordd error, as Horovod raises it."""


def as_raised(error: CoorddError) -> CoorddError:
    """Returns the error to raise: the same or, under ``as_horovod``, one that is also an instance of TensorFlow's."""
    kind = next((kind for kind in type(error).__mro__ if kind in _KINDS), None)
    if kind is None or not api.is_initialized() or not api.operations().as_horovod:
        return error
    ours: Any = type(error)
    both = _both(ours, _KINDS[kind])
    raised: CoorddError = both.__new__(both)
    raised.args = error.args
    message = str(error)
    vars(raised).update(vars(error), _node_def=None, _op=None, _message=message, _error_code=both.code)
    raised.__cause__ = error.__cause__
    return raised.with_traceback(error.__traceback__)


@functools.cache
def _both(ours: type[CoorddError], theirs: Any) -> Any:
    codes = {
        tf.errors.InvalidArgumentError: tf.errors.INVALID_ARGUMENT,
        tf.errors.FailedPreconditionError: tf.errors.FAILED_PRECONDITION,
        tf.errors.UnknownError: tf.errors.UNKNOWN,
    }
    return type(ours.__name__, (ours, theirs), {"__module__": ours.__module__, "code": codes[theirs]})
