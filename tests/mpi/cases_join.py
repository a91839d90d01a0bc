"""Ranks with different numbers of batches, process sets, and grids."""

import time

import torch
from torch import nn
from torch.testing import assert_close

import coordd.torch as cd
from tests.mpi.cases import EVERY, ranks
from tests.mpi.reference import everyones, mine, reduced


@ranks(*EVERY)
def case_every_operation_goes_on_without_who_has_joined() -> None:
    size, rank = cd.size(), cd.rank()
    for _ in range(2):
        for step in range(rank + 1):
            here = [other for other in range(size) if step < other + 1]
            tensors = [tensor for other, tensor in enumerate(everyones()) if other in here]
            assert_close(cd.allreduce(mine(), name="sum", op=cd.Sum), reduced(tensors))
            assert_close(cd.allreduce(mine(), name="present", op=cd.AveragePresent), reduced(tensors, cd.Average))
            assert_close(cd.allreduce(mine(), name="average"), reduced(tensors) / size)
            assert torch.equal(cd.allreduce(mine(), op=cd.Max), reduced(tensors, cd.Max))
            assert torch.equal(cd.allgather(mine()), torch.cat(tensors))
            assert torch.equal(cd.broadcast(mine(), size - 1), everyones()[-1])
            assert_close(cd.reducescatter(mine(), op=cd.Sum), reduced(tensors).tensor_split(size)[rank])
            rows, received = cd.alltoall(torch.full((size, 1), float(rank)), [1] * size)
            assert rows.flatten().tolist() == [float(other) for other in here]
            assert received.tolist() == [int(other in here) for other in range(size)]
            cd.barrier()
        assert cd.join() == size - 1


@ranks(*EVERY)
def case_training_with_uneven_batches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    cd.broadcast_parameters(model.state_dict())
    optimizer = cd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(2):
        for _ in range(10 + 2 * cd.rank()):  # long enough for the plan to be locked
            optimizer.zero_grad()
            model(mine(shape=(6, 4))).square().mean().backward()
            optimizer.step()
        assert optimizer.join() == cd.size() - 1
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert all(torch.equal(row, flat) for row in cd.allgather(flat[None]))


def work(busy: cd.ProcessSet) -> float:
    """Seconds of some steps in a set."""
    begin = time.perf_counter()
    for step in range(60):
        assert cd.allreduce(torch.ones(20_000), name=f"busy.{step % 7}", op=cd.Sum, process_set=busy)[0] == 2
    return time.perf_counter() - begin


@ranks(4)
def case_a_set_that_waits_does_not_slow_another_down() -> None:
    """Rank 0 waits in one set for rank 1, and works in another one with rank 2 as fast as ever."""
    late, busy = cd.ProcessSet([0, 1]), cd.ProcessSet([0, 2])

    if cd.rank() in {0, 2}:
        work(busy)
        alone = work(busy)
    waiting = []
    if cd.rank() == 0:
        waiting = [cd.allreduce_async(torch.ones(9), name=f"late.{at}", process_set=late) for at in range(30)]
    if cd.rank() in {0, 2}:
        beside = work(busy)
        assert beside < 5 * alone + 1.0, f"{alone:.3f} s alone, {beside:.3f} s beside a set that waits"
        assert not any(handle.poll() for handle in waiting)
        cd.allreduce(torch.ones(1), name="busy.done", process_set=busy)
    if cd.rank() == 0:
        cd.send(torch.ones(1), 1, "go")
    if cd.rank() == 1:
        cd.recv(torch.ones(1), 0, "go")
        waiting = [cd.allreduce_async(torch.ones(9), name=f"late.{at}", process_set=late) for at in range(30)]
    for handle in waiting:
        assert cd.synchronize(handle).tolist() == [1.0] * 9


@ranks(4)
def case_a_grid_reduces_along_its_axes() -> None:
    grid = cd.Grid(dp=2, tp=2)
    for axis in (grid.dp, grid.tp):
        wanted = reduced([everyones()[rank] for rank in axis.ranks])
        assert_close(cd.allreduce(mine(), op=cd.Sum, process_set=axis), wanted)
