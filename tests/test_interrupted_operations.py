"""An exception on any line of an operation, which the script catches: later results are right, or there is an error.

A rank that catches it and goes on must neither be one operation behind the others nor ahead of them.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter

import pytest
import torch

import coordd.torch as cd
from coordd.errors import CoorddError, DuplicateNameError, PeerError
from tests.interrupting import Handler, TimeIsUpError, handlers
from tests.local_ranks import local_ranks

OPERATIONS = 5
BROKEN = 1
"""The operation in which the exception is raised."""


def _value(index, rank):
    return torch.tensor([10.0**index * (rank + 1)])


def _sum(index):
    return 3 * 10.0**index


def allreduce(index, rank, **name):
    return cd.allreduce(_value(index, rank), op=cd.Sum, **name).item() == _sum(index)


def compressed(index, rank):
    found = cd.allreduce(_value(index, rank), op=cd.Sum, compression=cd.Compression.int8())
    return found.item() == pytest.approx(_sum(index), rel=0.02)


def grouped(index, rank, **name):
    one, two = cd.grouped_allreduce([_value(index, rank), -_value(index, rank)], op=cd.Sum, **name)
    return one.item() == -two.item() == _sum(index)


def sparse(index, rank):
    tensor = torch.sparse_coo_tensor([[0]], _value(index, rank), (1,), check_invariants=False)
    return cd.sparse_allreduce_async(tensor, op=cd.Sum).result().to_dense().item() == _sum(index)


def broadcast_object(index, rank, **name):
    return cd.broadcast_object((index, rank), **name) == (index, 0)


def allgather_object(index, rank, **name):
    return cd.allgather_object((index, rank), **name) == [(index, 0), (index, 1)]


def send(index, rank):
    if rank == 0:
        cd.send(_value(index, rank), 1, "message")
        return True
    return cd.recv(torch.zeros(1), 0, "message").item() == 10.0**index


KINDS = {
    "allreduce": allreduce,
    "allreduce with a name": lambda *place: allreduce(*place, name="sum"),
    "compressed": compressed,
    "group": grouped,
    "group with a name": lambda *place: grouped(*place, name="sums"),
    "sparse": sparse,
    "broadcast_object": broadcast_object,
    "allgather_object": allgather_object,
    "allgather_object with a name": lambda *place: allgather_object(*place, name="objects"),
    "send": send,
}
ERRORS = [TimeIsUpError, KeyboardInterrupt, SystemExit]


def begins(frame):
    """What comes before is as if the script had not called the operation."""
    code, caller = frame.f_code.co_name, frame.f_back.f_code.co_name
    return code == "borrow" if caller == "send_async" else caller == "counted" and code != "operations"


def run(handler, operate):
    """Runs operations on two ranks; returns which of each rank's gave a right result, and whether the job has ended."""
    given: list[list[tuple[int, bool]]] = [[], []]

    def body(rank):
        for index in range(OPERATIONS):
            try:
                if rank == 0 and index == BROKEN:
                    sys.settrace(handler.trace)
                try:
                    right = operate(index, rank)
                finally:
                    sys.settrace(None)
                given[rank].append((index, right))
            except (PeerError, DuplicateNameError):  # the operation that was interrupted is still in flight
                raise
            except (TimeIsUpError, KeyboardInterrupt, SystemExit, CoorddError):
                continue

    with local_ranks(2) as ranks:
        try:
            ranks.each(body)
        except (PeerError, DuplicateNameError):
            return given, True
    return given, False


def check(kind, error, *, every):
    """Raises the error at each place in turn."""
    kinds = Counter()
    for handler in handlers(every=every, begins=begins, error=error):
        given, ended = run(handler, KINDS[kind])
        assert all(right for _, right in itertools.chain(*given)), f"{handler.where}: {given}"
        if not ended:
            assert all(len(each) >= OPERATIONS - 1 for each in given), f"{handler.where}: {given}"
        kinds[ended] += bool(handler.where)
    assert kinds[True]
    assert kinds[False]


# Python shows what a handler raises in `__del__`, and goes on.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_a_script_that_catches_an_exception_in_an_operation_gets_right_results_or_an_error(kind, error):
    check(kind, error, every=False)


@pytest.mark.sweep
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_so_it_does_on_any_line(kind, error):
    check(kind, error, every=True)


class Unpicklable:
    """Cannot be pickled; the error is none that a rank refuses an object for."""

    def __reduce__(self):
        raise KeyboardInterrupt


def test_ranks_that_are_interrupted_at_different_places_of_one_call_stay_in_step():
    """One does not begin it, and another waits for its first operation, after which a second one comes."""

    def body(rank):
        handler = Handler(0, every=True, begins=lambda frame: frame.f_code.co_name == "_stand_at")
        sys.settrace(handler.trace if rank else None)
        try:
            cd.allgather_object(0 if rank else Unpicklable())
        except (KeyboardInterrupt, TimeIsUpError):
            pass
        finally:
            sys.settrace(None)
        return [cd.allgather_object((index, rank)) for index in range(3)]

    with local_ranks(2) as ranks:
        assert ranks.each(body) == [[[(index, 0), (index, 1)] for index in range(3)]] * 2
