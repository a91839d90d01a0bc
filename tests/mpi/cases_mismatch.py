"""Ranks that disagree: all of them hear the same, with every rank's value, and the daemon goes on working."""

from collections.abc import Callable

import pytest
import torch

import coordd.torch as cd


def _disagree(start: Callable[[], object], *words: str) -> None:
    """Expects the same error on all ranks, that holds the words and where the tensor was submitted."""
    with pytest.raises(cd.MismatchError) as caught:
        cd.synchronize(start())
    text = str(caught.value)
    for word in (*words, "cases_mismatch.py:"):
        assert word in text
    assert len(set(cd.allgather_object(text))) == 1
    assert cd.allreduce(torch.tensor(1), op=cd.Sum) == cd.size()


def case_shapes() -> None:
    shape = (2, 3) if cd.rank() else (3, 2)
    _disagree(lambda: cd.allreduce_async(torch.ones(shape), name="weight"), "weight", "(2, 3)", "(3, 2)", "rank 0")


def case_types() -> None:
    dtype = torch.float32 if cd.rank() else torch.float64
    _disagree(lambda: cd.allreduce_async(torch.ones(2, dtype=dtype), name="t"), "'t'", "float32", "float64")


def case_operations() -> None:
    op = cd.Sum if cd.rank() else cd.Max
    _disagree(lambda: cd.allreduce_async(torch.ones(2), op=op, name="o"), "'o'", "sum", "max")


def case_kinds() -> None:
    start = cd.allreduce_async if cd.rank() else cd.allgather_async
    _disagree(lambda: start(torch.ones(2), name="k"), "'k'", "allreduce", "allgather")


def case_roots() -> None:
    _disagree(lambda: cd.broadcast_async(torch.ones(2), cd.rank() % 2, name="r"), "'r'", "root", "0", "1")


def case_factors() -> None:
    _disagree(lambda: cd.allreduce_async(torch.ones(2), name="f", prescale_factor=1.0 + cd.rank() % 2), "'f'", "2.0")


def case_rows_may_differ_in_allgather_but_nothing_else() -> None:
    shape = (cd.rank() + 1, 2 + cd.rank() % 2)
    _disagree(lambda: cd.allgather_async(torch.ones(shape), name="g"), "'g'", "(any, 2)", "(any, 3)")


def case_only_one_of_many_is_wrong() -> None:
    counts = [3 + cd.rank() if i == 5 else 3 for i in range(9)]
    handles = [cd.allreduce_async(torch.ones(count), name=f"m{i}", op=cd.Sum) for i, count in enumerate(counts)]
    for i, handle in enumerate(handles):
        if i == 5:
            with pytest.raises(cd.MismatchError, match="m5"):
                cd.synchronize(handle)
        else:
            assert cd.synchronize(handle).tolist() == [cd.size()] * 3


def case_a_changed_shape_is_no_mismatch() -> None:
    for count in (4, 4, 4, 7, 4):
        assert cd.allreduce(torch.ones(count), name="changing", op=cd.Sum).tolist() == [cd.size()] * count


def case_a_name_is_used_once_at_a_time() -> None:
    # Rank 0 comes last, so that the first of the others is still in flight when their second comes.
    if cd.rank() == 0:
        for peer in range(1, cd.size()):
            cd.recv(torch.empty(1), peer, "tried")
    first = cd.allreduce_async(torch.ones(2), name="twice", op=cd.Sum)
    if cd.rank():
        with pytest.raises(cd.DuplicateNameError, match="twice"):
            cd.allreduce_async(torch.ones(2), name="twice", op=cd.Sum)
        cd.send(torch.ones(1), 0, "tried")
    assert cd.synchronize(first).tolist() == [cd.size()] * 2


def case_strangers_are_no_handles() -> None:
    with pytest.raises(cd.HandleError):
        cd.synchronize(42)
    with pytest.raises(cd.HandleError):
        cd.poll(None)
