"""Gradients as arrays, in buckets that no framework owns."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordd import api
from coordd.errors import ArgumentError, CoorddError, DiscardedStepError, MismatchError, NonFiniteError, PeerError
from coordd.gradients.reducer import Gradients, Parameter
from coordd.gradients.reducer import _Bucket as Bucket
from coordd.gradients.settings import Choices
from coordd.ops import handles
from coordd.ops.dtypes import dtype_of
from coordd.ops.handles import wait_all
from coordd.ops.messages import ReduceOp
from coordd.ops.process_sets import ProcessSet
from tests.local_ranks import each_rank

LARGE = 64 << 10
SHAPES = [(), (3,), (0,), (5, 7), (LARGE // 4,), (LARGE // 4 + 1, 2)]


def parameters(shapes: dict[str, tuple[int, ...]], dtype: str = "float32") -> list[Parameter]:
    return [Parameter(name, shape, dtype_of(dtype)) for name, shape in shapes.items()]


def made(shapes: dict[str, tuple[int, ...]], dtype: str = "float32", **choices) -> Gradients:
    operations = api.operations()
    prefix = operations.namespace()
    return Gradients(operations, parameters(shapes, dtype), Choices(**choices), prefix=prefix)


def value(rank: int, index: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(100 * rank + index).normal(size=shape)


@settings(deadline=None, max_examples=20)
@given(
    shapes=st.lists(
        st.sampled_from([(), (3,), (0,), (5, 7), (LARGE // 4,), (LARGE // 4 + 1, 2)]), min_size=1, max_size=8
    ),
    dtype=st.sampled_from(["float32", "float64", "float16", "bfloat16"]),
    fusion=st.sampled_from([0.0, 0.2, 64.0]),
    order=st.randoms(use_true_random=False),
)
def test_whatever_is_put_is_averaged(shapes, dtype, fusion, order):
    named = {f"w{index}": shape for index, shape in enumerate(shapes)}
    places = list(range(len(shapes)))
    order.shuffle(places)

    def body(rank):
        gradients = made(named, dtype)
        found = []
        for _ in range(2):
            for index in places if rank else reversed(places):
                gradients.put(index, value(rank, index, shapes[index]).astype(dtype_of(dtype)))
            reduced = gradients.wait()
            found.append([np.array(reduced[index], np.float64) for index in range(len(shapes))])
        assert sorted(index for bucket in gradients.buckets for index in bucket) == sorted(places)
        packed = [reduced.packed(number) for number in range(len(gradients.buckets))]
        for array, small in zip(packed, gradients.packed, strict=True):
            parts = [reduced[index].reshape(-1) for index in small]
            assert np.array_equal(array, np.concatenate(parts) if parts else [])
        return found

    exact = {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 1e-6)
    for one, again in each_rank(2, body, fusion_mb=fusion):
        for index, shape in enumerate(shapes):
            expected = (value(0, index, shape) + value(1, index, shape)) / 2
            np.testing.assert_allclose(one[index], expected, rtol=exact, atol=exact)
            assert np.array_equal(one[index], again[index])


def test_large_gradients_are_aligned_and_reduced_where_all_ranks_see_them():
    def body(rank):
        gradients = made({"a": (3,), "b": (LARGE,), "c": (5,)})
        for index, shape in enumerate([(3,), (LARGE,), (5,)]):
            gradients.put(index, np.full(shape, rank + 1.0, np.float32))
        found = gradients.wait()[1]
        commons = api.operations().daemon._loop._link.commons
        return found.ctypes.data % 64, commons.heap.locate(found) is not None

    assert each_rank(2, body) == [(0, True)] * 2


def test_memory_is_used_again_when_nobody_has_its_gradients_any_more():
    def body(rank):
        gradients = made({"a": (LARGE,)})
        homes = []
        kept = []
        for step in range(6):
            gradients.put(0, np.full(LARGE, step, np.float32))
            found = gradients.wait()[0]
            homes.append(found.ctypes.data)
            if step == 3:
                kept.append(found)
            del found
            gc.collect()
        return len(set(homes[:4])), len(set(homes[3:])), kept[0][0]

    assert each_rank(2, body) == [(1, 2, 3.0)] * 2


def test_memory_is_given_back_when_a_model_is_gone_and_had_anew_by_the_next_of_its_names():
    class Owner:
        pass

    def body(rank):
        operations, owner, blocks = api.operations(), Owner(), []
        allocate = operations.daemon.allocate

        def noted(size: int) -> np.ndarray:
            block = allocate(size)
            blocks.append(weakref.ref(block))
            return block

        operations.daemon.allocate = noted
        described = [Parameter("w", (LARGE,), dtype_of("float32"), owner)]
        gradients = Gradients(operations, described, Choices(), prefix=operations.namespace())

        def step() -> np.ndarray:
            gradients.put(0, np.ones(LARGE, np.float32))
            return gradients.wait()[0]

        kept = step()
        step()
        step()  # in the memory of the one before
        gradients.serve(described)
        gradients.serve(described)
        del owner
        gc.collect()
        assert described[0].owner is None
        assert [block() is None for block in blocks] == [False, True]
        del kept
        gc.collect()
        assert blocks[0]() is None
        assert step()[0] == 1
        step()
        gc.collect()
        return [block() is None for block in blocks]

    assert each_rank(2, body) == [[True, True, False]] * 2


def test_who_is_served_keeps_nothing():
    def body(rank):
        gradients, owner = made({"w": (LARGE,)}), Parameter("any", (), dtype_of("float32"))
        gradients.serve([Parameter("w", (LARGE,), dtype_of("float32"), owner)])
        gradients.put(0, np.ones(LARGE, np.float32))
        gradients.wait()
        parts = [weakref.ref(part) for part in (gradients, *gradients._buckets)]
        del gradients
        gc.collect()
        return [part() for part in parts], owner.name

    assert each_rank(2, body) == [([None, None], "any")] * 2


def test_who_has_no_gradient_takes_part_with_zeros():
    def body(rank):
        gradients = made({"both": (2,), "one": (2,), "none": (2,)})
        gradients.put(0, np.ones(2, np.float32))
        if rank:
            gradients.put(1, np.ones(2, np.float32))
        reduced = gradients.wait()
        assert reduced[2] is None
        return reduced[0].tolist(), reduced[1].tolist()

    assert each_rank(2, body) == [([1.0, 1.0], [0.5, 0.5])] * 2


@pytest.mark.parametrize("count", [2, LARGE])
def test_a_gradient_that_one_rank_cannot_use_is_refused_on_all(count):
    def body(rank):
        gradients = made({"both": (2,), "one": (count,), "none": (2,)})
        for _ in range(2):
            gradients.put(0, np.ones(2, np.float32))
            if rank:
                gradients.put(1, np.ones(count, np.float32))
            with pytest.raises(MismatchError, match="some ranks have gradients for one, and others have none"):
                gradients.wait([2] if rank else [1, 2])
        for index in range(2):
            gradients.put(index, np.ones(2 if not index else count, np.float32))
        return gradients.wait([2])[1][0]

    assert each_rank(2, body) == [1.0] * 2


def test_sums_and_process_sets_and_scales():
    def body(rank):
        some = ProcessSet([0, 2])
        found = []
        for choices in ({"op": ReduceOp.SUM}, {"predivide": 4.0}, {"process_set": some}):
            if rank not in (choices.get("process_set", some).ranks if "process_set" in choices else range(3)):
                continue
            gradients = made({"w": (2,)}, **choices)
            gradients.put(0, np.full(2, rank + 1.0, np.float32))
            found.append(gradients.wait()[0][0])
        return found

    everyone = each_rank(3, body)
    assert everyone[0] == everyone[2] == [6.0, 2.0, 2.0]
    assert everyone[1] == [6.0, 2.0]


def test_different_parameters_are_told_and_nothing_that_comes_of_it(monkeypatch, caplog):
    monkeypatch.setattr(handles, "_told", False)

    def body(rank):
        gradients = made({"w": (2,), ("a" if rank else "b"): (2 + rank,)})
        gradients.put(0, np.ones(2, np.float32))
        gradients.put(1, np.ones(2 + rank, np.float32))
        with pytest.raises(MismatchError, match="different parameters to DistributedOptimizer"):
            gradients.wait()

    each_rank(2, body)
    gc.collect()
    assert "nobody has asked" not in caplog.text


def test_a_gradient_that_is_put_twice_is_told():
    def body(rank):
        gradients = made({"w": (2,), "v": (2,)})
        gradients.put(0, np.ones(2, np.float32))
        with pytest.raises(CoorddError, match="'w' was computed twice"):
            gradients.put(0, np.ones(2, np.float32))
        assert gradients.wait()[0].tolist() == [1.0, 1.0]

    each_rank(2, body)


def test_what_is_not_finite_is_named_if_that_is_wanted(caplog):
    def body(rank):
        gradients = made({"w": (3,)})
        with pytest.raises(NonFiniteError, match="'w'"):
            gradients.put(0, np.array([1.0, np.nan, np.inf], np.float32))
        gradients.drop()

    each_rank(1, body, nonfinite="raise")

    def discarded(rank):
        gradients, heard = made({"w": (3,)}), 0
        for step in range(4):
            try:
                gradients.put(0, np.array([1.0, np.nan if (rank, step) == (0, 1) else 1.0, 1.0], np.float32))
                assert gradients.wait()[0].tolist() == [1.0] * 3
            except (NonFiniteError, DiscardedStepError) as error:
                heard += isinstance(error, DiscardedStepError) == bool(rank)
        return heard

    assert each_rank(2, discarded, nonfinite="raise") == [1, 1]

    def warned(rank):
        gradients = made({"w": (1,)})
        gradients.put(0, np.array([np.nan], np.float32))
        gradients.wait()

    each_rank(1, warned, nonfinite="warn")
    assert "'w'" in caplog.text


@pytest.mark.parametrize(
    ("choices", "settings_", "told"),
    [
        ({"predivide": 2.0, "op": ReduceOp.SUM}, {}, "gradient_predivide_factor not supported"),
        ({"op": ReduceOp.MAX}, {}, "not combined by Max"),
        ({}, {"nonfinite": "skip"}, "nonfinite=skip is for coordd.torch"),
    ],
)
def test_what_does_not_fit_together_is_refused(choices, settings_, told):
    def body(rank):
        with pytest.raises(ArgumentError, match=told):
            made({"w": (1,)}, **choices)

    each_rank(1, body, **settings_)


def test_integers_have_no_average():
    def body(rank):
        with pytest.raises(ArgumentError, match="an average of integers"):
            made({"w": (1,)}, "int32")

    each_rank(1, body)


def attempted(gradients: Gradients, step: int, shapes: dict[str, tuple[int, ...]], puts: int | None = None) -> str:
    """Makes a step; fails after so many gradients if that is wanted."""
    for index, shape in list(enumerate(shapes.values()))[:puts]:
        with gradients.begun(step):
            gradients.put(index, np.full(shape, step + 1.0, np.float32))
    if puts is not None:
        return "failed"
    try:
        found = gradients.wait()
    except DiscardedStepError as error:
        return str(error)
    assert all((found[index] == step + 1).all() for index in range(len(shapes))), "gradients of different steps"
    return "made"


@pytest.mark.parametrize("puts", [1, 2, 3])
@pytest.mark.parametrize("fails", [0, 1, 6])
@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("settings_", [{}, {"lock_steps": 2}], ids=str)
def test_a_step_that_a_rank_does_not_complete_is_discarded_on_all(puts, fails, told, settings_):
    """Each gradient in a bucket of its own; where the rank is not told, it notices when the next step begins."""
    shapes = {"a": (3,), "b": (5,), "c": (4,)}

    def body(rank):
        gradients, found = made(shapes), []
        for step in range(9):
            failing = rank == 1 and step == fails
            found.append(attempted(gradients, step, shapes, puts if failing else None))
            if failing and told:
                gradients.drop("has run out of memory")
        return found

    reason = "rank 1 has run out of memory" if told else "rank 1 has not completed a step, which has failed"
    first, second = each_rank(2, body, fusion_mb=0.0, **settings_)
    assert [step for step, text in enumerate(first) if text != "made"] == [fails]
    assert reason in first[fails]
    assert second == ["made" if step != fails else "failed" for step in range(9)]


def test_an_interrupted_wait_fails_the_job(monkeypatch):
    """Such as by a signal's handler: what was reduced is lost here, and the other ranks use it."""

    def interrupted(handles):
        usual(handles)
        if api.rank() == 1:
            text = "a handler's"
            raise TimeoutError(text)

    def body(rank):
        gradients = made({"w": (3,)})
        gradients.put(0, np.zeros(3, np.float32))
        with pytest.raises(TimeoutError) if rank else contextlib.suppress(PeerError):
            gradients.wait()
        with pytest.raises(PeerError, match="rank 1 was interrupted by TimeoutError: a handler's during the reduction"):
            [api.operations().barrier().result() for _ in range(1000)]

    usual = wait_all
    monkeypatch.setattr("coordd.gradients.reducer.wait_all", interrupted)
    each_rank(2, body)


