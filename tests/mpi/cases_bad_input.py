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


def _again(**settings: str | bool) -> None:
    cd.shutdown()
    cd.init(**settings)


def _lock(*names: str) -> None:
    for _ in range(_STEPS):
        for handle in [cd.allreduce_async(torch.ones(4), name=name, op=cd.Sum) for name in names]:
            assert cd.synchronize(handle).tolist() == [cd.size()] * 4


def case_counts_of_tensors_that_are_reduced_where_they_lie_differ() -> None:
    count = 150_000 if _last() else 100_000
    tensor = torch.full((count,), float(cd.rank()))
    with pytest.raises(cd.MismatchError) as caught:
        cd.allreduce_(tensor, name="large")
    others = "rank 0" if cd.size() == 2 else f"ranks 0-{cd.size() - 2}"
    assert f"{others}: (100000,) at " in str(caught.value)
    assert f"rank {cd.size() - 1}: (150000,) at " in str(caught.value)
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


@ranks(2)
def case_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all() -> None:
    _again(nonfinite="skip")
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = cd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("weight", weight)])
    for factor, wanted in ((1.0, -1.0), (math.nan, -1.0), (math.inf, -1.0), (1.0, -2.0)):
        optimizer.zero_grad()
        (weight.sum() * (factor if _last() else 1.0)).backward()
        optimizer.step()
        assert weight.tolist() == [wanted] * 2
    _again()


@ranks(2)
def case_shapes_may_differ_where_only_the_number_of_elements_is_compared() -> None:
    _again(check="numel")
    assert cd.allreduce(torch.ones((2, 3) if _last() else (3, 2)), name="w", op=cd.Sum).flatten().tolist() == [2] * 6
    with pytest.raises(cd.MismatchError, match="shape"):
        cd.allreduce(torch.ones(2 + _last()), name="w")
    _again()


@ranks(2)
def case_a_tensor_that_is_changed_in_flight_is_told_where_that_is_checked() -> None:
    _again(check_in_flight=True)
    if cd.rank() == 0:
        tensor = torch.ones(50_000)
        handle = cd.allreduce_async_(tensor, name="w")
        tensor.add_(1)
        cd.send(torch.ones(1), 1, "go")
        with pytest.raises(cd.ChangedError, match=r"'w', submitted at \S*cases_bad_input.py:\d+, was changed"):
            cd.synchronize(handle)
    else:
        cd.recv(torch.ones(1), 0, "go")
        cd.allreduce(torch.ones(50_000), name="w")
    _goes_on()
    _again()


def case_nothing_is_there_before_all_have_come() -> None:
    """The result, which is another tensor, is in the handle; and one that is reduced in place is as it was."""
    if cd.rank():
        cd.recv(torch.ones(1), 0, "go")
    tensors = [torch.full((count,), cd.rank() + 1.0) for count in (3, 50_000, 3, 50_000)]
    before = [tensor.clone() for tensor in tensors]
    handles = [cd.allreduce_async(tensor, name=f"out {number}", op=cd.Sum) for number, tensor in enumerate(tensors[:2])]
    handles += [
        cd.allreduce_async_(tensor, name=f"in {number}", op=cd.Sum) for number, tensor in enumerate(tensors[2:])
    ]
    if cd.rank() == 0:
        assert not any(map(cd.poll, handles))
        assert all(map(torch.equal, tensors, before))
        for peer in range(1, cd.size()):
            cd.send(torch.ones(1), peer, "go")
    found = [cd.synchronize(handle) for handle in handles]
    assert all(map(torch.equal, tensors[:2], before))
    assert {value for result in found for value in result.tolist()} == {cd.size() * (cd.size() + 1) / 2}
    assert [result is tensor for result, tensor in zip(found, tensors, strict=True)] == [False, False, True, True]


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
    with pytest.raises(cd.MismatchError, match=r"shape of 'a\\nb\\x00c' "):
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
