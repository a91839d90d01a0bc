"""Calls that all ranks make together, objects, groups, and ranks that wait for each other; ranks are threads."""

from __future__ import annotations

import inspect
import sys
import threading

import numpy as np
import pytest
import torch

import coordd.torch as cd
from coordd import api
from coordd.daemon import operations
from coordd.parallel.collective_calls import CollectiveCall
from tests.local_ranks import come_together, each_rank

WAYS = pytest.mark.parametrize("settings", [{}, {"stall_check": False}, {"fan_in": 2, "simulate_hosts": 2}])


def one() -> np.ndarray:
    return np.ones(2)


def refuse(*, wanted: bool) -> None:
    if wanted:
        raise ValueError("bad")


@WAYS
@pytest.mark.parametrize("early", [True, False])
def test_a_rank_that_refuses_a_call_is_named_to_all_others_and_work_goes_on(settings, early):
    def body(rank):
        try:
            with CollectiveCall("Thing"):
                refuse(wanted=rank == 1 and early)
                api.allreduce(one(), name="x")
                api.allreduce(one())
                refuse(wanted=rank == 1)
        except (ValueError, cd.RefusedError) as error:
            text = str(error)
        with CollectiveCall("Thing"):
            api.allreduce(one(), name="x")
        return text, api.allreduce(one()).tolist()

    first, second, *rest = each_rank(4, body, **settings)
    assert second == ("bad", [1.0, 1.0])
    for text, found in (first, *rest):
        assert text.startswith("rank 1 refused Thing at ")
        assert text.endswith("ValueError: bad")
        assert found == [1.0, 1.0]


@pytest.mark.parametrize("refused", [False, True])
def test_what_is_to_be_done_once_all_ranks_agree_is_done_only_then(refused):
    def body(rank):
        found = []
        try:
            with CollectiveCall("Thing") as call:
                call.agreed.append(lambda: found.append(rank))
                refuse(wanted=rank == 1 and refused)
        except (ValueError, cd.RefusedError):
            assert refused
        return found

    assert each_rank(2, body) == ([[], []] if refused else [[0], [1]])


def test_what_differs_is_listed_on_all_ranks_when_the_call_ends():
    def body(rank):
        with (
            pytest.raises(cd.MismatchError, match="b 0 on rank 0 only; b 1 on rank 1 only"),
            CollectiveCall("Thing") as call,
        ):
            call.lines += ["a", f"b {rank}"]

    each_rank(2, body)


@pytest.mark.parametrize("steady", [False, True])
def test_what_differs_in_a_nested_call_is_listed_when_that_ends(steady):
    def body(rank):
        ended = 0
        for lines in ([], ["a"], ["a", f"b {rank}"]):
            try:
                with CollectiveCall("Outer", steady=steady), CollectiveCall("Inner") as call:
                    call.lines += lines
                ended += 1
            except cd.MismatchError as error:
                text = str(error)
        return ended, text, api.allreduce(one()).tolist()

    for ended, text, found in each_rank(2, body):
        assert (ended, found) == (2, [1.0, 1.0])
        assert "different parameters to Inner" in text
        assert "b 0 on rank 0 only; b 1 on rank 1 only" in text


def test_a_call_of_some_ranks_does_not_concern_the_others():
    some = cd.ProcessSet([0, 2])

    def body(rank):
        kind = ValueError if rank == 0 else cd.RefusedError
        if rank != 1:
            with pytest.raises(kind), CollectiveCall("Thing", some):  # noqa: PT012 - the call is all of it
                refuse(wanted=rank == 0)
                api.allreduce(one(), process_set=some)
        return api.allreduce(one()).tolist()

    assert each_rank(3, body) == [[1.0, 1.0]] * 3


@WAYS
def test_two_sets_of_which_one_leaves_a_rank_out_end_on_all(settings):
    def body(rank):
        mine = cd.ProcessSet([0] if rank == 0 else [0, 1, 2])
        with pytest.raises(cd.MismatchError, match="ranks wait for each other"):  # noqa: PT012 - rank 0 may do the first
            api.allreduce(one(), name="w", process_set=mine)
            api.allreduce(one(), name="next")
        return api.allreduce(one()).tolist()

    assert each_rank(3, body, **settings) == [[1.0, 1.0]] * 3


@pytest.mark.parametrize("name", ["g", None])
def test_groups_of_different_sizes_are_told_to_all_and_later_names_match(name):
    def body(rank):
        tensors = [torch.ones(2) for _ in range(2 + rank)]
        with pytest.raises(cd.MismatchError, match=r"ranks wait for each other.*_0of2.*_0of3"):
            cd.grouped_allreduce(tensors, name=name)
        return cd.allreduce(torch.full((2,), float(rank))).tolist()

    assert each_rank(2, body) == [[0.5, 0.5]] * 2


