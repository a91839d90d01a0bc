"""Ranks with different numbers of batches, on ranks that are threads."""

from __future__ import annotations

import copy
import gc
import threading
import weakref

import pytest
import torch
from torch import nn

import coordd.torch as cd
from coordd import api
from coordd.errors import CoorddError, PeerError
from tests.local_ranks import each_rank, local_ranks
from tests.torch_plugin.training import WAYS, model

COUNT = 3


def each(body, **settings):
    return each_rank(COUNT, body, **settings)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_operation_goes_on_without_who_has_joined(way):
    def body(rank):
        for _ in range(2):
            for step in range(2 * rank + 1):
                present = sum(step < 2 * other + 1 for other in range(COUNT))
                ones = torch.ones(4)
                assert cd.allreduce(ones, name="sum", op=cd.Sum).tolist() == [present] * 4
                torch.testing.assert_close(cd.allreduce(ones, name="mean"), ones * present / COUNT)
                assert cd.allreduce(ones, name="present", op=cd.AveragePresent).tolist() == [1.0] * 4
                for op, value in [(cd.Min, 5.0), (cd.Max, -5.0), (cd.Product, 1.0)]:
                    assert cd.allreduce(ones * value, op=op).tolist() == [value] * 4
                torch.testing.assert_close(cd.allreduce(ones, op=cd.Adasum), ones)
                assert len(cd.allgather(ones, name="rows")) == 4 * present
                assert cd.broadcast(ones * rank, COUNT - 1, name="w").tolist() == [COUNT - 1.0] * 4
                assert cd.reducescatter(torch.ones(COUNT, 2), op=cd.Sum).tolist() == [[present] * 2]
                rows, received = cd.alltoall(torch.ones(COUNT, 2), [1] * COUNT)
                assert received.tolist() == [int(step < 2 * other + 1) for other in range(COUNT)]
                assert len(rows) == present
                assert len(cd.allgather_object({"rank": rank})) == present
                cd.barrier()
            assert cd.join() == COUNT - 1

    each(body, **way)


def test_nobody_can_be_sent_what_a_rank_that_has_joined_had():
    def body(rank):
        if rank:
            with pytest.raises(cd.MismatchError, match="rank 0, which has joined"):
                cd.broadcast(torch.ones(2), 0, name="w")
        cd.join()
        assert cd.allreduce(torch.tensor(1), op=cd.Sum) == COUNT

    each(body)


def test_a_process_set_joins_for_itself():
    def body(rank):
        some = cd.ProcessSet([0, 2])
        if rank == 2:
            assert cd.allreduce(torch.ones(1), op=cd.Sum, process_set=some) == 1
        if rank != 1:
            assert cd.join(process_set=some) == 2
        assert cd.allreduce(torch.ones(1), op=cd.Sum) == COUNT
        if rank != 1:
            assert cd.allreduce(torch.ones(1), op=cd.Sum, process_set=some) == 2

    each(body)


def test_a_world_of_one_joins_at_once():
    assert each_rank(1, lambda _: cd.join()) == [0]


@pytest.mark.parametrize("op", [cd.Average, cd.AveragePresent])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_training_with_uneven_batches_is_that_of_the_ranks_that_have_one(op, way):
    """Rank r has r batches an epoch, so rank 0 has none at all; afterwards all are equal."""

    def body(rank):
        mine = model()
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=0.1), mine.named_parameters(), op=op)
        for epoch in range(3):
            for step in range(rank):
                optimizer.zero_grad()
                loss(mine, rank, epoch, step).backward()
                optimizer.step()
            assert optimizer.join() == COUNT - 1
        return [parameter.detach().clone() for parameter in mine.parameters()]

    found = each(body, **way)
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))
    for parameter, wanted in zip(found[0], alone(op), strict=True):
        torch.testing.assert_close(parameter, wanted)


def loss(made: nn.Module, rank: int, epoch: int, step: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(100 * rank + 10 * epoch + step)
    return made(torch.randn(4, 5, dtype=torch.float64, generator=source)).square().mean()


def alone(op):
    """The same training by one process."""
    mine = model()
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.1)
    for epoch in range(3):
        for step in range(COUNT - 1):
            present = [rank for rank in range(COUNT) if step < rank]
            optimizer.zero_grad()
            divisor = COUNT if op is cd.Average else len(present)
            (sum(loss(mine, rank, epoch, step) for rank in present) / divisor).backward()
            optimizer.step()
    return [parameter.detach() for parameter in mine.parameters()]


def test_steps_that_others_make_after_the_plan_is_locked_count_too():
    def body(rank):
        mine = model()
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=0.1), mine.named_parameters())
        for step in range(12 + 3 * rank):
            optimizer.zero_grad()
            loss(mine, rank, 0, step).backward()
            optimizer.step()
        optimizer.join()
        for step in range(8):
            optimizer.zero_grad()
            loss(mine, rank, 1, step).backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in mine.parameters()]

    found = each(body)
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


