"""What one rank refuses in TensorFlow and Keras, at once and in a graph, is heard by the others; ranks are threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install 'coordd[tensorflow]'")
import tensorflow as tf

import coordd.tensorflow as cd
from tests.local_ranks import local_ranks

ONE = tf.ones(4)
BAD = tf.constant([True, False])
SLICES = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))


def in_graph(tensor, name):
    return tf.function(lambda given: cd.allreduce(given, name=name))(tensor)


CALLS = {
    "allreduce": (lambda n: cd.allreduce(ONE, name=n), lambda n: cd.allreduce(BAD, name=n)),
    "two reductions": (lambda n: cd.allreduce(ONE, name=n), lambda n: cd.allreduce(ONE, True, op=cd.Sum, name=n)),
    "a graph": (lambda n: in_graph(ONE, n), lambda n: in_graph(BAD, n)),
    "grouped": (
        lambda n: cd.grouped_allreduce([ONE, ONE], name=n),
        lambda n: cd.grouped_allreduce([ONE, BAD], name=n),
    ),
    "slices": (lambda n: cd.allreduce(SLICES, name=n), lambda n: cd.allreduce(SLICES, op=cd.Max, name=n)),
    "allgather": (lambda n: cd.allgather(ONE, name=n), lambda n: cd.allgather(tf.constant(1.0), name=n)),
    "broadcast": (lambda n: cd.broadcast(ONE, 0, name=n), lambda n: cd.broadcast(ONE, 7, name=n)),
    "broadcast in place": (
        lambda n: cd.broadcast_([tf.Variable(ONE)], 0, name=n),
        lambda n: cd.broadcast_([tf.Variable(ONE)], 7, name=n),
    ),
    "alltoall": (lambda n: cd.alltoall(ONE, name=n), lambda n: cd.alltoall(ONE, [9, 9], name=n)),
    "reducescatter": (lambda n: cd.reducescatter(ONE, name=n), lambda n: cd.reducescatter(ONE, op=cd.Adasum, name=n)),
}


@pytest.fixture(scope="module")
def two():
    with local_ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("name", ["a", None])
@pytest.mark.parametrize("what", CALLS)
def test_whatever_is_refused_is_heard_by_all_who_wait_for_it(two, what, name):
    good, bad = CALLS[what]
    heard = threading.Barrier(2)

    def body(rank):
        wanted = "rank 1 refused" if rank == 0 else r"."
        with pytest.raises((cd.CoorddError, tf.errors.OpError), match=wanted):
            (bad if rank else good)(name)
        heard.wait(15)
        return cd.allreduce(np.full(2, float(rank)), op=cd.Sum).numpy().tolist(), cd.allreduce(ONE, name="a").numpy()[0]

    assert two.each(body) == [([1.0, 1.0], 1.0)] * 2
