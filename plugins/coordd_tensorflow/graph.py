"""Functions on arrays as parts of TensorFlow's programs: called at once, or put into the graph that is being traced.

TensorFlow runs what has side effects in a function in the order of the program, one after the other. So all ranks,
which trace the same program, wait for the same operation, and a function keeps no more than one thread waiting.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import config
from tensorflow.python.ops import control_flow_util

from coordd import api
from coordd.errors import ArgumentError, CoorddError, PeerError, ShutdownError
from coordd.handles import call_site, called_from
from coordd_tensorflow.as_horovod import as_raised
from coordd_tensorflow.tensors import to_tensor, view

__all__ = ["call", "check_compiled", "place_in_graph"]

# AutoGraph would rewrite our functions, too, and warn of what it cannot.
_OURS = ("coordd", "coordd_keras", "coordd_tensorflow", "coordd_torch")
config.CONVERSION_RULES = (*map(config.DoNotConvert, _OURS), *config.CONVERSION_RULES)

_PLACES = "coordd.places"
Function = Callable[..., Sequence[np.ndarray]]


def call(
    function: Function, tensors: Sequence[tf.Tensor], dtypes: Sequence[tf.DType], *, waits: bool = True
) -> list[tf.Tensor]:
    """Calls a function on the arrays of tensors, now or whenever the graph runs.

    Args:
        function: gets arrays that it must not change, and returns new ones.
        tensors: dense ones.
        dtypes: of the results.
        waits: whether it waits for other ranks; one that only starts something runs as soon as its tensors are there.

    Raises:
        ArgumentError: XLA compiles the graph, which cannot call Python.
    """
    if tf.executing_eagerly():
        try:
            return [to_tensor(array) for array in function(*map(view, tensors))]
        except CoorddError as error:
            raise as_raised(error) from error.__cause__
    check_compiled()
    site = call_site(sys._getframe(1))  # noqa: SLF001 - the documented way to the caller

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        with called_from(site):
            try:
                return [*function(*arrays)]
            except (PeerError, ShutdownError) as error:  # TensorFlow's own error names neither the class nor the rank
                if api.is_initialized():
                    api.operations().raised_in_graph = error
                raise

    if waits:
        found = tf.numpy_function(run, tensors, dtypes)
        return list(found) if dtypes else []  # then it is an operation without results
    # Without side effects, as TensorFlow sees it, it need not wait for what else has some. What has only constants to
    # work on TensorFlow would compute once for all, and it does not know that this is one.
    unknown = tf.compat.v1.placeholder_with_default(0, [])
    started = tf.numpy_function(lambda _, *arrays: run(*arrays), [unknown, *tensors], dtypes, stateful=False)
    return list(started)


def place_in_graph(key: Hashable) -> int:
    """Counts how often this was called with a key in the graph that is being traced; 0 at the first time, or outside.

    So what may run at the same time is told apart, and is the same again when the graph is traced anew.
    """
    if tf.executing_eagerly():
        return 0
    seen: list[Hashable] = tf.compat.v1.get_default_graph().get_collection_ref(_PLACES)
    seen.append(key)
    return seen.count(key) - 1


def check_compiled() -> None:
    """Refuses to be traced into what XLA compiles.

    Raises:
        ArgumentError: that is so.
    """
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        text = (
            "XLA cannot call the daemon: set jit_compile=False in tf.function() or model.compile(), "
            "or compile the part that only computes, and reduce outside of it"
        )
        raise ArgumentError(text)
