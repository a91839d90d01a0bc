"""What goes wrong silently elsewhere: every rank hears of it, or nothing happens, and the daemon goes on working."""

from __future__ import annotations

import math

import pytest
import torch

import coordd.torch as cd
from tests.mpi.cases import ranks

_STEPS = 40  # enough for a plan to be locked


def _goes_on() -> None:
    assert cd.allreduce(torch.tensor(1), op=cd.Sum) == cd.size()


def _last() -> bool:
    return cd.rank() == cd.size() - 1


def _lock(*names: str) -> None:
    for _ in range(_STEPS):
        for handle in [cd.allreduce_async(torch.ones(4), name=name, op=cd.Sum) for name in names]:
            assert cd.synchronize(handle).tolist() == [cd.size()] * 4


def case_counts_of_tensors_that_are_reduced_where_they_lie_differ() -> None:
    count = 150_000 if _last() else 100_000
    tensor = torch.full((count,), float(cd.rank()))
    with pytest.raises(cd.MismatchError) as caught:
        cd.allreduce_(tensor, name="large")
    assert "(100000,)" in str(caught.value)
    assert "(150000,)" in str(caught.value)
    assert tensor.tolist() == [cd.rank()] * count  # nothing has moved
    _goes_on()


def case_a_shape_that_changes_on_one_rank_breaks_the_lock_and_is_told_to_all() -> None:
    _lock("a", "b")
    handles = {name: cd.allreduce_async(torch.ones(4 + (name == "b" and _last())), name=name) for name in "ab"}
    assert cd.synchronize(handles["a"]).tolist() == [1.0] * 4
    with pytest.raises(cd.MismatchError, match="'b'"):
        cd.synchronize(handles["b"])
    _lock("a", "b")


def case_a_type_that_changes_on_one_rank_breaks_the_lock_and_is_told_to_all() -> None:
    _lock("a")
    with pytest.raises(cd.MismatchError, match="float64"):
        cd.allreduce(torch.ones(4, dtype=torch.float64 if _last() else torch.float32), name="a", op=cd.Sum)
    _lock("a")


def case_another_operation_on_a_locked_tensor_is_told_to_all() -> None:
    _lock("a")
    with pytest.raises(cd.MismatchError, match="max"):
        cd.allreduce(torch.ones(4), name="a", op=cd.Max if _last() else cd.Sum)
    _lock("a")


def case_what_is_not_finite_reaches_all_ranks_alike_and_no_other_tensor() -> None:
    odd = torch.tensor([math.nan, math.inf, -math.inf, 1.0]) if _last() else torch.ones(4)
    for op in (cd.Sum, cd.Average):
        handles = [cd.allreduce_async(tensor, op=op) for tensor in (torch.ones(3), odd, torch.ones(3))]
        before, found, after = map(cd.synchronize, handles)
        assert math.isnan(found[0])
        assert found[1:3].tolist() == [math.inf, -math.inf]
        assert before.tolist() == after.tolist() == [found[3].item()] * 3
    everybodys = cd.allgather(cd.allreduce(odd, op=cd.Sum).view(torch.int32)[None])
    assert (everybodys == everybodys[0]).all()  # to the bit, whatever kind of NaN it is


def case_eight_bit_floats_are_refused_with_what_to_do() -> None:
    with pytest.raises(cd.ArgumentError, match="reduce in bfloat16"):
        cd.allreduce(torch.ones(3).to(torch.float8_e4m3fn), op=cd.Sum)
    _goes_on()


def case_names_may_be_of_any_letters_but_not_of_any_length() -> None:
    names = ["n" * 1024, "✓ Größe", "a\nb\0c", "\N{PILE OF POO}" * 256, "[red]'\"\\"]
    ordered = names if cd.rank() % 2 else names[::-1]
    handles = {name: cd.allreduce_async(torch.ones(2), name=name, op=cd.Sum) for name in ordered}
    for name in names:
        assert cd.synchronize(handles[name]).tolist() == [cd.size()] * 2
    with pytest.raises(cd.ArgumentError, match="a name has 1 to 1024 bytes"):
        cd.allreduce(torch.ones(2), name="n" * 10_000)
    with pytest.raises(cd.MismatchError, match="shape"):
        cd.allreduce(torch.ones(2 + _last()), name=names[2])
    _goes_on()


def case_a_result_is_nobody_elses_memory() -> None:
    """What the caller changes after it was handed over reaches no other rank, and no later result."""
    for _ in range(_STEPS):
        found = cd.allreduce(torch.ones(50_000), name="mine", op=cd.Sum)
        assert found.min() == found.max() == cd.size()
        found += cd.rank() + 1


@ranks(2)
def case_a_daemon_can_be_ended_and_another_begun() -> None:
    for _ in range(3):
        cd.shutdown()
        with pytest.raises(cd.NotInitializedError):
            cd.allreduce(torch.ones(1))
        cd.init()
        _goes_on()
