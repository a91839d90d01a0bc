"""Ranks whose variables or hyperparameters part after the second step are told, whatever the framework."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd import api
from coordd.errors import DiscardedStepError, MismatchError
from coordd.gradients.consistency import NUMPY, Reading
from coordd.gradients.reducer import Gradients, Parameter
from coordd.gradients.settings import Choices
from coordd.gradients.value_check import UNSEEN, places_in_turn
from coordd.ops.dtypes import digits_of, dtype_of
from coordd.ops.process_sets import ProcessSet
from tests.local_ranks import each_rank


class Variable:
    """A variable of a framework that has only these."""

    def __init__(self, *shape: int) -> None:
        self.array = np.arange(1.0, 1 + np.prod(shape)).reshape(shape)

    def numpy(self) -> np.ndarray:
        return self.array


class Training:
    """An optimizer's steps, which leave the variables as they are."""

    def __init__(self, *variables: Variable, reading: Reading = NUMPY, **choices) -> None:
        self.variables = variables or (Variable(3, 4), Variable(5), Variable())
        self.rate = 0.1
        operations = api.operations()
        prefix = operations.namespace()
        described = self.described(self.variables)
        self.gradients = Gradients(operations, described, Choices(**choices), prefix=prefix, reading=reading)

    def described(self, variables) -> list[Parameter]:
        return [
            Parameter(f"w{index}", variable.array.shape, dtype_of("float32"), variable)
            for index, variable in enumerate(variables)
        ]

    def step(self) -> None:
        for index, variable in enumerate(self.variables):
            self.gradients.put(index, np.ones(variable.array.shape, np.float32))
        self.gradients.wait()
        self.gradients.note(lambda: [("learning_rate", self.rate), ("momentum", 0.9)])

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


def perturbed(rank, training):
    training.variables[1].array += 0.01 * (rank == 1)


def rated(rank, training):
    training.rate = 0.2 if rank == 1 else 0.1