@WAYS
def test_operations_without_names_match_after_ranks_have_waited_for_each_other(settings):
    def body(rank):
        with pytest.raises(cd.MismatchError, match="ranks wait for each other"):
            api.allreduce(one()) if rank == 0 else api.broadcast(one(), 0, name="other")
        cd.barrier()
        pending = [cd.allreduce_async(torch.full((2,), 10.0**power * (rank + 1))) for power in range(3)]
        found = [cd.synchronize(handle)[0].item() for handle in pending]
        with pytest.raises(cd.MismatchError, match="ranks wait for each other"):
            cd.barrier() if rank == 0 else cd.allgather_object(7)
        return found, cd.allgather_object(rank)

    assert each_rank(3, body, **settings) == [([2.0, 20.0, 200.0], [0, 1, 2])] * 3


def test_a_rank_that_comes_later_to_what_has_failed_counts_as_the_others_from_then_on():
    failed = threading.Event()

    def body(rank):
        if rank == 2:
            assert failed.wait(60)
        with pytest.raises(cd.MismatchError, match="ranks wait for each other"):
            api.allreduce(one(), process_set=cd.ProcessSet([0, 1]) if rank == 1 else cd.global_process_set)
        failed.set()
        return api.allreduce(one() * rank)[0]

    assert each_rank(3, body) == [1.0] * 3


def test_what_a_rank_still_starts_of_what_has_failed_is_not_paired_with_what_comes_later():
    """It has not heard of the failure yet, as it has not waited."""
    failed = threading.Event()

    def body(rank):
        if rank == 0:
            with pytest.raises(cd.MismatchError, match="ranks wait for each other"):
                cd.barrier()
        else:
            pending = [cd.allreduce_async(torch.ones(2))]
            assert rank == 1 or failed.wait(60)
            pending.append(cd.allreduce_async(torch.ones(2)))
            with pytest.raises(cd.MismatchError, match="ranks wait for each other"):
                cd.synchronize(pending[0])
        failed.set()
        while not come_together():
            pass
        return [cd.allreduce(torch.full((2,), float(rank + 3 * step)))[0].item() for step in range(3)]

    assert each_rank(3, body) == [[1.0, 4.0, 7.0]] * 3


def test_objects_are_gathered_from_the_members_that_have_not_joined():
    some = cd.ProcessSet([0, 1, 2])

    def body(rank):
        found = cd.allgather_object(("from", rank), process_set=some) if rank in {0, 2} else None
        if rank < 3:
            cd.join(process_set=some)
        return found

    both = [("from", 0), ("from", 2)]
    assert each_rank(4, body) == [both, None, both, None]


class Unpicklable:
    def __reduce__(self):
        raise TypeError("never")


@pytest.mark.parametrize("gather", [False, True])
def test_an_object_that_one_rank_cannot_pickle_is_told_to_all(gather):
    def body(rank):
        thing = Unpicklable() if rank == 1 else 7
        with pytest.raises(TypeError if rank == 1 else cd.RefusedError, match="never"):
            cd.allgather_object(thing) if gather else cd.broadcast_object(thing, 1)
        return cd.broadcast_object(rank, 1)

    assert each_rank(3, body) == [1, 1, 1]


def test_process_sets_are_added_by_all_ranks_alike_or_by_none():
    def body(rank):
        with pytest.raises(cd.MismatchError, match="ranks 0 on rank 0 only; ranks 0-1 on rank 1 only"):
            cd.add_process_set([0] if rank == 0 else [0, 1])
        with pytest.raises(cd.ArgumentError if rank else cd.RefusedError):
            cd.add_process_set([0, 9] if rank else [0])
        return cd.add_process_set([0, 1]).ranks

    assert each_rank(2, body) == [(0, 1)] * 2


def test_ranks_that_make_different_things_are_told():
    def body(rank):
        told = pytest.raises(cd.MismatchError, match=r"ranks wait for each other.*Optimizer #1.*Pipeline #1")
        with told, CollectiveCall("Pipeline" if rank else "Optimizer"):
            pass

    each_rank(2, body)


WRONG = {
    "a keyword": lambda some: {"pin_memory": True, "process_set": some},
    "a keyword for the set": lambda some: {"proces_set": some},
    "a list for the set": lambda some: {"process_set": list(some.ranks)},
    "ranks that do not exist": lambda some: {"process_set": cd.ProcessSet([*some.ranks, 9])},
}


def distributed(**options):
    return cd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1), **options)


def broadcast(**options):
    cd.broadcast_parameters([torch.ones(2)], **{"root_rank": 0, **options})


def broadcast_state(**options):
    cd.broadcast_optimizer_state(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1), **options)


