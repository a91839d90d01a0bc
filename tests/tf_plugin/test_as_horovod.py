"""``--as-horovod`` in TensorFlow: integers, names in flight, and the errors that Horovod's users catch."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install 'coordd[tensorflow]'")
import tensorflow as tf

import coordd.tensorflow as cd
from coordd import api
from tests.local_ranks import each_rank

SLICES = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
INTEGERS = [tf.uint8, tf.int8, tf.int32, tf.int64]
FORMS = {
    "allreduce": lambda tensor, **how: cd.allreduce(tensor, **how),  # noqa: PLW0108 - as the others
    "grouped_allreduce": lambda tensor, **how: cd.grouped_allreduce([tensor, tensor], **how)[1],
    "graph": lambda tensor, **how: tf.function(lambda given: cd.allreduce(given, name="graph", **how))(tensor),
}
SCATTERING = {
    "reducescatter": lambda tensor, **how: cd.reducescatter(tensor, **how),  # noqa: PLW0108 - as above
    "grouped_reducescatter": lambda tensor, **how: cd.grouped_reducescatter([tensor, tensor], **how)[0],
}


def test_integers_are_averaged_and_scaled_and_truncated():
    values = [np.array([[1, 2], [3, 7], [9, 11]]) + rank for rank in range(2)]

    def wanted(op, prescale_factor, postscale_factor):
        total = sum(np.trunc(part * prescale_factor) for part in values)
        return np.trunc(total * postscale_factor / (2 if op is cd.Average else 1))

    def body(rank):
        wrong = []
        for dtype in INTEGERS:
            for op in (cd.Average, cd.Sum):
                for factors in ((1.0, 1.0), (0.37, 1.63)):
                    how = {"op": op, "prescale_factor": factors[0], "postscale_factor": factors[1]}
                    whole = wanted(**how)
                    for title, form in (FORMS | SCATTERING).items():
                        found = form(tf.constant(values[rank], dtype), **how).numpy()
                        expected = np.array_split(whole, 2)[rank] if title in SCATTERING else whole
                        if not np.array_equal(found, expected) or found.dtype != dtype.as_numpy_dtype:
                            wrong.append((title, dtype, op, factors))
        return wrong

    assert each_rank(2, body, as_horovod=True) == [[], []]


def test_averages_of_integer_slices_are_floats():
    """Horovod divides the values as TensorFlow does."""

    def body(rank):
        slices = tf.IndexedSlices(tf.constant([[rank + 1, 4]]), tf.constant([rank]), tf.constant([3, 2]))

        def average():
            return cd.allreduce(slices, name="slices")

        found = [average(), tf.function(average)()]
        return [(each.values.dtype, each.values.numpy().tolist(), each.indices.numpy().tolist()) for each in found]

    assert each_rank(2, body, as_horovod=True) == [[(tf.float64, [[0.5, 2.0], [1.0, 2.0]], [0, 1])] * 2] * 2


def call(operation, **by_rank):
    def body(rank):
        try:
            getattr(cd, operation)(**{key: value[rank] for key, value in by_rank.items()})
        except Exception as error:  # noqa: BLE001 - its class is what is tested
            return error
        return None

    return body


CAUSES = {
    "shapes": (call("allreduce", tensor=(tf.ones(2), tf.ones(3)), name="aa"), tf.errors.FailedPreconditionError),
    "types": (
        call("allgather", tensor=(tf.ones(2), tf.ones(2, tf.int32)), name="aa"),
        tf.errors.FailedPreconditionError,
    ),
    "roots": (
        call("broadcast", tensor=(tf.ones(2), tf.ones(2)), root_rank=(0, 1), name="aa"),
        tf.errors.FailedPreconditionError,
    ),
    "reductions of slices": (
        call("allreduce", tensor=(SLICES, SLICES), op=(cd.Sum, cd.Average), name="aa"),
        tf.errors.FailedPreconditionError,
    ),
    "root": (call("broadcast", tensor=(tf.ones(2), tf.ones(2)), root_rank=(7, 7)), tf.errors.InvalidArgumentError),
    "splits": (
        call("alltoall", tensor=(tf.ones(2), tf.ones(2)), splits=([9, 9], [9, 9])),
        tf.errors.InvalidArgumentError,
    ),
}


@pytest.mark.parametrize(("body", "kind"), CAUSES.values(), ids=CAUSES)
def test_errors_are_both_coordds_and_those_of_horovods_operations(body, kind):
    for error in each_rank(2, body, as_horovod=True):
        assert isinstance(error, kind)
        assert isinstance(error, cd.CoorddError)
        assert str(error) == error.message
    for error in each_rank(2, body):
        assert not isinstance(error, tf.errors.OpError)


def test_a_name_in_flight_is_an_invalid_argument():
    def body(rank):
        handle = api.operations().allreduce(np.ones(2), name="aa") if rank == 0 else None
        if rank == 0:
            with pytest.raises(tf.errors.InvalidArgumentError, match="same name as another tensor"):
                cd.allreduce(tf.ones(2), name="aa")
        cd.barrier()
        if rank == 1:
            handle = api.operations().allreduce(np.ones(2), name="aa")
        return handle.result().tolist()

    assert each_rank(2, body, as_horovod=True) == [[1.0, 1.0]] * 2


def test_num_groups_is_told_to_be_groups():
    def body(rank):
        with pytest.warns(DeprecationWarning, match="`num_groups` has been replaced by `groups`"):
            cd.DistributedGradientTape(tf.GradientTape(), num_groups=2)

    each_rank(1, body, as_horovod=True)