FAULTS = {
    "values": (perturbed, r"w1 \(1 on ranks 0, 2; 1.01 on rank 1\)"),
    "rate": (rated, r"learning_rate \(0.1 on ranks 0, 2; 0.2 on rank 1\)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_ranks_that_part_are_told_alike(fault):
    change, told = FAULTS[fault]

    def body(rank):
        training = Training()
        training.steps(2)
        change(rank, training)
        with pytest.raises(MismatchError, match=f"no longer have the same values of {told}: usual causes") as caught:  # noqa: PT012
            for number in range(3, 12):  # noqa: B007 - the last one is looked at
                training.step()
        assert "call broadcast_variables(...)" in str(caught.value)
        again = api.operations().allreduce(np.array([float(rank)]), name="again").result()
        return str(caught.value), number, again.tolist()

    first, *others = each_rank(3, body)
    assert first[1:] == (5, [1.0])
    assert others == [first] * 2


def test_what_parts_much_later_is_told():
    def body(rank):
        training = Training(*(Variable(2, 2) for _ in range(30)))
        training.steps(200)
        training.variables[17].array += rank
        with pytest.raises(MismatchError, match="w17"):
            training.steps(4 * 128)

    each_rank(2, body)


def test_both_can_be_allowed():
    def body(rank):
        training = Training()
        training.steps(2)
        perturbed(rank, training)
        rated(rank, training)
        training.steps(10)

    each_rank(2, body, check_parameters=False)


def test_what_all_ranks_change_is_no_difference():
    def body(rank):
        training = Training()
        for number in range(300):
            training.rate *= 0.9
            for variable in training.variables:
                variable.array += np.sin(number)
            training.step()

    each_rank(2, body)


def test_what_rounding_leaves_of_a_sum_near_zero_is_no_difference():
    def body(rank):
        training = Training(Variable())
        training.steps(6)
        training.variables[0].array = np.array(1e-5 + rank * 1e-7)
        training.steps(8)
        training.variables[0].array = np.array(1e-5 + rank)
        with pytest.raises(MismatchError, match="w0"):
            training.steps(20)

    each_rank(2, body)


def test_frameworks_may_round_otherwise():
    def body(rank):
        for part, tells in [(0.005, False), (0.05, True)]:
            training = Training(reading=Reading(f"framework {rank}", NUMPY.values))
            training.variables[0].array *= 1 + part * rank
            if tells:
                with pytest.raises(MismatchError, match="w0"):
                    training.steps(6)
            else:
                training.steps(20)
        training = Training()
        training.steps(2)
        training.variables[0].array *= 1 + 0.005 * rank
        with pytest.raises(MismatchError, match="w0"):
            training.steps(6)

    each_rank(2, body)


def test_a_rank_that_cannot_see_its_values_takes_part():
    def body(rank):
        seen = NUMPY if rank == 0 else Reading("NumPy", lambda owner, places: None)
        training = Training(reading=seen)
        training.steps(2)
        perturbed(rank, training)
        training.steps(4)
        training.rate = 0.1 if rank else UNSEEN
        training.steps(4)
        training.gradients.note = lambda settings: None
        training.steps(8)
        return True

    assert each_rank(2, body) == [True] * 2


def test_ranks_without_gradients_for_some_step_are_no_difference():
    """A step that one rank discards has settings there which others have not used."""

    def body(rank):
        training = Training()
        discarded = 0
        for number in range(1, 40):
            training.rate = 1.0 / number
            try:
                if number in {3, 4, 7, 8} and rank == 1:
                    training.gradients.put(0, np.ones((3, 4), np.float32))
                    training.gradients.drop()
                else:
                    training.step()
            except DiscardedStepError:
                discarded += 1
        perturbed(rank, training)
        with pytest.raises(MismatchError, match="w1"):
            training.steps(128)
        return discarded

    assert each_rank(2, body) == [4, 0]


def test_ranks_that_join_begin_anew():
    def body(rank):
        training = Training()
        operations = api.operations()
        for _ in range(3):
            training.steps(7 if rank else 3)
            if rank:
                training.variables[0].array += 1
            operations.join().result()
            training.variables[0].array = np.full((3, 4), 2.0)
        training.steps(3)
        perturbed(rank, training)
        with pytest.raises(MismatchError, match="w1"):
            training.steps(6)

    each_rank(2, body)


def test_ranks_outside_of_a_process_set_are_not_asked():
    def body(rank):
        some = ProcessSet([0, 2])
        if rank == 1:
            return
        training = Training(process_set=some)
        training.steps(2)
        rated(rank - 1, training)
        with pytest.raises(MismatchError, match=r"0.1 on rank 0; 0.2 on rank 2"):
            training.steps(3)

    each_rank(3, body)


def test_another_model_of_the_same_names_may_be_made_equal_in_its_first_step():
    def body(rank):
        training = Training()
        training.steps(7)
        for parts in (False, True):
            training.variables = (Variable(3, 4), Variable(5), Variable())
            training.variables[0].array += rank
            training.gradients.serve(training.described(training.variables))
            training.step()
            if not parts:
                training.variables[0].array -= rank
                training.steps(7)
        with pytest.raises(MismatchError, match="w0"):
            training.steps(33)

    each_rank(2, body)


def test_as_horovod_only_warns(caplog):
    def body(rank):
        training = Training()
        training.steps(2)
        rated(rank, training)
        training.steps(10)

    each_rank(2, body, as_horovod=True)
    assert {record.levelname for record in caplog.records if "no longer have" in record.message} == {"WARNING"}


@pytest.mark.parametrize(
    ("name", "digits"),
    [("float32", 2.0**-23), ("float64", 2.0**-52), ("float16", 2.0**-10), ("bfloat16", 2.0**-7), ("int32", 0.0)],
)
def test_digits_of_types(name, digits):
    assert digits_of(dtype_of(name)) == digits


def test_a_difference_in_a_small_part_of_a_variable_is_noticed():
    """Three rows of a hundred, at the next comparison: sums of magnitudes show what no single value does."""

    def body(rank):
        training = Training(Variable(100, 400))
        training.steps(2)
        training.variables[0].array[50:53] *= 1 - rank
        with pytest.raises(MismatchError, match="w0"):
            training.steps(4)

    each_rank(2, body)


@given(st.integers(1, 10_000), st.integers(1, 300), st.integers(0, 1000))
def test_places_are_spread_over_all_of_an_array(size, count, turn):
    found = places_in_turn(size, count, turn)
    assert len(found) == min(size, count)
    distances = np.diff([*found, found[0] + size])
    assert distances.min() >= max(1, size // count)
    assert distances.max() <= -(-size // count) + 1
    assert 0 <= found[0] <= found[-1] < size


def test_places_differ_from_turn_to_turn_until_all_have_been_seen():
    assert {place for turn in range(100) for place in places_in_turn(160, 8, turn).tolist()} == {*range(160)}
