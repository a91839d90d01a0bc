"""Tensors that are changed while they are in flight, on ranks that are threads."""

from __future__ import annotations

import pytest
import torch

import coordd.torch as cd
from tests.local_ranks import each_rank


def changed_in_flight(rank):
    """Rank 0 changes a tensor that both ranks add up; returns what to wait for."""
    tensor = torch.ones(100)
    if rank == 0:
        handle = cd.allreduce_async_(tensor, name="w", op=cd.Sum)
        tensor.add_(1)
        cd.send(torch.ones(1), 1, "go")
        return handle
    cd.recv(torch.ones(1), 0, "go")
    return cd.allreduce_async_(tensor, name="w", op=cd.Sum)


def test_who_has_changed_a_tensor_is_told():
    def body(rank):
        handle = changed_in_flight(rank)
        if rank == 0:
            with pytest.raises(cd.ChangedError, match=r"'w', submitted at .*test_in_flight_check.py:\d+, was changed"):
                cd.synchronize(handle)
        else:
            cd.synchronize(handle)
        assert cd.allreduce(torch.tensor(1), op=cd.Sum) == 2

    each_rank(2, body, check_in_flight=True)


def test_what_is_left_alone_passes_in_every_operation_locked_or_not():
    def body(rank):
        for _ in range(8):
            assert cd.allreduce(torch.ones(5), name="w", op=cd.Sum).tolist() == [2.0] * 5
            assert cd.broadcast(torch.full((2,), float(rank)), 1).tolist() == [1.0, 1.0]
            assert len(cd.allgather(torch.ones(1 + rank))) == 3
            assert len(cd.alltoall(torch.ones(4))) == 4
            assert cd.reducescatter(torch.ones(4, 1)).tolist() == [[1.0]] * 2
            cd.barrier()

    each_rank(2, body, check_in_flight=True)


def test_without_the_check_nobody_notices():
    each_rank(2, lambda rank: cd.synchronize(changed_in_flight(rank)))