def test_state_of_the_optimizer_is_that_of_the_last_rank():
    def body(rank):
        mine = model()
        plain = torch.optim.Adam(mine.parameters(), lr=0.01)
        optimizer = cd.DistributedOptimizer(plain, mine.named_parameters())
        for step in range(2 + rank):
            optimizer.zero_grad()
            loss(mine, rank, 0, step).backward()
            optimizer.step()
        optimizer.join()
        return copy.deepcopy(optimizer.state_dict()["state"])

    states = each(body)
    assert [state[0]["step"].item() for state in states] == [2.0 + COUNT - 1] * COUNT
    assert all(torch.equal(state[0]["exp_avg"], states[0][0]["exp_avg"]) for state in states)


def test_a_rank_that_joins_without_its_optimizer_is_told():
    """At the end of a script a rank joins all ranks, too, and then counts as absent in its sets."""
    refused = threading.Event()

    def body(rank):
        some = cd.ProcessSet([0, 1])
        if rank < 2:
            mine = model()
            plain = torch.optim.SGD(mine.parameters(), lr=0.1)
            optimizer = cd.DistributedOptimizer(plain, mine.named_parameters(), process_set=some)
        if rank == 0:
            with pytest.raises(
                CoorddError, match=r"rank 1 joined without optimizer\.join\(\), as at the end of a script"
            ):
                optimizer.join()
            refused.set()
            cd.join()
        elif rank == 1:
            for handle in [api.operations().join(), api.operations().join(process_set=some)]:
                handle.result()
        else:
            assert refused.wait(30)
            cd.join()

    each(body)


def test_a_join_that_a_signal_handler_interrupts_ends_the_job():
    """It would stay in force while the script goes on, and the other ranks would go on without this one."""

    def train_on():
        while True:
            cd.allreduce(torch.ones(1), name="sum")

    def body(rank):
        if rank == 0:
            operations = api.operations()
            join = operations.join

            def interrupted(**details):
                join(**details)
                raise TimeoutError("time is up")

            operations.join = interrupted
            with pytest.raises(TimeoutError):
                cd.join()
        with pytest.raises(PeerError, match="TimeoutError: time is up during a join"):
            train_on()

    each(body)


def test_uneven_is_join_or_nothing():
    def body(_):
        mine = nn.Linear(1, 1)
        with pytest.raises(cd.ArgumentError, match='None or "join"'):
            cd.DistributedOptimizer(torch.optim.SGD(mine.parameters(), lr=0.1), uneven="skip")

    with local_ranks(1) as ranks:
        ranks.each(body)


def test_gradients_while_somebody_has_joined_are_those_of_the_others():
    def body(rank):
        if rank == 0:
            cd.join()
            return None
        tensor = torch.arange(1.0, 4.0)[:, None].requires_grad_()
        rows, received = cd.alltoall(tensor, [1, 1, 1], name="a")
        assert received.tolist() == [0, 1, 1]
        (rows * 10**rank).sum().backward()
        sent = tensor.grad.flatten().tolist()
        tensor = torch.ones(rank, 1).requires_grad_()
        gathered = cd.allgather(tensor, name="g")
        (gathered * torch.tensor([[1.0], [10.0], [100.0]])).sum().backward()
        mine = tensor.grad.flatten().tolist()
        tensor = torch.ones(3, 1).requires_grad_()
        (cd.reducescatter(tensor, name="r") * rank).sum().backward()
        cd.join()
        return sent, mine, tensor.grad.flatten().tolist()

    _, first, second = each(body)
    assert first[0] == second[0] == [0.0, 10.0, 100.0]
    torch.testing.assert_close(first[1], [2 / 3])
    torch.testing.assert_close(second[1], [20 / 3, 200 / 3])
    assert first[2] == second[2] == [0.0, 1.0, 2.0]


def test_of_two_optimizers_each_takes_the_model_that_has_gone_farthest():
    def body(rank):
        first, second = model(), model()
        made = [
            cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
            for net in (first, second)
        ]
        for net, optimizer, steps in ((first, made[0], 1 + rank), (second, made[1], 4 - rank)):
            for step in range(steps):
                optimizer.zero_grad()
                loss(net, rank, 0, step).backward()
                optimizer.step()
            assert optimizer.join() == (COUNT - 1 if net is first else 0)

    each(body)


def test_old_buckets_go_without_the_garbage_collector():
    def body(rank):
        net = nn.Linear(200, 200)
        cd.broadcast_parameters(net.state_dict())
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        old = []
        for epoch in range(2):
            for _ in range(3):
                optimizer.zero_grad()
                net(torch.ones(1, 200)).sum().backward()
                optimizer.step()
            old += [weakref.ref(bucket) for bucket in optimizer._coordd._buckets if not epoch]
            optimizer.join()
        optimizer.zero_grad()
        net(torch.ones(1, 200)).sum().backward()
        optimizer.step()
        return [bucket() for bucket in old]

    gc.disable()
    try:
        assert each(body) == [[None]] * COUNT
    finally:
        gc.enable()
