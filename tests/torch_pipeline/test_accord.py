"""Ranks that were given different batches."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from coordd import api
from coordd.errors import ArgumentError, MismatchError
from coordd.pipeline.batch_check import Accord
from coordd_torch.pipeline.fingerprint import fingerprint
from coordd_torch.pipeline.fingerprint import told as what
from tests.local_ranks import local_ranks


def check(rank, first, others, **options):
    """Rank 0 is given one call, inputs and targets, the others another."""
    accord = Accord(api.operations(), name="given")
    call, x, y = first if rank == 0 else others
    accord.check(call, {**what(x, y), "the scale of the loss": options["scales"][rank] if options else 1.0})


def told(*given, **options):
    with local_ranks(3) as ranks:
        errors = ranks.errors(lambda rank: check(rank, *given, **options), ArgumentError)
    texts = {str(error) for error in errors}
    assert len(texts) == 1
    return texts.pop()


def test_the_same_is_not_remarked_upon():
    given = ("train_batch", {"x": torch.ones(4, 2), "n": 3}, None)
    with local_ranks(2) as ranks:
        ranks.each(lambda rank: check(rank, given, given))


def test_other_shapes_of_the_same_values_are_told():
    x, y = torch.ones(4, 2), torch.zeros(4)
    text = told(("train_batch", x, y), ("train_batch", x, y[:, None]))
    assert "shapes ((4, 2), (4,) on rank 0, (4, 2), (4, 1) on ranks 1-2)" in text
    assert "targets" not in text


def test_other_rows_calls_and_scales_are_told_with_the_ranks():
    x, y = torch.ones(4, 2), torch.zeros(4)
    assert "rows (4 on rank 0, 3 on ranks 1-2)" in told(("train_batch", x, y), ("train_batch", x[:3], y[:3]))
    text = told(("train_batch", x, y), ("eval_batch", x, y))
    assert "what they call (train_batch, call 1 on rank 0, eval_batch, call 1 on ranks 1-2)" in text
    assert "rows (" not in text
    same = ("train_batch", x, y)
    assert "the scale of the loss (1.0 on ranks 0, 2, 2.0 on rank 1)" in told(same, same, scales=[1.0, 2.0, 1.0])


def test_a_loader_that_shuffles_otherwise_is_told():
    x, y = torch.arange(40.0).reshape(20, 2), torch.arange(20)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    text = told(("train_batch", x, y), ("train_batch", x[order], y[order]))
    assert "inputs (" in text
    assert "targets (" in text
    assert "shuffle with the same seed" in text
    one, other = ({"x": x, "scale": scale} for scale in (1.0, 2.0))
    assert "inputs (" in told(("predict", one, None), ("predict", other, None))


def test_a_call_that_fails_before_the_comparison_does_not_count():
    """The other rank was elsewhere, such as in `save`."""

    def body(rank):
        accord = Accord(api.operations(), name="given")
        for elsewhere in (0, 1):
            with pytest.raises(MismatchError):
                api.allreduce(np.ones(1), name="given") if rank == elsewhere else accord.check("train_batch", {})
            accord.check("train_batch", {})

    with local_ranks(2) as ranks:
        ranks.each(body)


def test_calls_of_a_block_that_fails_do_not_count():
    """The other rank was elsewhere."""

    def body(rank):
        accord = Accord(api.operations(), name="given")
        for elsewhere in (0, 1):
            accord.check("train_batch", {})
            with pytest.raises(MismatchError), nullcontext() if rank == elsewhere else accord.several("fit"):
                api.allreduce(np.ones(1), name="given") if rank == elsewhere else accord.check("fit", {})
            accord.check("train_batch", {})

    with local_ranks(2) as ranks:
        ranks.each(body)


def test_calls_inside_of_another_are_told_from_the_same_ones_outside():
    def body(rank):
        accord = Accord(api.operations(), name="given")
        for inside in (0, 1):
            with pytest.raises(ArgumentError) as caught, accord.several("fit") if rank == inside else nullcontext():
                accord.check("train_batch", {})
            told = [f"train_batch{' in fit' * (each == inside)}, call 1 on rank {each}" for each in range(2)]
            assert f"differ in what they call ({', '.join(told)}): " in str(caught.value)
            with accord.several("fit"):
                accord.check("fit", {})
                accord.check("train_batch", {})
                with accord.several("evaluate"):
                    accord.check("evaluate", {})
            accord.check("train_batch", {})
            with pytest.raises(ArgumentError, match="what they call"), accord.several("fit"):
                accord.check(f"call {rank}", {})

    with local_ranks(2) as ranks:
        ranks.each(body)


def test_ranks_in_different_outermost_calls_are_known_until_the_next_comparison_or_block():
    def body(rank):
        accord = Accord(api.operations(), name="given")
        with accord.several(f"outer {rank}") as known:
            assert not known()
            with pytest.raises(ArgumentError, match="what they call"):
                accord.check("train_batch", {})
            with pytest.raises(TypeError), accord.several("evaluate"):
                raise TypeError  # before anything is compared
            assert known()
        with accord.several("fit") as known:
            assert not known()
        with accord.several(f"outer {rank}") as known:
            with pytest.raises(KeyError if rank else ArgumentError):
                accord.check("train_batch", {} if rank == 0 else refuse)
            assert known()

    def refuse(_):
        raise KeyError

    with local_ranks(2) as ranks:
        ranks.each(body)


def test_other_errors_of_one_call_must_be_told():
    """Also after ranks have made different calls in it."""

    def body(rank):
        accord = Accord(api.operations(), name="given")
        with accord.several("fit") as known:
            with pytest.raises(ArgumentError, match="what they call"):
                accord.check(f"call {rank}", {})
            assert not known()
            with pytest.raises(ArgumentError, match="rows"):
                accord.check("train_batch", {"rows": rank})
            assert not known()

    with local_ranks(2) as ranks:
        ranks.each(body)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_fingerprint_is_of_the_first_the_middle_and_the_last_row(dtype):
    x = torch.zeros(9, 3).to(dtype)
    plain = fingerprint([x, None, torch.tensor(1.0), torch.zeros(0, 3)])
    assert plain == fingerprint((x.t().contiguous().t(), None, torch.tensor(1.0), torch.zeros(0, 3)))
    for row in (0, 4, 8):
        other = x.clone()
        other[row, 1] = 1
        assert fingerprint([other, None, torch.tensor(1.0), torch.zeros(0, 3)]) != plain


def test_a_fingerprint_is_of_a_single_row_whatever_its_stride():
    column = torch.arange(21.0).reshape(3, 7)[2:, 6]
    assert column.stride() == (7,)
    assert fingerprint([column]) == fingerprint([torch.tensor([20.0])]) != fingerprint([torch.tensor([19.0])])


def test_a_fingerprint_is_of_what_is_no_tensor_too():
    plain = [3, 0.5, True, "text", None, np.int64(3), torch.float32]
    found = {
        fingerprint({"x": torch.ones(2, 3), "more": each}) for each in (*plain, 4, 0.25, False, "test", "x" * 9000)
    }
    assert len(found) == len(plain) + 5
    assert fingerprint([object()]) == fingerprint([object()])
