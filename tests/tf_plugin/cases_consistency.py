"""Ranks whose variables part while they train with tapes are told; usual training is left alone."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import coordd.tensorflow as cd
from tests.local_ranks import come_together
from tests.mpi.cases import ranks
from tests.tf_plugin.cases_training import batch, loss_of, weights
from tests.tf_plugin.reference import ways


def trainer(held: list[tf.Variable], **details):
    """A step of training, at once and in a graph."""
    x, y = batch(cd.rank())

    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(held, x, y)
        for variable, gradient in zip(
            held, cd.DistributedGradientTape(tape, **details).gradient(loss, held), strict=True
        ):
            variable.assign_sub(0.1 * gradient)
        return loss

    return step


@ranks(2, deadline=60)
def case_ranks_that_part_are_told() -> None:
    for way in range(2):
        held = weights()
        step = ways(trainer(held))[way]
        with pytest.raises(Exception, match=r"no longer have the same values of .*second.*on rank 1"):  # noqa: PT012
            for number in range(12):
                if number == 2 and cd.rank():
                    held[2].assign(held[2] * 1.01)
                step()
        assert number == (4, 5)[way]  # a graph runs twice in each, and its steps are counted with the others
        assert cd.allreduce(np.array([float(cd.rank())])).numpy().tolist() == [0.5]


@ranks(2, deadline=60)
def case_a_graph_of_one_rank_and_another_operation_of_the_other_wait_for_each_other() -> None:
    held = weights()
    train = ways(trainer(held))[1]
    train()
    with pytest.raises(Exception, match=r"ranks wait for each other"):
        train() if cd.rank() == 0 else cd.allreduce(tf.ones(2), name="evaluation")
    for _ in range(9):  # past the next comparisons, which count steps: one rank has begun one more
        train()
    for variable in held:
        first, second = cd.allgather(variable[None]).numpy()
        np.testing.assert_array_equal(first, second)
    assert cd.allreduce(np.array([float(cd.rank())])).numpy().tolist() == [0.5]


@ranks(3, deadline=60)
def case_a_step_that_ranks_have_lost_while_they_waited_for_each_other_leaves_nothing_behind() -> None:
    """One rank fails before its first gradient, and so before it has named anything; another is still at work."""
    held = weights()
    step = trainer(held)
    failed = Path(cd.broadcast_object(tempfile.mkdtemp())) / "failed"
    while cd.rank() == 2 and not failed.exists():  # it computes, and hears of nothing meanwhile
        pass
    with pytest.raises(Exception, match=r"ranks wait for each other"):
        cd.barrier() if cd.rank() == 0 else step()
    failed.touch()
    while not come_together():
        pass
    for _ in range(9):
        step()
    for variable in held:
        first, *others = cd.allgather(variable[None]).numpy()
        for other in others:
            np.testing.assert_array_equal(first, other)


@ranks(2, 4, deadline=60)
def case_usual_training_is_left_alone() -> None:
    """Past the 128th step, and with another model of the same names that is broadcast after its first step."""
    for way in range(2):
        for model in range(2):
            held = weights()
            for variable in held:
                variable.assign_add(tf.fill(variable.shape, tf.cast(cd.rank(), variable.dtype)))
            step = ways(trainer(held))[way]
            for number in range(140 - 10 * model):
                step()
                if not number:
                    cd.broadcast_variables(held, 0)


@ranks(2)
def case_sources_that_are_no_variables_may_differ() -> None:
    x = tf.constant([1.0 + cd.rank(), 2.0])
    for _ in range(9):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(x * x)
        cd.DistributedGradientTape(tape).gradient(loss, x)


@ranks(2)
def case_ranks_that_have_joined_are_not_asked() -> None:
    held = weights()
    step = trainer(held)
    for _ in range(2):
        for _ in range(9 if cd.rank() else 3):
            step()
        last = cd.join()
        cd.broadcast_variables(held, last)
    for _ in range(9):
        step()


@ranks(2, deadline=60)
def case_training_in_a_loop_of_the_graph_is_left_alone() -> None:
    """Two steps follow each other in each turn of the loop, and the loss tells nothing of the variables."""
    held = weights()

    @tf.function
    def train(count: tf.Tensor) -> None:
        for _ in tf.range(count):
            for _ in range(2):
                with tf.GradientTape() as tape:
                    loss = tf.add_n([tf.reduce_sum(variable) for variable in held])
                for variable, gradient in zip(held, cd.DistributedGradientTape(tape).gradient(loss, held), strict=True):
                    variable.assign_sub(0.1 * gradient)

    train(tf.constant(140))
    same = cd.allgather_object([variable.numpy() for variable in held])
    assert all(map(np.array_equal, *same))


@ranks(2, deadline=60)
def case_variables_of_sparse_gradients_are_compared() -> None:
    for way in range(2):
        table, dense = tf.Variable(np.ones((20, 3)), name="table"), tf.Variable(np.ones(3), name="dense")

        def step(table=table, dense=dense) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, [1, 2]) * dense)
            found = cd.DistributedGradientTape(tape).gradient(loss, [table, dense])
            assert isinstance(found[0], tf.IndexedSlices)

        run = ways(step)[way]
        with pytest.raises(Exception, match=r"no longer have the same values of table.*on rank 1"):  # noqa: PT012
            for number in range(12):
                if number == 2:
                    table.assign_add(tf.ones_like(table) * float(cd.rank()))
                run()
        assert cd.allreduce(np.array([float(cd.rank())])).numpy().tolist() == [0.5]