def given(gradients, step, values):
    """Puts some gradients on a thread of its own, as one operation of a graph does; returns it and its errors."""
    found = []

    def run():
        try:
            with gradients.begun(step):
                for index, value in values.items():
                    gradients.put(index, np.full(LARGE, value, np.float32))
        except CoorddError as error:
            found.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, found


def fetched(gradients):
    """Returns the first value of each gradient."""
    try:
        reduced = gradients.wait()
    except DiscardedStepError:
        return "discarded"
    return [float(reduced[index][0]) for index in range(4)]


def test_a_step_that_one_thread_discards_is_over_for_the_others(monkeypatch):
    """One of TensorFlow's threads finds a value that is not finite while another one is about to end its bucket."""
    copied, discarded = threading.Event(), threading.Event()

    def slow(bucket, index, gradient):
        found = usual(bucket, index, gradient)
        if bucket._operations.daemon.world.rank == 0 and index == 1 and gradient[0] == 1:
            copied.set()
            assert discarded.wait(60)
        return found

    def body(rank):
        gradients = made(dict.fromkeys("abcd", (LARGE,)))
        seen = []
        for step in range(4):
            fails = step == 1 and not rank
            one, errors = given(gradients, step, {1: step, 0: step})
            assert not fails or copied.wait(60)
            other, mine = given(gradients, step, {3: np.nan if fails else step, 2: step})
            other.join(60)
            discarded.set() if fails else None
            one.join(60)
            seen.append((mine, errors) if fails else fetched(gradients))
        return seen

    usual = Bucket.put
    monkeypatch.setattr(Bucket, "put", slow)
    first, second = each_rank(2, body, fusion_mb=0.5, nonfinite="raise")
    assert first == [[0.0] * 4, ([NonFiniteError], [DiscardedStepError]), [2.0] * 4, [3.0] * 4]
    assert second == [[0.0] * 4, "discarded", [2.0] * 4, [3.0] * 4]


