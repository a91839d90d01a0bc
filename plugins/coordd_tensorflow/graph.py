"""Calls Python functions on arrays from TensorFlow: immediately, or in the graph that is being traced.

Operations that wait for other ranks run in program order, one after the other (`coordd_tensorflow.program_order`). So
all ranks, which trace the same program, wait for the same operation, and a function blocks at most one thread.
Functions that run concurrently block one thread each.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import config
from tensorflow.python.ops import control_flow_util

from coordd import api
from coordd.errors import ArgumentError, CoorddError, PeerError, ShutdownError
from coordd.ops.handles import call_site, called_from
from coordd_tensorflow.as_horovod import as_raised
from coordd_tensorflow.program_order import after_last_wait, note_wait
from coordd_tensorflow.tensors import to_tensor, view
from coordd_tensorflow.unfinished import functions_called

__all__ = ["Waits", "call", "check_compiled", "place_in_graph"]

# AutoGraph would rewrite coordd's functions, too, and warn where it cannot.
_OURS = ("coordd", "coordd_keras", "coordd_tensorflow", "coordd_torch")
config.CONVERSION_RULES = (*map(config.DoNotConvert, _OURS), *config.CONVERSION_RULES)

_PLACES = "coordd.places"
Function = Callable[..., Sequence[np.ndarray]]

log = logging.getLogger("coordd")

_LOOK_SECONDS = 1.0


class Waits:
    """The graph functions that currently wait for other ranks.

    Each blocks one of TensorFlow's threads. If all threads are blocked and a further function cannot run, ranks may
    deadlock; a warning then says what to do.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._count = 0
        self._looks = self._told = False

    @contextlib.contextmanager
    def one_more(self) -> Iterator[None]:
        """Counts one waiting function inside the block."""
        with self._guard:
            self._count += 1
            looks = self._count >= _threads() and not (self._looks or self._told)
            self._looks |= looks
        if looks:
            timer = threading.Timer(_LOOK_SECONDS, self.look)
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            with self._guard:
                self._count -= 1

    def look(self) -> None:
        """Warns, once, if further functions cannot run until waiting ones finish."""
        threads, called = _threads(), functions_called()
        with self._guard:
            self._looks = False
            if self._count < threads or called <= self._count or self._told:
                return
            self._told = True
        log.warning(
            "%d functions of TensorFlow are called side by side, and of its inter-op threads (%d) all wait for other "
            "ranks: ranks may come to wait for each other; before TensorFlow starts, call "
            "tf.config.threading.set_inter_op_parallelism_threads() with more than the number of such functions",
            called,
            threads,
        )


_WAITS = Waits()


def _threads() -> int:
    return int(tf.config.threading.get_inter_op_parallelism_threads()) or len(os.sched_getaffinity(0))


def call(
    function: Function, tensors: Sequence[tf.Tensor], dtypes: Sequence[tf.DType], *, waits: bool = True
) -> list[tf.Tensor]:
    """Calls a function on the arrays of tensors, now or each time the graph runs.

    Args:
        function: gets arrays that it must not change, and returns new ones.
        tensors: dense tensors.
        dtypes: of the results.
        waits: whether it waits for other ranks; if not, it runs as soon as its inputs are ready.

    Raises:
        ArgumentError: XLA compiles the graph, and compiled code cannot call Python.
    """
    if tf.executing_eagerly():
        try:
            return [to_tensor(array) for array in function(*map(view, tensors))]
        except CoorddError as error:
            raise as_raised(error) from error.__cause__
    check_compiled()
    site = call_site(sys._getframe(1))  # noqa: SLF001 - the documented way to the caller

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        with called_from(site), _WAITS.one_more() if waits else contextlib.nullcontext():
            try:
                return [*function(*arrays)]
            except (PeerError, ShutdownError) as error:  # TensorFlow's own error names neither the class nor the rank
                if api.is_initialized():
                    api.operations().raised_in_graph = error
                raise

    if waits:
        with after_last_wait():
            found = tf.numpy_function(run, tensors, dtypes)
        note_wait(found[0].op if dtypes else found)  # without dtypes it is an operation without results
        return list(found) if dtypes else []
    # Declared stateless, it does not wait for other stateful operations. TensorFlow would evaluate an operation with
    # only constant inputs once and reuse the result, so one input is a placeholder, which it does not know to be
    # constant.
    unknown = tf.compat.v1.placeholder_with_default(0, [])
    started = tf.numpy_function(lambda _, *arrays: run(*arrays), [unknown, *tensors], dtypes, stateful=False)
    return list(started)


def place_in_graph(key: Hashable) -> int:
    """Counts the calls with this key in the graph being traced: 0 for the first one, or outside of a graph.

    The number distinguishes occurrences that may run concurrently, and is the same when the graph is traced again.
    """
    if tf.executing_eagerly():
        return 0
    seen: list[Hashable] = tf.compat.v1.get_default_graph().get_collection_ref(_PLACES)
    seen.append(key)
    return seen.count(key) - 1


def check_compiled() -> None:
    """Raises if the code is being traced for XLA.

    Raises:
        ArgumentError: XLA compiles the graph.
    """
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        text = (
            "XLA cannot call the daemon: set jit_compile=False in tf.function() or model.compile(), "
            "or compile the part that only computes, and reduce outside of it"
        )
        raise ArgumentError(text)
