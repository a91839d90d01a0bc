"""Blocks of memory: where they are found, who sees them, and that they are given back, whatever becomes of whom."""

from __future__ import annotations

import bisect
import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordd.transport.shared_memory import segments
from coordd.transport.shared_memory.segments import Heap, attach, lasting

ROOM = 64


class Listing(dict[int, tuple[int, int]]):
    """What neighbours are told: descriptor and size by number."""

    def announce(self, number: int, descriptor: int, size: int) -> None:
        if descriptor < 0:
            del self[number]
        else:
            assert all(number % ROOM != other % ROOM for other in self)
            self[number] = descriptor, size

    def heap(self) -> Heap:
        return Heap(announce=self.announce, room=ROOM)


@pytest.fixture
def listing() -> Listing:
    return Listing()


def open_files() -> set[tuple[str, str, int]]:
    """Lists memory, files and pipes as descriptor, name and inode; what a test opens is the difference of two lists.

    Threads of earlier tests may close theirs meanwhile, which a count would mix with what the test opens. Sockets are
    left out: libzmq's own thread opens and closes them.
    """
    gc.collect()  # what earlier tests have left
    found = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own, or one that has just been closed
            name = str(descriptor.readlink())
            if not name.startswith(("socket:", "anon_inode:", "/proc/")):
                found.add((descriptor.name, name, descriptor.stat().st_ino))
    return found


def test_a_block_is_zero_can_be_written_and_is_seen_by_whoever_maps_it(listing):
    block = listing.heap().allocate(10_000)
    ((descriptor, size),) = listing.values()
    seen = attach(os.getpid(), descriptor, size)
    assert (block.dtype, block.shape, size) == (np.uint8, (10_000,), 10_000)
    assert not block.any()
    block[9_999] = 7
    seen[0] = 8
    assert (seen[9_999], block[0]) == (7, 8)


def test_a_mapping_keeps_no_file_open(listing):
    """With 64 ranks of 20 buckets on a host, one descriptor a mapping would be more than a process usually may have."""
    heap = listing.heap()
    before = open_files()
    blocks = [heap.allocate(100) for _ in range(10)]
    maps = [attach(os.getpid(), *found) for found in listing.values()]
    assert len(open_files() - before) == len(blocks)
    del blocks, maps
    assert not open_files() - before


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["make", "drop", "look"]), st.integers(0, 20_000), st.integers(0, 99))))
def test_an_array_is_found_in_its_block_and_nowhere_else(moves):
    """Against a plain search; blocks come and go, so that addresses are used again."""
    listing, blocks = Listing(), {}
    heap = listing.heap()
    for move, size, choice in moves:
        if move == "make" and len(blocks) < 8:
            known = set(listing)
            made = [heap.allocate(size + 1)]
            blocks[(set(listing) - known).pop()] = made.pop()
        elif blocks:
            number = sorted(blocks)[choice % len(blocks)]
            if move == "drop":
                del blocks[number]
                assert number not in listing
            else:
                start = size % blocks[number].size
                assert heap.locate(blocks[number][start:]) == (number, start)
                assert heap.locate(blocks[number][start : start + 1]) == (number, start)
        assert heap.locate(np.empty(size + 1, np.uint8)) is None
    assert set(listing) == set(blocks)


def test_what_begins_in_a_block_and_ends_elsewhere_lies_elsewhere(listing):
    heap = listing.heap()
    assert heap.locate(np.zeros(3)) is None
    block = heap.allocate(100)
    beyond = np.lib.stride_tricks.as_strided(block[90:], shape=(11,))
    assert heap.locate(beyond) is None
    assert heap.locate(beyond[:10]) == (0, 90)


def test_the_last_view_frees_a_block_at_once_though_a_neighbour_maps_it(listing):
    heap = listing.heap()
    block = heap.allocate(1 << 20)
    ((descriptor, size),) = listing.values()
    seen, kept = attach(os.getpid(), descriptor, size), os.dup(descriptor)
    try:
        view = block.view(np.float32)[4:].reshape(-1, 4)[1]
        del block
        assert os.fstat(kept).st_blocks * 512 >= size
        assert listing
        del view
        assert not listing
        assert (os.fstat(kept).st_size, os.fstat(kept).st_blocks) == (0, 0)
        assert seen.size == size  # still mapped; nobody may look
    finally:
        os.close(kept)


def test_numbers_of_blocks_in_use_never_share_a_line_of_the_listing(listing):
    """However many come and go beside one that stays."""
    heap = listing.heap()
    blocks = [heap.allocate(8)]
    for _ in range(3 * ROOM):
        blocks[1:] = [heap.allocate(8)]
        assert 0 in listing
    assert len(listing) == 2
    blocks += [heap.allocate(8) for _ in range(ROOM - 2)]
    before = open_files()
    with pytest.raises(OSError, match="64 blocks of common memory are in use"):
        heap.allocate(8)
    assert not open_files() - before
    blocks.pop()
    heap.allocate(8)


