"""What one rank refuses to submit, while the others submit their part and the rank does something else.

Ranks are threads. The rank that refuses waits for the others outside coordd, so nothing but the refusal itself can tell
them: without it the test ends by the time limit of `LocalRanks`.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

import coordd.torch as cd
from coordd import api
from tests.local_ranks import LocalRanks, local_ranks

WAYS = pytest.mark.parametrize(
    "settings", [{}, {"stall_check": False}, {"fan_in": 2, "simulate_hosts": 2}, {"as_horovod": True}]
)
SECONDS = 2.0
ONE = torch.ones(4)
BAD = torch.zeros(4, dtype=torch.bool)


class Others:
    """Lets the rank that refuses wait, without any operation, until all others have heard."""

    def __init__(self, count: int) -> None:
        self._heard = threading.Barrier(count)

    def wait(self) -> None:
        self._heard.wait(15)


def refused_by_last(ranks: LocalRanks, good, bad, match):
    """The last rank refuses ``bad``, catches that, and waits for the others, for which ``good`` fails in time."""
    others = Others(len(ranks))

    def body(rank):
        if rank == len(ranks) - 1:
            with pytest.raises(Exception, match=r".") as caught:
                bad()
            assert not isinstance(caught.value, cd.RefusedError)
            others.wait()
        else:
            begun = time.monotonic()
            with pytest.raises(cd.RefusedError, match=match) as caught:
                good()
            assert caught.value.rank == len(ranks) - 1
            assert time.monotonic() - begun < SECONDS
            others.wait()
        return cd.allreduce(torch.full((2,), float(rank)), op=cd.Sum).tolist(), cd.allreduce(ONE, name="a").tolist()

    total = float(sum(range(len(ranks))))
    for found in ranks.each(body):
        assert found == ([total] * 2, [1.0] * 4)


@WAYS
@pytest.mark.parametrize("name", ["a", None])
def test_others_hear_of_an_operation_that_one_rank_refuses(settings, name):
    with local_ranks(3, **settings) as ranks:
        for _ in range(2):
            refused_by_last(
                ranks,
                lambda: cd.allreduce(ONE, name=name),
                lambda: cd.allreduce(BAD, name=name),
                r"rank 2 refused allreduce '.*' at .*test_reject_on_all_ranks.py:\d+: "
                r"coordd.errors.ArgumentError: Tensor",
            )


SPARSE = torch.eye(3).to_sparse()
CALLS = {
    "two reductions": (lambda n: cd.allreduce(ONE, name=n), lambda n: cd.allreduce(ONE, True, n, op=cd.Sum)),
    "no tensor": (lambda n: cd.allreduce(ONE, name=n), lambda n: cd.allreduce("x", name=n)),
    "an unknown argument": (lambda n: cd.allreduce(ONE, name=n), lambda n: cd.allreduce(ONE, name=n, bogus=1)),
    "in place": (lambda n: cd.allreduce_(ONE.clone(), name=n), lambda n: cd.allreduce_(BAD, name=n)),
    "asynchronous": (lambda n: cd.allreduce_async(ONE, name=n).result(), lambda n: cd.allreduce_async(BAD, name=n)),
    "compression": (lambda n: cd.allreduce(ONE, name=n), lambda n: cd.allreduce(ONE, name=n, compression=7)),
    "grouped": (
        lambda n: cd.grouped_allreduce([ONE, ONE, ONE], name=n),
        lambda n: cd.grouped_allreduce([ONE, BAD, ONE], name=n),
    ),
    "grouped, before anything": (
        lambda n: cd.grouped_allreduce([ONE, ONE], name=n),
        lambda n: cd.grouped_allreduce([ONE, ONE], True, n, op=cd.Sum),
    ),
    "grouped, of no tensors": (
        lambda n: cd.grouped_allreduce_async([ONE, ONE], name=n).result(),
        lambda n: cd.grouped_allreduce_async([ONE, "x"], name=n),
    ),
    "allgather": (lambda n: cd.allgather(ONE, name=n), lambda n: cd.allgather(torch.tensor(1.0), name=n)),
    "grouped allgather": (
        lambda n: cd.grouped_allgather([ONE, ONE], name=n),
        lambda n: cd.grouped_allgather([ONE, torch.tensor(1.0)], name=n),
    ),
    "broadcast": (lambda n: cd.broadcast(ONE, 0, name=n), lambda n: cd.broadcast(ONE, 7, name=n)),
    "broadcast without a root": (lambda n: cd.broadcast(ONE, 0, name=n), lambda n: cd.broadcast(ONE, name=n)),
    "alltoall": (lambda n: cd.alltoall(torch.ones(6), name=n), lambda n: cd.alltoall(torch.ones(6), [9, 9], name=n)),
    "reducescatter": (lambda n: cd.reducescatter(ONE, name=n), lambda n: cd.reducescatter(ONE, name=n, op=cd.Adasum)),
    "grouped reducescatter": (
        lambda n: cd.grouped_reducescatter([ONE, ONE], name=n),
        lambda n: cd.grouped_reducescatter([ONE, torch.tensor(1.0)], name=n),
    ),
    "sparse": (
        lambda n: cd.sparse_allreduce_async(SPARSE, n, cd.Sum).result(),
        lambda n: cd.sparse_allreduce_async(SPARSE, n, cd.Max),
    ),
    "NumPy": (lambda n: api.allreduce(np.ones(2), name=n), lambda n: api.allreduce(np.ones(2, object), name=n)),
}


@pytest.fixture(scope="module")
def two():
    with local_ranks(2) as ranks:
        yield ranks


@pytest.mark.parametrize("name", ["a", None])
@pytest.mark.parametrize("what", CALLS)
def test_whatever_is_refused_is_heard_by_all_who_wait_for_it(two, what, name):
    good, bad = CALLS[what]
    refused_by_last(two, lambda: good(name), lambda: bad(name), "rank 1 refused")


NOT_NAMED = {
    "no process set": (lambda: cd.allreduce(ONE), lambda: cd.allreduce(ONE, process_set="all")),
    "an unknown rank": (lambda: cd.allreduce(ONE), lambda: cd.allreduce(ONE, process_set=cd.ProcessSet([0, 1, 2]))),
    "too many arguments": (lambda: cd.allreduce(ONE), lambda: cd.allreduce(ONE, *[None] * 40)),
    "a barrier": (
        lambda: api.operations().barrier().result(),
        lambda: api.operations().barrier(process_set="all"),
    ),
    "no group": (lambda: cd.grouped_allreduce([ONE]), lambda: cd.grouped_allreduce(None)),
    "no group, where others have two": (lambda: cd.grouped_allreduce([ONE, ONE]), lambda: cd.grouped_allreduce(None)),
    "a smaller group": (lambda: cd.grouped_allreduce([ONE] * 3), lambda: cd.grouped_allreduce([ONE, BAD])),
    "a smaller group with a name": (
        lambda: cd.grouped_allreduce([ONE] * 3, name="n"),
        lambda: cd.grouped_allreduce([ONE, BAD], name="n"),
    ),
    "a larger group": (lambda: cd.grouped_allreduce([ONE]), lambda: cd.grouped_allreduce([ONE, ONE, BAD])),
    "joining what is no set": (cd.join, lambda: cd.join(process_set="all")),
}


@pytest.mark.parametrize("what", NOT_NAMED)
def test_what_cannot_even_be_named_is_counted_and_heard(two, what):
    refused_by_last(two, *NOT_NAMED[what], "rank 1 refused")


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("group", [cd.grouped_allreduce, lambda some: cd.grouped_allreduce_async_(some).result()])
def test_a_group_of_nothing_takes_a_number(two, group, count):
    def body(rank):
        if rank:
            with pytest.raises(cd.RefusedError, match=r"rank 0 refused .* its list of tensors is empty"):
                group([ONE.clone() for _ in range(count)])
        else:
            assert not [*group([])]
        return cd.allreduce(torch.full((1,), 100.0), op=cd.Sum).item(), len([*group([])])

    assert two.each(body) == [(200.0, 0)] * 2


def test_a_second_try_pairs_with_the_second_try_of_the_others(two):
    def body(rank):
        try:
            cd.allreduce(ONE if rank == 0 else BAD, name="a")
        except (cd.RefusedError, cd.ArgumentError) as error:
            first = type(error)
        return first, cd.allreduce(torch.full((1,), float(rank)), name="a", op=cd.Sum).item()

    for _ in range(20):
        assert two.each(body) == [(cd.RefusedError, 1.0), (cd.ArgumentError, 1.0)]


def test_what_all_ranks_refuse_disturbs_nothing(two):
    def body(rank):
        for name in ("a", None, "a"):
            with pytest.raises(cd.ArgumentError):
                cd.allreduce(BAD, name=name)
        return cd.allreduce(torch.full((1,), float(rank)), name="a", op=cd.Sum).item()

    for _ in range(20):
        assert two.each(body) == [1.0, 1.0]


def test_a_rank_that_comes_to_it_later_hears_of_it_then(two):
    done = threading.Event()

    def body(rank):
        if rank == 1:
            with pytest.raises(cd.ArgumentError):
                cd.allreduce(BAD, name="late")
            cd.allreduce(ONE, name="other")
            done.wait(15)
        else:
            cd.allreduce(ONE, name="other")
            with pytest.raises(cd.RefusedError, match="rank 1 refused"):
                cd.allreduce(ONE, name="late")
            done.set()
        return cd.allreduce(ONE, name="late").tolist()

    assert two.each(body) == [[1.0] * 4] * 2


@pytest.mark.parametrize("as_horovod", [False, True])
def test_a_name_in_flight_is_not_told_and_the_first_operation_is_not_disturbed(as_horovod):
    with local_ranks(2, as_horovod=as_horovod) as ranks:
        others = Others(2)

        def body(rank):
            if rank == 0:
                first = cd.allreduce_async(ONE, name="a")
                with pytest.raises(ValueError, match="same name"):
                    cd.allreduce_async(ONE, name="a")
                with pytest.raises(ValueError, match="bool"):
                    cd.allreduce_async(BAD, name="a")
                others.wait()
                return first.result().tolist()
            others.wait()
            return cd.allreduce(ONE, name="a").tolist()

        assert ranks.each(body) == [[1.0] * 4] * 2


def test_only_the_members_of_the_set_are_concerned():
    some = cd.ProcessSet([0, 2])
    with local_ranks(3) as ranks:
        others = Others(3)

        def body(rank):
            if rank == 2:
                with pytest.raises(cd.ArgumentError):
                    cd.allreduce(BAD, name="a", process_set=some)
                with pytest.raises(cd.ArgumentError):
                    cd.allreduce(BAD, process_set=cd.ProcessSet([0, 1]))  # of which it is no member
                others.wait()
            elif rank == 0:
                with pytest.raises(cd.RefusedError):
                    cd.allreduce(ONE, name="a", process_set=some)
                others.wait()
            else:
                others.wait()
            if rank != 1:
                cd.allreduce(ONE, name="a", process_set=some)
            return cd.allreduce(ONE, name="a").tolist()

        assert ranks.each(body) == [[1.0] * 4] * 3


@pytest.mark.parametrize("settings", [{}, {"fan_in": 2, "simulate_hosts": 2}])
def test_a_locked_plan_does_not_keep_it_from_being_heard(settings):
    with local_ranks(2, lock_steps=3, **settings) as ranks:

        def steps(_):
            for _ in range(12):
                for name in "ab":
                    cd.allreduce(ONE, name=name)

        for _ in range(3):
            ranks.each(steps)
            refused_by_last(ranks, lambda: cd.allreduce(ONE, name="a"), lambda: cd.allreduce(BAD, name="a"), "rank 1")


def test_a_rank_that_joins_is_owed_nothing_afterwards(two):
    refused = threading.Event()

    def body(rank):
        if rank == 1:
            with pytest.raises(cd.ArgumentError):
                cd.allreduce(BAD, name="j")
            cd.allreduce(ONE, name="k")
            refused.set()
        else:
            cd.allreduce(ONE, name="k")
            refused.wait(15)
        cd.join()
        return cd.allreduce(ONE, name="j").tolist()

    assert two.each(body) == [[1.0] * 4] * 2


def test_groups_of_other_sizes_pair_with_the_second_try_of_the_others(two):
    late = threading.Barrier(2)

    def body(rank):
        for first in (0, 1):  # the rank that refuses is the first to say so, or the last
            if rank == 0:
                if not first:
                    late.wait(15)
                with pytest.raises(cd.ArgumentError):
                    cd.grouped_allreduce([ONE, BAD])
                if first:
                    late.wait(15)
            else:
                if first:
                    late.wait(15)
                handles = [cd.grouped_allreduce_async([ONE] * 4)]
                if not first:
                    late.wait(15)
                with pytest.raises(cd.RefusedError, match="rank 0 refused allreduce"):
                    handles[0].result()
        return [each.tolist() for each in cd.grouped_allreduce([torch.full((1,), rank + 1.0)] * 2, op=cd.Sum)]

    assert two.each(body) == [[[3.0], [3.0]]] * 2


def test_a_join_may_follow_one_that_a_rank_has_refused(two):
    heard = threading.Event()

    def body(rank):
        if rank == 0:
            with pytest.raises(cd.ArgumentError):
                cd.join(process_set=cd.ProcessSet([0, 7]))
            assert heard.wait(15)
        else:
            with pytest.raises(cd.RefusedError, match="rank 0 refused join"):
                cd.join()
            heard.set()
        total = cd.allreduce(torch.full((1,), rank + 1.0), op=cd.Sum).item()
        if rank == 0:
            total += cd.allreduce(torch.ones(1), op=cd.Sum).item()
        return total, cd.join(), cd.allreduce(torch.full((1,), rank + 1.0), op=cd.Sum).item()

    assert two.each(body) == [(4.0, 0, 3.0), (3.0, 0, 3.0)]


def begin(tensor, process_set, *, group):
    """Submits a sum named "x", or a group of two."""
    if group:
        return cd.grouped_allreduce_async([ONE, tensor], name="x", process_set=process_set, op=cd.Sum)
    return cd.allreduce_async(tensor, name="x", process_set=process_set, op=cd.Sum)


@pytest.mark.parametrize("refuses_first", [False, True])
@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize(("announced", "refused"), [((0, 1, 2), (0, 2)), ((0, 2), (0, 1, 2))])
def test_a_refusal_with_another_process_set_is_heard_by_those_that_announce_that_name(
    announced, refused, group, refuses_first
):
    """Rank 0 belongs to both sets; the name can be used again."""
    others, is_announced, is_refused = Others(len(announced)), threading.Event(), threading.Event()
    (is_announced if refuses_first else is_refused).set()
    wanted = cd.ProcessSet(announced)

    def refuse():
        assert is_announced.wait(15)
        with pytest.raises(ValueError, match="bool"):
            begin(BAD, cd.ProcessSet(refused), group=group)
        is_refused.set()

    def announce():
        assert is_refused.wait(15)
        handle = begin(ONE, wanted, group=group)
        is_announced.set()
        with pytest.raises(cd.RefusedError, match="rank 2 refused allreduce 'x"):
            cd.synchronize(handle)

    def body(rank):
        if rank in announced:
            refuse() if rank == 2 else announce()
            others.wait()
            found = cd.synchronize(begin(ONE, wanted, group=group))
            assert (found[1] if group else found).tolist() == [float(len(announced))] * 4

    with local_ranks(3) as ranks:
        ranks.each(body)