class Owner:
    """A variable of this rank."""

    def __init__(self, value):
        self.value = value

    def numpy(self):
        return self.value


def test_that_values_differ_is_told_after_a_discarded_step():
    def body(rank):
        operations = api.operations()
        owner = Owner(np.full(3, rank, np.float32))
        parameter = Parameter("a", (3,), dtype_of("float32"), owner)
        gradients = Gradients(operations, [parameter], Choices(), prefix=operations.namespace())
        seen = []
        for step in range(4):
            try:
                with gradients.begun(step):
                    gradients.put(0, np.full(3, step, np.float32))
                if step == 1 and not rank:
                    gradients.drop("has failed")
                    seen.append("dropped")
                else:
                    seen.append(float(gradients.wait()[0][0]))
            except CoorddError as error:
                seen.append(type(error))
        return seen

    first, second = each_rank(2, body)
    assert first == [0.0, "dropped", MismatchError, 3.0]
    assert second == [0.0, DiscardedStepError, MismatchError, 3.0]


def test_the_end_of_an_earlier_step_may_fail():
    """Later steps get the error, too, and do not wait for the one that has begun by it."""

    def step(gradients, number):
        with gradients.begun(number):
            gradients.put(0, np.zeros(3, np.float32))
        gradients.wait()

    def body(rank):
        gradients = made({"w": (3,)})
        if rank:
            api.operations().daemon.fail("has failed")
            return
        gradients.put(0, np.zeros(3, np.float32))
        with pytest.raises(PeerError):
            [api.operations().barrier().result() for _ in range(1000)]
        for number in range(1, 4):
            with pytest.raises(PeerError):
                step(gradients, number)

    each_rank(2, body)