@pytest.mark.parametrize("make", [distributed, broadcast, broadcast_state])
@pytest.mark.parametrize("wrong", WRONG)
def test_arguments_that_one_member_gives_wrongly_concern_the_members_only(make, wrong):
    """Python itself refuses some of them, before a line of the function runs."""
    some = cd.ProcessSet([0, 2])

    def body(rank):
        if rank == 0:
            with pytest.raises((TypeError, cd.ArgumentError)):
                make(**WRONG[wrong](some))
        elif rank == 2:
            with pytest.raises(cd.RefusedError, match=r"rank 0 refused .*(keyword|process_set|Process set)"):
                make(process_set=some)
        if rank != 1:
            make(process_set=some)
        make()
        return cd.allreduce(torch.full((2,), float(rank))).tolist()

    assert each_rank(3, body) == [[1.0, 1.0]] * 3


def entered(function):
    """Makes the call as a rank does that has given no wrong argument."""
    with CollectiveCall(function.__name__, namespace=function in {cd.DistributedOptimizer, cd.Pipeline}):
        pass


FUNCTIONS = [cd.DistributedOptimizer, cd.broadcast_parameters, cd.broadcast_optimizer_state, cd.Pipeline]


def test_a_missing_argument_of_one_rank_is_told_to_all():
    def body(rank):
        for function in (*FUNCTIONS, cd.add_process_set):
            wrong = pytest.raises(TypeError if rank else cd.RefusedError, match=r"(missing|unexpected|multiple)")
            with wrong:
                function(wrong=1) if rank else entered(function)
        return cd.add_process_set([0, 1]).ranks, distributed()._coordd.channel.prefix

    assert each_rank(2, body) == [((0, 1), "opt2.")] * 2


def test_what_a_collective_call_shows_is_what_callers_give():
    for function in (
        cd.DistributedOptimizer,
        cd.broadcast_parameters,
        cd.add_process_set,
        cd.Pipeline,
        cd.Pipeline.fit,
    ):
        names = [*inspect.signature(function).parameters]
        assert not {"_", "_call", "call"} & {*names}
        assert inspect.getdoc(function)
    assert [*inspect.signature(cd.DistributedOptimizer).parameters][:2] == ["optimizer", "named_parameters"]


@WAYS
def test_joins_of_different_sets_that_wait_for_each_other_end_on_all(settings):
    def body(rank):
        mine = cd.ProcessSet([0, 1]) if rank == 0 else cd.ProcessSet([0, 1, 2])
        with pytest.raises(cd.MismatchError, match=r"ranks wait for each other.*\(join\)"):
            cd.join(process_set=mine)
        return api.allreduce(one()).tolist(), cd.join()

    found = each_rank(3, body, **settings)
    assert [sums for sums, _ in found] == [[1.0, 1.0]] * 3
    assert len({last for _, last in found}) == 1


class Exit:
    """Ends the process when it is pickled, as a signal handler may at that moment."""

    def __reduce__(self):
        sys.exit(0)


@pytest.mark.parametrize("steady", [False, True])
@pytest.mark.parametrize("cause", ["a root that there is not", "an exit"])
def test_unnamed_objects_that_are_refused_in_a_call_are_told_and_later_ones_match(steady, cause):
    def body(rank):
        exits = cause == "an exit"
        with CollectiveCall("Thing", steady=steady):
            with pytest.raises((cd.ArgumentError, cd.RefusedError, SystemExit)):
                cd.broadcast_object(None if rank else Exit(), 0 if rank or exits else 7)
            found = cd.allgather_object(rank)
        return found, cd.allgather_object(rank)

    assert each_rank(2, body) == [([0, 1], [0, 1])] * 2


def test_objects_may_be_shared_in_a_process_set_whose_number_is_a_long_text(monkeypatch):
    monkeypatch.setattr(operations, "spans", lambda _: "0, " * 500)

    def body(rank):
        return cd.allgather_object(rank, process_set=cd.ProcessSet([0, 1])) if rank < 2 else None

    assert each_rank(3, body) == [[0, 1], [0, 1], None]


def test_an_optimizer_that_one_rank_alone_begins_to_make_does_not_shift_later_ones():
    def made(rank):
        weight = torch.nn.Parameter(torch.ones(2))
        optimizer = cd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.1), [("weight", weight)])
        (weight.sum() * (rank + 1)).backward()
        optimizer.step()
        return weight.grad.tolist()

    def body(rank):
        with pytest.raises(cd.MismatchError, match="ranks wait for each other"):
            made(rank) if rank else cd.barrier()
        come_together()
        return [made(rank) for _ in range(2)]

    assert each_rank(2, body) == [[[1.5, 1.5]] * 2] * 2
