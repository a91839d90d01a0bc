"""Memory that changes hands: read where it was written, by one at a time, and used again when nobody sees it."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordd.transport.shared_memory import loans as module
from coordd.transport.shared_memory.loans import Loans, blank


@pytest.fixture
def pair():
    """A lender, rank 0, and rank 1, who takes; both in this process."""
    ends = [Loans({1: os.getpid()}), Loans({0: os.getpid()})]
    yield ends
    for end in ends:
        end.close()


def handed(pair: list[Loans], nbytes: int, value: int = 7) -> tuple[int, np.ndarray]:
    """Sends so many bytes of a value; returns the number of the block, and what arrives."""
    array = pair[0].blank(nbytes)
    array[:] = value
    loan = pair[0].lend(array)
    return loan.number, pair[1].take(0, loan, nbytes)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 4096, 1 << 20])
def test_what_is_written_is_read_without_a_copy(pair, nbytes):
    array = pair[0].blank(nbytes)
    array[:] = np.arange(nbytes) % 251
    loan = pair[0].lend(array)
    found = pair[1].take(0, loan, nbytes)
    assert np.array_equal(found, array)
    assert len(found) == nbytes
    assert found.ctypes.data % 64 == array.ctypes.data % 64 == 0
    if nbytes:
        found[0] = 99
        assert array[0] == 99


def test_a_block_is_used_again_once_nobody_has_a_view_of_it(pair):
    first, found = handed(pair, 5000)
    kept = found[100:].view(np.uint16)[::2].reshape(-1, 25)
    del found
    second, other = handed(pair, 5000, 8)
    assert second != first
    assert (kept == 0x0707).all()
    del kept
    gc.collect()
    third, again = handed(pair, 4990, 9)
    assert third == first
    assert (other == 8).all()
    assert (again == 9).all()


def test_a_block_that_its_writer_still_has_is_not_lent_to_another(pair):
    array = pair[0].blank(100)
    loan = pair[0].lend(array)
    del loan
    found = pair[0].blank(100)
    assert not np.shares_memory(array, found)


def test_only_blank_memory_is_lent_and_only_once(pair):
    array = pair[0].blank(100)
    assert pair[0].lend(np.zeros(100, np.uint8)) is None
    assert pair[0].lend(array[:50]) is None
    assert pair[0].lend(array) is not None
    assert pair[0].lend(array) is None


def test_what_is_never_sent_is_free_with_its_last_view(pair):
    array = pair[0].blank(100)
    view = array[10:]
    del array
    size = pair[0].size
    other = pair[0].blank(100)
    assert pair[0].size == 2 * size
    del view, other
    assert pair[0].blank(100) is not None
    assert pair[0].size == 2 * size


def test_without_neighbours_or_memory_it_is_ones_own(pair, monkeypatch):
    alone = Loans({})
    array = alone.blank(1000)
    assert alone.lend(array) is None
    assert alone.size == 0

    def fail(size):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(module, "lasting", fail)
    array = pair[0].blank(1000)
    array[:] = 1
    assert pair[0].lend(array) is None
    assert array.ctypes.data % 64 == blank(10).ctypes.data % 64 == 0


def test_it_keeps_no_more_files_open_than_a_process_can_spare(pair):
    held = [pair[0].blank(10) for _ in range(300)]
    lent = [pair[0].lend(array) is not None for array in held]
    assert lent == [True] * 256 + [False] * 44
    del held[0]
    assert pair[0].lend(pair[0].blank(10)) is None  # the neighbour has that of the first


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(0, 1 << 18), max_size=60), kept=st.integers(0, 5))
@example(sizes=[0, 12225, 12225, 16321, 0], kept=0)
def test_idle_blocks_are_no_more_than_what_was_in_use(sizes, kept):
    lender, taker = Loans({1: os.getpid()}), Loans({0: os.getpid()})
    try:
        held: list[np.ndarray] = []
        for number, size in enumerate(sizes):
            held.append(handed([lender, taker], size, number % 256)[1])
            del held[: -kept - 1]
            most = max(9 * (size + 64) // 8 + 4096 for size in sizes)
            assert lender.size <= 2 * most * (kept + 2)  # of which one goes, and one comes
        for number, each in zip(range(len(sizes))[::-1], reversed(held), strict=False):
            assert (each == number % 256).all()
    finally:
        lender.close()
        taker.close()


def _mapped() -> set[str]:
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:coordd" in line}


def test_blocks_that_are_given_up_are_given_up_by_those_who_saw_them():
    before = _mapped()  # by daemons of other tests
    lender, taker = Loans({1: os.getpid()}), Loans({0: os.getpid()})
    for size in range(1, 40):
        handed([lender, taker], size * 20_000)
    assert len(taker._seen) <= len(lender._own) + 1
    assert len(_mapped() - before) <= 2 * len(lender._own) + 8
    lender.close()
    taker.close()


def test_a_view_outlives_both_ends(pair):
    _, found = handed(pair, 10_000)
    pair[0].close()
    pair[1].close()
    assert (found == 7).all()
    found[:] = 1


def test_a_forked_child_gives_nothing_back(pair, monkeypatch):
    first, found = handed(pair, 100)
    monkeypatch.setattr(module.os, "getpid", lambda: -1)
    del found
    monkeypatch.undo()
    assert handed(pair, 100)[0] != first


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_what_a_forked_child_does_to_messages_stays_its_own(pair):
    """A child has what was sent and received before, and neither sees nor does any harm to what comes then."""
    mine = pair[0].blank(10_000)
    mine[:] = 3
    _, found = handed(pair, 10_000)
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        alike = False
        try:
            found += 1
            mine[5000:] = 4
            os.write(ready[1], b"r")
            os.read(done[0], 1)
            alike = (found == 8).all() and (mine[:5000] == 3).all() and (mine[5000:] == 4).all()
        finally:
            os._exit(int(not alike))
    os.read(ready[0], 1)
    assert (found == 7).all()
    assert (mine == 3).all()
    found[:] = mine[:] = 1
    os.write(done[1], b"d")
    assert os.waitpid(child, 0)[1] == 0
    for end in (*ready, *done):
        os.close(end)


def test_a_neighbour_that_is_gone_is_an_error(pair):
    gone = Loans({0: 1 << 30})
    loan = pair[0].lend(pair[0].blank(10))
    with pytest.raises(OSError, match="No such file"):
        gone.take(0, loan, 10)
