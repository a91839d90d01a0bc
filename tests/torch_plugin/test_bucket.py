"""Gradients that live in buckets: how they are divided, what a user sees of it, and what becomes of the memory."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import coordd.torch as cd
from coordd import api
from coordd_torch.tensors import view
from tests.local_ranks import each_rank, local_ranks
from tests.torch_plugin.training import LARGE, WAYS, alone, home, same, settled, together, weights, wrapped


@pytest.mark.parametrize("settings", WAYS)
@pytest.mark.parametrize("to_none", [False, True])
def test_gradients_are_views_of_one_tensor_in_common_memory(settings, to_none):
    def body(rank):
        net = weights({"a": 3, "b": LARGE, "c": 5})
        optimizer = wrapped(net)
        settled(net, optimizer)
        homes = set()
        for _ in range(3):
            optimizer.zero_grad(set_to_none=to_none)
            (sum(value.sum() for value in net.values()) * (rank + 1)).backward()
            homes |= {home(value.grad) for value in net.values()}
            assert all((value.grad == 1.5).all() for value in net.values())
            assert not settings.get("shared_memory", True) or not any(
                value.grad.data_ptr() % 64 for value in net.values()
            )
            optimizer.step()
        commons = api.operations().daemon._loop._link.commons
        inside = commons is not None and commons.heap.locate(view(net["b"].grad)) is not None
        return len(homes), inside, net["c"].tolist()

    assert each_rank(2, body, **settings) == [(1, settings.get("shared_memory", True), [-4.5] * 5)] * 2


@pytest.mark.parametrize("settings", WAYS)
def test_clipping_and_passes_that_add_up(settings):
    def step(net, optimizer, inputs, targets):
        optimizer.zero_grad()
        for part in range(2):
            nn.functional.mse_loss(net(inputs), targets * (part + 1)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        optimizer.step()

    found = together(2, step=step, settings=settings, backward_passes_per_step=2)
    same(found, alone(2, step=step))


def test_without_zero_grad_gradients_go_on_adding_up():
    def body(rank):
        net = weights({"a": 2, "b": LARGE})
        optimizer = wrapped(net)
        for _ in range(4):
            (sum(value.sum() for value in net.values()) * (rank + 1)).backward()
            optimizer.step()
        return [value.grad[0].item() for value in net.values()]

    assert each_rank(2, body) == [[6.0, 6.0]] * 2


def test_any_layout_keeps_its_strides():
    """As autograd and fused optimizers like it; what is not dense becomes so."""

    def body(rank):
        whole = torch.ones(2, 8, 6, dtype=torch.float64)
        net = nn.ParameterList(
            [
                nn.Parameter(torch.ones(4, 3, 5, 5).contiguous(memory_format=torch.channels_last)),
                nn.Parameter(whole[0, :, :3].t()),
                nn.Parameter(whole[1, ::2, ::3]),
                nn.Parameter(torch.tensor(1.0)),
                nn.Parameter(torch.ones(2, 0, 3)),
                nn.Parameter(torch.ones(3, 4).t()),
            ]
        )
        optimizer = wrapped(net)
        for _ in range(3):
            settled(net, optimizer)
        assert net[0].grad.stride() == net[0].stride()
        assert net[5].grad.stride() == net[5].stride()
        return [value.detach().unique().tolist() for value in net]

    assert each_rank(2, body) == [[[-2.0], [-2.0], [-2.0], [-2.0], [], [-2.0]]] * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.complex128])
def test_marks_work_in_every_type(dtype):
    """What one rank lacks in a later step it gets from the others; what all lack stays away."""

    def body(rank):
        net, told = weights({"a": 3, "b": 2, "c": 4}, dtype=dtype), []
        optimizer = wrapped(net)
        settled(net, optimizer)
        for names in ("abc", "a" if rank else "ab", "b" if rank else "a", "c"):
            optimizer.zero_grad()
            sum(net[name].real.sum() for name in names).backward()
            told.append([None if value.grad is None else value.grad[0].item() for value in net.values()])
            optimizer.step()
        return told

    assert each_rank(2, body) == [[[1, 1, 1], [1, 0.5, None], [0.5, 0.5, None], [None, None, 1]]] * 2


def test_each_type_has_buckets_of_its_own():
    def body(rank):
        types = [torch.float32, torch.float64, torch.bfloat16, torch.float32]
        net = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in types])
        optimizer = wrapped(net)
        for _ in range(2):
            settled(net, optimizer)
        homes = [home(value.grad) for value in net]
        return len(set(homes)), homes[0] == homes[3], [value.grad.tolist() for value in net]

    assert each_rank(2, body) == [(3, True, [[1.0] * 3] * 4)] * 2


@pytest.mark.parametrize("compression", [cd.Compression.fp16, cd.Compression.bf16])
def test_what_travels_smaller_comes_back_into_the_bucket(compression):
    def body(rank):
        net = weights({"a": 2, "b": LARGE})
        optimizer = wrapped(net, compression=compression)
        settled(net, optimizer)
        optimizer.zero_grad()
        (net["a"].sum() * (rank + 1) + (net["b"].sum() if rank else 0)).backward()
        return home(net["a"].grad) == home(net["b"].grad), [value.grad[1].item() for value in net.values()]

    assert each_rank(2, body) == [(True, [1.5, 0.5])] * 2


def test_sparse_gradients_live_there_as_dense_ones_or_are_refused():
    def body(rank):
        net = nn.ModuleList([nn.Embedding(5, 2, sparse=True), nn.Linear(2, 1, bias=False)])
        with torch.no_grad():
            for value in net.parameters():
                value.fill_(1.0)
        optimizer = wrapped(net, sparse_as_dense=True)
        for _ in range(3):
            optimizer.zero_grad()
            net[1](net[0](torch.tensor([rank, 2]))).sum().backward()
            optimizer.step()
        assert home(net[0].weight.grad) == home(net[1].weight.grad)
        return net.state_dict()

    same(each_rank(2, body))

    def late(rank):
        table = nn.Embedding(5, 2)
        cd.broadcast_parameters(table.state_dict())
        optimizer = wrapped(table)
        settled(table, optimizer)
        table.sparse = True
        optimizer.zero_grad()
        table(torch.tensor([rank])).sum().backward()

    with local_ranks(2) as ranks:
        ranks.errors(late, cd.ArgumentError)


def test_parameters_that_come_later_get_a_bucket_of_their_own():
    def body(rank):
        net = weights({"a": 3, "b": 2})
        optimizer = cd.DistributedOptimizer(torch.optim.SGD([net["a"]], lr=1.0), [("a", net["a"])])
        homes = []
        for step in range(4):
            if step == 1:
                optimizer.add_param_group({"params": [net["b"]]})
            optimizer.zero_grad()
            ((net["a"].sum() + net["b"].sum()) * (rank + 1)).backward()
            optimizer.step()
            homes.append([home(value.grad) for value in net.values()])
        assert homes[1][0] == homes[2][0] == homes[3][0]
        assert homes[2][1] == homes[3][1] != homes[3][0]
        return net["b"].tolist()

    first, second = each_rank(2, body)
    assert first == second == [1.0 - 3 * 1.5] * 2


def test_a_hook_of_the_users_may_take_a_gradient_away_on_one_rank():
    def body(rank):
        net, armed = weights({"a": 2, "b": 2}), []

        def take(parameter):
            if armed:
                parameter.grad = None

        if rank == 0:
            net["a"].register_post_accumulate_grad_hook(take)
        optimizer = wrapped(net)
        settled(net, optimizer)
        armed.append(True)
        optimizer.zero_grad()
        ((net["a"].sum() + net["b"].sum()) * (rank + 1)).backward()
        return [value.grad[0].item() for value in net.values()]

    assert each_rank(2, body) == [[1.0, 1.5]] * 2


def test_ranks_whose_gradients_come_in_different_orders_build_the_same_buckets():
    def body(rank):
        names = "abcdefgh"
        net = weights(dict.fromkeys(names, 40_000))
        optimizer = wrapped(net)
        order = names if rank else names[::-1]
        for _step in range(4):
            optimizer.zero_grad()
            loss = sum((net[name] * (rank + 1 + index)).sum() for index, name in enumerate(names) if name in order)
            for name in order:  # autograd follows the graph: so build it in another order
                loss = loss + 0 * net[name].sum()
            loss.backward()
            optimizer.step()
        homes = [home(net[name].grad) for name in names]
        return [homes.index(one) for one in homes], {name: net[name].detach()[:2] for name in names}

    found = each_rank(2, body, fusion_mb=0.7)
    assert found[0][0] == found[1][0]
    assert len(set(found[0][0])) > 2
    same([values for _, values in found])


def blocks(daemon: Any) -> int:
    """How many blocks of common memory this rank uses for itself."""
    commons = daemon._loop._link.commons
    return len(commons.heap._placed) - sum(map(len, commons._spare.values())) - (commons.heap._reserve is not None)


def test_a_dropped_optimizer_gives_its_memory_back():
    """Even while the model lives on, once its gradients are cleared."""
    with local_ranks(2) as ranks:

        def body(rank):
            net = weights({"a": 3, "b": LARGE})
            optimizer = wrapped(net)
            for _ in range(5):
                settled(net, optimizer)
            used = blocks(ranks.daemons[rank])
            del optimizer
            return used, net

        held = ranks.each(body)
        gc.collect()
        assert [used for used, _ in held] == [1, 1]
        assert [blocks(daemon) for daemon in ranks.daemons] == [1, 1]  # `.grad` are views
        for _, net in held:
            net.zero_grad()
        gc.collect()
        assert [blocks(daemon) for daemon in ranks.daemons] == [0, 0]


def test_copies_of_the_model_and_of_the_optimizer_have_gradients_of_their_own():
    def body(rank):
        net = weights({"a": 3, "b": 2})
        optimizer = wrapped(net)
        for _ in range(2):
            settled(net, optimizer)
        twin, state = copy.deepcopy(net), copy.deepcopy(optimizer.state_dict())
        twin["a"].grad = net["a"].grad.clone()
        kept = net["a"].grad
        kept.fill_(7.0)
        settled(net, optimizer)
        assert kept.data_ptr() != net["a"].grad.data_ptr()
        assert kept.tolist() == [7.0] * 3
        optimizer.load_state_dict(state)
        settled(net, optimizer)
        return twin["a"].tolist(), net["a"].tolist()

    assert each_rank(2, body) == [([-1.0] * 3, [-3.0] * 3)] * 2


VIEWS = {
    "object": lambda gradient: gradient,
    "detach": torch.Tensor.detach,
    "view": lambda gradient: gradient.view(-1),
    "numpy": lambda gradient: gradient.numpy(),
    "dlpack": torch.from_dlpack,
    "graph": lambda gradient: (gradient * torch.ones((), requires_grad=True)).grad_fn._saved_self,
}
COMPRESSIONS = {
    "none": lambda: cd.Compression.none,
    "fp16": lambda: cd.Compression.fp16,
    "int8": cd.Compression.int8,
    "topk": lambda: cd.Compression.topk(ratio=0.5),
}


@pytest.mark.parametrize("how", VIEWS)
@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("settings", [{}, {"shared_memory": False}], ids=str)
def test_gradients_that_are_kept_stay_what_they_are(how, compression, settings):
    """Those of several tasks, one after the other, as PCGrad and GradNorm compare them."""

    def body(rank):
        net = weights({"a": 3, "b": LARGE, "c": 5}, dtype=torch.float32)
        optimizer = wrapped(net, compression=COMPRESSIONS[compression]())
        kept = []
        for step in range(3):
            for task in range(3):
                net.zero_grad()
                sum((value * torch.linspace(1, 2 + task, len(value))).sum() for value in net.values()).backward()
                gradients = [value.grad for value in net.values()]
                kept.append([(VIEWS[how](one), one.detach().clone()) for one in gradients])
                del gradients
                if step == 1:
                    del kept[:-1]  # some live for long, some do not
            optimizer.step()
            optimizer.zero_grad()
        for gradient, before in (pair for pairs in kept for pair in pairs):
            assert torch.equal(torch.as_tensor(gradient), before)

    each_rank(2, body, **settings)


def test_memory_is_left_to_the_user_only_as_long_as_it_is_kept():
    """A variable of a loop that still refers to the last gradient makes two places for it, not more."""

    def body(rank):
        net = weights({"a": 3, "b": LARGE})
        optimizer = wrapped(net)
        settled(net, optimizer)
        homes = []
        for number in range(8):
            optimizer.zero_grad()
            sum(value.sum() for value in net.values()).backward()
            homes.append(home(net["a"].grad))
            gradient = net["b"].grad if number < 5 else None
            optimizer.step()
        assert gradient is None
        return len(set(homes[1:6])), len(set(homes[5:]))

    assert each_rank(2, body) == [(2, 1)] * 2


@pytest.mark.parametrize("change", ["autotune", "join"])
def test_what_is_kept_survives_a_change_of_the_buckets(change):
    def body(rank):
        net = weights({"a": 3, "b": LARGE, "c": LARGE})
        optimizer = wrapped(net)
        kept = []
        for number in range(6):
            optimizer.zero_grad()
            (sum(value.sum() for value in net.values()) * (number + 1)).backward()
            kept += [(value.grad, value.grad.clone()) for value in net.values()]
            optimizer.step()
            reducer = optimizer._coordd
            if change == "join":
                optimizer.join()
            elif reducer._buckets:
                values = {"fusion_mb": 0.1 if number % 2 else 64.0, "cycle_ms": 1.0, "buckets": 1}
                reducer._rearrange(type(reducer._settings)(**values, algorithm="overlap", compression="none"))
        assert all(torch.equal(*pair) for pair in kept)

    each_rank(2, body)