def test_threads_may_allocate_and_free_as_they_like(listing):
    heap, failed = listing.heap(), []

    def body(seed):
        try:
            mine, numbers = [], np.random.default_rng(seed)
            for _ in range(60):
                mine.append(heap.allocate(int(numbers.integers(1, 20_000))))
                mine[-1][:] = seed
                assert heap.locate(mine[-1]) is not None
                if len(mine) > 6:
                    gone = mine.pop(int(numbers.integers(len(mine))))
                    assert (gone == seed).all()
        except BaseException as error:  # noqa: BLE001 - raised below
            failed.append(error)

    threads = [threading.Thread(target=body, args=(seed,)) for seed in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert not listing
    assert heap.locate(np.zeros(1)) is None
    assert not heap._placed


def test_the_garbage_collector_may_free_a_block_while_this_thread_looks_one_up(listing, monkeypatch):
    """Where it runs is not ours to choose."""
    heap = listing.heap()
    kept = heap.allocate(8)

    class Cycle:
        def __init__(self):
            self.block, self.me = heap.allocate(8), self

    class Bisect:
        @staticmethod
        def bisect(places, key):
            found = bisect.bisect(places, key)
            gc.collect()
            return found

    Cycle()
    assert len(listing) == 2
    with monkeypatch.context() as patch:
        patch.setattr(segments, "bisect", Bisect)
        assert heap.locate(kept) is not None
    assert len(listing) == 1
    assert heap.locate(kept) is not None


def test_a_block_that_cannot_be_mapped_leaves_no_file_open(listing, monkeypatch):
    heap, before = listing.heap(), open_files()
    with pytest.raises(OSError, match="Invalid argument"):
        heap.allocate(0)

    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(segments, "_mapped", fail)
    with pytest.raises(MemoryError):
        heap.allocate(5)
    assert not open_files() - before
    assert not listing


OWNER = """
import os, sys
from coordd.transport.shared_memory.segments import Heap
told = []
block = Heap(announce=lambda *found: told.append(found), room=4).allocate(5000)
block[:] = 42
_, descriptor, size = told[0]
print(os.getpid(), descriptor, size, flush=True)
sys.stdin.readline()
print(block[0], flush=True)
"""


@pytest.fixture
def owner():
    """Another process with a block; its pid, descriptor, size."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdin=-1, stdout=-1, text=True) as process:
        try:
            yield process, [int(word) for word in process.stdout.readline().split()]
        finally:
            process.kill()


def test_another_process_sees_a_block_both_ways(owner):
    process, card = owner
    seen = attach(*card)
    assert (seen == 42).all()
    seen[0] = 43
    assert process.communicate("\n", timeout=20)[0] == "43\n"


def test_a_mapped_block_outlives_its_owner_and_then_is_gone(owner):
    process, card = owner
    seen = attach(*card)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (seen == 42).all()
    with pytest.raises(OSError, match="No such"):
        attach(*card)


@pytest.mark.parametrize("number", [-1, 1 << 30])
def test_a_file_that_is_not_there_cannot_be_attached(number):
    with pytest.raises(OSError, match="No such file"):
        attach(os.getpid(), number, 8)


def test_a_process_that_may_not_be_looked_into_cannot_be_attached(monkeypatch, listing):
    listing.keep = listing.heap().allocate(8)
    monkeypatch.setattr(os, "open", lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(PermissionError):
        attach(os.getpid(), *next(iter(listing.values())))


def test_a_file_that_is_something_else_here_is_refused(tmp_path):
    """As where two containers count their processes alike: it is too small, or cannot be mapped."""
    before = open_files()
    with (tmp_path / "file").open("w+b") as file, pytest.raises(OSError, match="is no block of 4096 bytes here"):
        attach(os.getpid(), file.fileno(), 4096)
    ends = os.pipe()
    with pytest.raises(OSError, match=r"is no block|No such device"):
        attach(os.getpid(), ends[0], 4096)
    for end in ends:
        os.close(end)
    assert not open_files() - before


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_free_its_parents_memory(listing):
    """As a data loader's worker, which drops its copy of whatever the parent had."""
    heap = listing.heap()
    block = heap.allocate(4096)
    block[:] = 5
    child = os.fork()
    if not child:
        try:
            del block
            gc.collect()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    ((descriptor, _),) = listing.values()
    assert os.fstat(descriptor).st_size == 4096
    assert (block == 5).all()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_what_a_forked_child_writes_changes_its_own_copy_alone(listing):
    """Gradients lie in common memory, and a child's backward pass or `zero_grad` writes to them."""
    heap = listing.heap()
    block, freed = heap.allocate(8192), heap.allocate(4096)
    del freed
    block[:] = 5
    child = os.fork()
    if not child:
        try:
            block[:5000] += 1
        finally:
            os._exit(int(not ((block[:5000] == 6).all() and (block[5000:] == 5).all())))
    assert os.waitpid(child, 0)[1] == 0
    assert (block == 5).all()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_may_read_what_its_parent_has_freed(listing):
    block = listing.heap().allocate(8192)
    block[:] = 5
    ends = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(ends[1])
            os.read(ends[0], 1)
        finally:
            os._exit(int(not (block == 5).all()))
    ((descriptor, _),) = listing.values()
    del block
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    for end in ends:
        os.close(end)
    assert os.waitpid(child, 0)[1] == 0


def test_lasting_memory_outlives_its_maker():
    memory, descriptor = lasting(5000)
    other = attach(os.getpid(), descriptor, 5000)
    assert not other.any()
    os.close(descriptor)
    memory[4999] = 7
    del memory
    gc.collect()
    assert other[4999] == 7
    other[0] = 1  # it can be written, too


def test_where_there_is_no_memory_no_descriptor_is_kept():
    before = psutil.Process().num_fds()
    with pytest.raises(OSError, match=r"."):
        lasting(-1)
    assert psutil.Process().num_fds() == before


def test_half_of_the_files_that_may_be_open_are_left_to_the_script(listing, monkeypatch):
    monkeypatch.setattr(segments.resource, "getrlimit", lambda _: (16, 16))
    heap = listing.heap()
    blocks = [heap.allocate(8) for _ in range(9)]
    with pytest.raises(OSError, match="half of the 16 files"):
        heap.allocate(8)
    del blocks[0]
    heap.allocate(8)
