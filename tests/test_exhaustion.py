"""What a rank does that gets no more file descriptors, or no more common memory: it goes on, with others or alone."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

import coordd.torch as cd
from coordd import api
from coordd.daemon import timeline_recorder
from coordd.errors import CoorddError
from coordd.monitoring.stacks import process_state
from coordd.ops.messages import ReduceOp
from coordd.transport.shared_memory import loans, segments
from coordd.transport.shared_memory.segments import Heap
from tests.local_ranks import local_ranks

WAIT = 15.0
LARGE = 300_000


def allreduce(rank: int) -> None:
    found = api.operations().allreduce(np.full(LARGE, 1.0 + rank), name="reduced", op=ReduceOp.SUM).result(WAIT)
    assert (found == 6.0).all()


def allreduce_common(rank: int) -> None:
    tensor = cd.empty_common(LARGE).fill_(1.0 + rank)
    assert (cd.allreduce_(tensor, name="common", op=cd.Sum) == 6.0).all()


def broadcast(rank: int) -> None:
    found = api.operations().broadcast(np.full(LARGE, rank), 1, name="broadcast").result(WAIT)
    assert (found == 1).all()


def allgather(rank: int) -> None:
    found = api.operations().allgather(np.full(LARGE + rank, rank), name="gathered").result(WAIT)
    assert found.size == 3 * LARGE + 3
    assert [found[0], found[LARGE], found[-1]] == [0, 1, 2]


def alltoall(rank: int) -> None:
    found = api.operations().alltoall(np.full(3 * LARGE, rank), name="dealt").result(WAIT)
    assert found[::LARGE].tolist() == [0, 1, 2]


def reducescatter(rank: int) -> None:
    found = api.operations().reducescatter(np.ones(3 * LARGE), name="scattered", op=ReduceOp.SUM).result(WAIT)
    assert found.size == LARGE
    assert (found == 3.0).all()


def send(rank: int) -> None:
    ops = api.operations()
    array = ops.daemon.blank(8 * LARGE).view(np.float64)
    array[...] = rank
    sent = ops.send(array, (rank + 1) % 3, name="ring")
    assert (ops.recv(None, (rank - 1) % 3, name="ring").result(WAIT) == (rank - 1) % 3).all()
    sent.result(WAIT)


OPERATIONS = [allreduce, allreduce_common, broadcast, allgather, alltoall, reducescatter, send]


@contextmanager
def no_descriptor() -> Iterator[None]:
    """Leaves this process, hence all of its ranks, without a free file descriptor."""
    torch.ones(8).half()  # PyTorch looks at the processor once, in files, and would never be able to again
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(int(entry.name) for entry in Path("/proc/self/fd").iterdir()), limits[1])
    )
    filled = []
    with contextlib.suppress(OSError):
        while True:
            filled.append(os.open(os.devnull, os.O_RDONLY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in filled:
            os.close(descriptor)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_go_on_without_a_free_file_descriptor(operation):
    with local_ranks(3) as ranks:
        with no_descriptor():
            ranks.each(operation)
        ranks.each(operation)


@pytest.mark.parametrize("lacking", [{0}, {1, 2}, {0, 1, 2}], ids=["one rank", "two ranks", "all ranks"])
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC, errno.ENOMEM])
def test_operations_go_on_where_some_ranks_get_no_common_memory(monkeypatch, caplog, number, lacking):
    """Which ranks have a tensor in common memory may differ."""
    with local_ranks(3) as ranks:

        def refuse(size):
            raise OSError(number, os.strerror(number))

        for rank in lacking:
            monkeypatch.setattr(ranks.daemons[rank].status.parts.commons.heap, "allocate", refuse)
        for operation in OPERATIONS:
            ranks.each(operation)
    assert caplog.text.count(
        f"gets no more common memory, and does with what it has, more slowly: [Errno {number}]"
    ) == len(lacking)


FAULTS = {
    "memory": (segments.os, "memfd_create"),
    "its size": (segments.os, "ftruncate"),
    "its mapping": (Heap, "_allocate"),
    "its place": (Heap, "_enter"),
    "a block to lend": (loans, "lasting"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOSPC, errno.ENOMEM])
def test_every_allocation_may_fail_while_a_job_runs(monkeypatch, fault, number):
    with local_ranks(3) as ranks:
        ranks.each(lambda rank: [operation(rank) for operation in OPERATIONS])
        ranks.each(lambda rank: api.operations().barrier().result(WAIT))

        known = getattr(*FAULTS[fault])

        def refuse(*args, **options):
            if fault == "its size" and not args[-1]:  # what is given back
                return known(*args, **options)
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(*FAULTS[fault], refuse)
        for daemon in ranks.daemons:
            daemon.status.parts.commons._spare.clear()  # what was used before, and would be used again
        for operation in OPERATIONS:
            ranks.each(operation)
        monkeypatch.undo()
        for operation in OPERATIONS:
            ranks.each(operation)


def test_the_reserve_ends_with_a_sentence_that_says_what_to_do():
    heap = Heap(announce=lambda *_: None, room=4)
    with pytest.raises(OSError, match=r"cannot get 10 bytes of common memory: raise the limit on open files"):
        heap.from_reserve(10)
    heap.lay_by()
    first, second = heap.from_reserve(5000), heap.from_reserve(1)
    assert heap.size == 3 * 4096
    assert (first.sum(), first.size) == (0, 5000)
    assert heap.locate(second)[1] - heap.locate(first)[1] == 8192
    with pytest.raises(OSError, match="cannot get"):
        heap.from_reserve(segments.RESERVE_BYTES)
    assert heap.from_reserve(1).size == 1
    heap.close()


def test_what_is_asked_of_the_operating_system_may_fail():
    with no_descriptor():
        assert isinstance(process_state(os.getpid(), "here", "here"), str)


def test_a_timeline_that_cannot_be_written_ends_nothing(monkeypatch, tmp_path, caplog):
    def refuse(*_, **__):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(timeline_recorder, "Writer", refuse)
    with local_ranks(2) as ranks:
        ranks.daemons[0].start_timeline(str(tmp_path), mark_cycles=False)
        ranks.each(lambda rank: api.operations().barrier().result(WAIT))
        ranks.daemons[1].stop_timeline()
        ranks.each(lambda rank: api.operations().barrier().result(WAIT))
    assert "there is no timeline of this rank, the training goes on: can't start new thread" in caplog.text


@pytest.mark.parametrize("error", [MemoryError, OSError])
def test_a_conversion_without_memory_fails_its_operation_alone(error):
    def convert(_):
        raise error

    with local_ranks(2) as ranks:

        def body(rank):
            with pytest.raises((error, CoorddError)):
                api.operations().allreduce(np.ones(3), name="x", land=convert).result(WAIT)
            return api.operations().allreduce(np.ones(3), name="y", op=ReduceOp.SUM).result(WAIT)[0]

        assert ranks.each(body) == [2.0, 2.0]
