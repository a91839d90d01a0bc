"""Everything but allreduce: broadcast, allgather, objects, barrier, send and receive, state."""

import os
import threading

import pytest
import torch
from torch.testing import assert_close

import coordd.torch as cd
from tests.mpi.cases import EVERY, ranks
from tests.mpi.cases_allreduce import OPERATIONS
from tests.mpi.reference import everyones, mine, reduced

DTYPES = tuple(OPERATIONS)


def case_the_process_knows_its_place() -> None:
    assert cd.is_initialized()
    assert cd.allgather(torch.tensor([cd.rank()])).tolist() == list(range(cd.size()))
    parts = int(os.environ.get("COORDD_SIMULATE_HOSTS", "1"))
    size = cd.size() // parts
    assert (cd.local_rank(), cd.local_size()) == (cd.rank() % size, size)
    assert (cd.cross_rank(), cd.cross_size()) == (cd.rank() // size, parts)


def case_init_twice_is_one() -> None:
    cd.init()
    assert cd.allreduce(torch.tensor(1), op=cd.Sum) == cd.size()


@ranks(*EVERY)
def case_broadcast_from_every_root() -> None:
    for root in range(cd.size()):
        for dtype in DTYPES:
            tensor = mine(dtype)
            result = cd.broadcast(tensor, root)
            assert torch.equal(result, everyones(dtype)[root])
            assert torch.equal(tensor, mine(dtype))
            assert cd.broadcast_(tensor, root) is tensor
            assert torch.equal(tensor, everyones(dtype)[root])


def case_broadcast_of_any_shape_and_layout() -> None:
    for shape in [(), (0,), (3, 0), (1000, 33)]:
        assert torch.equal(cd.broadcast(mine(shape=shape), 1), everyones(shape=shape)[1])
    strided = mine(shape=(6, 4)).t()[::2]
    cd.broadcast_(strided, 0)
    assert torch.equal(strided, everyones(shape=(6, 4))[0].t()[::2])


def case_broadcasts_overlap() -> None:
    handles = [cd.broadcast_async(mine(seed=seed), seed % cd.size(), name=f"overlap.{seed}") for seed in range(20)]
    for seed in reversed(range(20)):
        assert torch.equal(cd.synchronize(handles[seed]), everyones(seed=seed)[seed % cd.size()])


@ranks(*EVERY)
def case_broadcast_sends_gradients_to_the_root() -> None:
    tensor = mine(shape=(5,)).requires_grad_()
    root = cd.size() - 1
    (cd.broadcast(tensor, root) * (cd.rank() + 1)).sum().backward()
    average = sum(range(1, cd.size() + 1)) / cd.size()
    assert tensor.grad.tolist() == [average if cd.rank() == root else 0.0] * 5


def case_broadcast_from_nobody_is_refused() -> None:
    with pytest.raises(cd.ArgumentError, match=f"invalid root rank {cd.size()}"):
        cd.broadcast(mine(), cd.size())


@ranks(*EVERY)
def case_allgather_joins_different_numbers_of_rows() -> None:
    for dtype in DTYPES:
        parts = [tensor[: rank + 1] for rank, tensor in enumerate(everyones(dtype))]
        assert torch.equal(cd.allgather(parts[cd.rank()]), torch.cat(parts))


def case_allgather_of_nothing_from_some_or_all() -> None:
    parts = [tensor[: 2 * (rank % 2)] for rank, tensor in enumerate(everyones())]
    assert torch.equal(cd.allgather(parts[cd.rank()]), torch.cat(parts))
    assert cd.allgather(torch.empty(0, 3)).shape == (0, 3)
    assert cd.allgather(torch.empty(2, 0)).shape == (2 * cd.size(), 0)
    with pytest.raises(cd.ArgumentError, match="rank-zero tensor"):
        cd.allgather(torch.tensor(1.0))


def case_allgather_of_a_strided_tensor() -> None:
    assert torch.equal(cd.allgather(mine().t()), torch.cat([tensor.t() for tensor in everyones()]))


def case_allgather_in_a_group() -> None:
    seeds = range(5)
    expected = [torch.cat(everyones(seed=seed)) for seed in seeds]
    for gather in (cd.grouped_allgather, lambda tensors: cd.synchronize(cd.grouped_allgather_async(tensors))):
        for result, wanted in zip(gather([mine(seed=seed) for seed in seeds]), expected, strict=True):
            assert torch.equal(result, wanted)


@ranks(*EVERY)
def case_allgather_returns_gradients_to_their_rows() -> None:
    tensor = torch.ones(cd.rank() + 1, requires_grad=True)
    gathered = cd.allgather(tensor)
    (gathered * torch.arange(len(gathered)) * (cd.rank() + 1)).sum().backward()
    average = sum(range(1, cd.size() + 1)) / cd.size()
    start = sum(range(cd.rank() + 1))
    assert_close(tensor.grad, torch.arange(start, start + cd.rank() + 1) * average)


def case_objects_travel() -> None:
    thing = {"rank": cd.rank(), "nested": [1.5, None, ("text", torch.tensor([cd.rank()]))], "long": "x" * 100_000}
    for root in range(cd.size()):
        received = cd.broadcast_object(thing if cd.rank() == root else None, root)
        assert received["rank"] == root
        assert received["nested"][2][1].item() == root
    everything = cd.allgather_object(["item"] * cd.rank())
    assert everything == [["item"] * rank for rank in range(cd.size())]


def case_nobody_leaves_a_barrier_before_the_last_has_come() -> None:
    if cd.rank() == 0:
        for peer in range(1, cd.size()):
            cd.recv(torch.empty(1), peer, "inside")
        cd.barrier()
        return
    inside = threading.Thread(target=cd.barrier)
    inside.start()
    inside.join(0.2)
    waits = inside.is_alive()
    cd.send(torch.ones(1), 0, "inside")
    inside.join()
    assert waits


def case_messages_go_round_in_a_ring() -> None:
    following, previous = (cd.rank() + 1) % cd.size(), (cd.rank() - 1) % cd.size()
    for dtype in DTYPES:
        handle = cd.recv_async(torch.empty_like(mine(dtype)), previous, "ring")
        cd.send(mine(dtype), following, "ring")
        assert torch.equal(cd.synchronize(handle), everyones(dtype)[previous])


def case_messages_match_by_name_whatever_the_order() -> None:
    peer = cd.rank() ^ 1
    sent = [cd.send_async(mine(seed=seed), peer, f"letter.{seed}") for seed in range(10)]
    taken = {seed: cd.recv_async(torch.empty(5, 3), peer, f"letter.{seed}") for seed in reversed(range(10))}
    for seed, handle in taken.items():
        assert torch.equal(cd.synchronize(handle), everyones(seed=seed)[peer])
    for handle in sent:
        cd.synchronize(handle)


def case_messages_pass_a_collective_that_waits() -> None:
    # Rank 0 joins the reduction only after it has heard from the others, who have started it before.
    if cd.rank():
        handle = cd.allreduce_async(mine(), op=cd.Sum, name="late")
        cd.send(torch.ones(3), 0, "early")
    else:
        for peer in range(1, cd.size()):
            cd.recv(torch.empty(3), peer, "early")
        handle = cd.allreduce_async(mine(), op=cd.Sum, name="late")
    assert_close(cd.synchronize(handle), reduced(everyones()))


def case_parameters_and_buffers_follow_the_root() -> None:
    torch.manual_seed(cd.rank())
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    model[1].running_mean.fill_(cd.rank())
    cd.broadcast_parameters(model.state_dict(), root_rank=1)
    for name, tensor in model.state_dict().items():
        assert all(torch.equal(tensor, other) for other in cd.allgather(tensor[None])), name
    assert model[1].running_mean.tolist() == [1.0] * 3


def case_optimizer_state_follows_the_root() -> None:
    torch.manual_seed(cd.rank())
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (cd.rank() + 1))
    if cd.rank() == 0:
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    cd.broadcast_optimizer_state(optimizer, root_rank=0)
    cd.broadcast_parameters(model.state_dict(), root_rank=0)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.1
    assert len(state["state"]) == 2
    averages = state["state"][0]["exp_avg"]
    assert averages.abs().sum() > 0
    assert all(torch.equal(averages, other) for other in cd.allgather(averages[None]))


@ranks(2, deadline=60)
def case_many_messages_end_although_their_receiver_waits_in_a_barrier() -> None:
    """MPI lends senders only so much room, and gives it back only while the receiver calls it."""
    peer, count = 1 - cd.rank(), 400
    for _ in range(3):
        sent = [cd.send_async(torch.full((4000,), float(number)), peer, f"m{number}") for number in range(count)]
        got = [cd.recv_async(torch.empty(4000), peer, f"m{number}") for number in reversed(range(count))]
        assert [handle.result()[0].item() for handle in got] == [*map(float, reversed(range(count)))]
        for handle in sent:
            handle.result()
        cd.barrier()


@ranks(2, deadline=60)
def case_small_messages_are_on_their_way_before_they_are_received() -> None:
    count = 1000
    if cd.rank() == 0:
        for number in range(count):
            cd.send(torch.full((2,), float(number)), 1, "m")
    cd.barrier()
    if cd.rank() == 1:
        assert [cd.recv(torch.empty(2), 0, "m")[0].item() for _ in range(count)] == [*map(float, range(count))]
