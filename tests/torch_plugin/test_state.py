from __future__ import annotations

import copy
import inspect
import itertools

import pytest
import torch
from torch import nn

import coordd.torch as cd
from tests.local_ranks import each_rank
from tests.torch_plugin.training import weights


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)  # one generator for all ranks, which are threads: made before they start
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).bfloat16())


@pytest.mark.parametrize("params", [nn.Module.state_dict, nn.Module.named_parameters, nn.Module.parameters])
@pytest.mark.parametrize("root", [0, 2])
def test_parameters_become_the_roots(params, root):
    models = [model(rank) for rank in range(3)]
    wanted = copy.deepcopy(models[root]).state_dict()
    each_rank(3, lambda rank: cd.broadcast_parameters(params(models[rank]), root_rank=root))
    for each in models:
        for name, value in each.state_dict().items():
            if params is nn.Module.state_dict or "running" not in name:
                assert torch.equal(value, wanted[name])


def test_what_is_no_tensor_is_left_alone():
    def body(rank):
        state = {"b": torch.tensor(float(rank)), "a": {"extra": rank}, 3: torch.tensor([rank])}
        cd.broadcast_parameters(state, root_rank=1)
        return state["b"].item(), state["a"], state[3].item()

    assert each_rank(2, body) == [(1.0, {"extra": 0}, 1), (1.0, {"extra": 1}, 1)]


def test_nested_tensors_are_refused():
    head = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(head.parameters())
    head(torch.ones(1, 2)).sum().backward()
    optimizer.step()

    def body(_):
        for name, params in (
            ("head", {"body": torch.ones(1), "head": head.state_dict()}),
            ("state", optimizer.state_dict()),
            ("0", [list(head.parameters())]),
        ):
            with pytest.raises(cd.ArgumentError, match=f"'{name}' is a .*broadcast_parameters for each state_dict"):
                cd.broadcast_parameters(params)
        cd.broadcast_parameters({"weight": torch.ones(1), "_extra_state": {"scale": torch.ones(1)}})

    each_rank(2, body)


@pytest.mark.parametrize("params", ["weights", 7, torch.ones(2), None])
def test_what_are_no_parameters_is_refused(params):
    def body(rank):
        with pytest.raises(cd.ArgumentError, match="invalid params of type: "):
            cd.broadcast_parameters(params)

    each_rank(1, body)


def test_models_that_differ_are_named_and_the_rest_has_arrived():
    def body(rank):
        state = {"a": torch.zeros(2 + rank), "b": torch.full((2,), float(rank))}
        with pytest.raises(
            cd.MismatchError, match=r"shape of 'broadcast_parameters #1: broadcast\.a' \(rank 0: \(2,\).*rank 1: \(3,\)"
        ):
            cd.broadcast_parameters(state, root_rank=1)
        return state["b"].tolist()

    assert each_rank(2, body) == [[1.0, 1.0]] * 2


def test_what_only_some_ranks_have_is_listed_on_all_and_nobody_waits_for_it():
    def body(rank):
        state = {"a": torch.zeros(2), "b": torch.full((2,), float(rank))}
        if rank < 2:
            state[f"c{rank}"] = torch.zeros(1)
        with pytest.raises(cd.MismatchError) as caught:
            cd.broadcast_parameters(state)
        cd.broadcast_parameters({"b": state["b"]}, root_rank=2)
        return str(caught.value), state["b"].tolist()

    told = "the ranks have given different parameters to broadcast_parameters: c0 on rank 0 only; c1 on rank 1 only"
    assert each_rank(3, body) == [(told, [2.0, 2.0])] * 3


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.1),
    "AdamW, tensor rate": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1), foreach=False),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


def trained(rank: int, name: str, *, steps: int) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.full((2, 3), rank + 1.0)), nn.Parameter(torch.full((3,), rank + 2.0))]
    optimizer = OPTIMIZERS[name](parameters)

    def closure():
        optimizer.zero_grad()
        loss = sum((parameter**2).sum() for parameter in parameters)
        loss.backward()
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return optimizer


def assert_same(left, right):
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key in left:
            assert_same(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for pair in zip(left, right, strict=True):
            assert_same(*pair)
    else:
        assert left == right


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_the_state_of_an_optimizer_becomes_the_roots_even_where_there_is_none(name, wrapped):
    """Rank 0 has made three steps, rank 1 five, and rank 2 none."""
    optimizers = [trained(rank, name, steps=steps) for rank, steps in enumerate((3, 5, 0))]
    optimizers[0].param_groups[0]["lr"] = 0.025
    wanted = copy.deepcopy(optimizers[0].state_dict())

    def body(rank):
        optimizer = optimizers[rank]
        if wrapped:
            optimizer = cd.DistributedOptimizer(optimizer)
        cd.broadcast_optimizer_state(optimizer, root_rank=0)
        return optimizer.state_dict()

    for found in each_rank(3, body):
        assert_same(found, wanted)


def test_objects_travel_whole():
    objects = [{"epoch": 3, "nested": [1, (2, "three")]}, None, "ö" * 5000]

    def body(rank):
        assert cd.broadcast_object(objects[rank], root_rank=2) == objects[2]
        assert cd.broadcast_object(objects[0] if rank == 0 else "ignored", name="thing") == objects[0]
        return cd.allgather_object(objects[rank]), cd.allgather_object(rank, name="ranks")

    assert each_rank(3, body) == [(objects, [0, 1, 2])] * 3


def test_objects_in_a_process_set():
    pair = cd.ProcessSet([0, 2])

    def body(rank):
        if rank == 1:
            with pytest.raises(cd.ArgumentError, match="Rank 1 is not a member"):
                cd.broadcast_object(1, process_set=pair)
            return None
        return cd.broadcast_object({"rank": rank}, 2, process_set=pair), cd.allgather_object(rank, process_set=pair)

    assert each_rank(3, body) == [({"rank": 2}, [0, 2]), None, ({"rank": 2}, [0, 2])]


def test_objects_travel_whatever_the_default_device_is():
    def body(rank):
        with torch.device("meta"):
            return cd.broadcast_object({"from": rank}, 1), cd.allgather_object(rank)

    assert each_rank(2, body) == [({"from": 1}, [0, 1])] * 2


def every_optimizer() -> list[type[torch.optim.Optimizer]]:
    """All optimizers of this PyTorch, whichever there are."""
    found = {
        kind for kind in vars(torch.optim).values() if isinstance(kind, type) and kind is not torch.optim.Optimizer
    }
    return sorted((kind for kind in found if issubclass(kind, torch.optim.Optimizer)), key=lambda kind: kind.__name__)


CHOICES = [
    {},
    {"momentum": 0.9, "amsgrad": True, "centered": True, "foreach": True},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "fused": True, "maximize": True},
]


def any_trained(kind, choices, *, dtype, seed, steps):
    """An optimizer of matrices, frozen and integer parameters, after some steps with gradients of a seed."""
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.randn(size, 3, generator=generator).to(dtype)) for size in (4, 3)]
    others = [torch.randn(2, 2, generator=generator), torch.arange(4).view(2, 2)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.05 + seed}]
    if kind is torch.optim.LBFGS:  # which has one group, of parameters that are trained
        optimizer = kind(parameters, lr=0.1, max_iter=3)
    else:
        groups[1]["params"] = [*parameters[1:], *(nn.Parameter(other, requires_grad=False) for other in others)]
        legal = inspect.signature(kind.__init__).parameters
        optimizer = kind(groups, **{name: value for name, value in choices.items() if name in legal})
    for _ in range(steps):
        for parameter in parameters:
            gradient = torch.randn(parameter.shape, generator=generator).to(dtype)
            parameter.grad = gradient.to_sparse() if kind is torch.optim.SparseAdam else gradient
        optimizer.step((lambda: torch.tensor(1.0)) if kind is torch.optim.LBFGS else None)
    return optimizer


def assert_same_types(left, right):
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
    elif isinstance(left, dict):
        for key in left:
            assert_same_types(left[key], right[key])
    elif isinstance(left, (list, tuple)):
        for pair in zip(left, right, strict=True):
            assert_same_types(*pair)


@pytest.mark.parametrize("as_horovod", [False, True])
@pytest.mark.parametrize("kind", every_optimizer())
def test_the_state_of_every_optimizer_of_pytorch_becomes_the_roots_to_the_last_type(kind, as_horovod):
    """Also where the state has another type than its parameter: with other types ranks would part silently."""
    made = list(itertools.product(CHOICES, [torch.float32, torch.bfloat16, torch.float64], [(2, 0), (0, 2), (2, 1)]))
    optimizers = [
        [any_trained(kind, choices, dtype=dtype, seed=rank, steps=steps[rank]) for choices, dtype, steps in made]
        for rank in range(2)
    ]
    wanted = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers[0]]

    def body(rank):
        for optimizer in optimizers[rank]:
            cd.broadcast_optimizer_state(optimizer, root_rank=0)

    each_rank(2, body, as_horovod=as_horovod)
    for each in optimizers:
        for optimizer, root in zip(each, wanted, strict=True):
            assert_same(optimizer.state_dict(), root)
            assert_same_types(optimizer.state_dict(), root)


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("how", ["one rank", "all ranks", "broadcast"])
def test_a_state_may_be_loaded_between_backward_and_step(how, at):
    """As PyTorch keeps gradients then; only ranks other than the root load what is broadcast."""

    def body(rank):
        net = weights({"a": 3, "b": 2})
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5))
        for step in range(6):
            optimizer.zero_grad()
            sum(value.sum() * (rank + 1) for value in net.values()).backward()
            if step == at and how == "broadcast":
                cd.broadcast_optimizer_state(optimizer, 0)
            elif step == at and (rank or how == "all ranks"):
                optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
        return [value.tolist() for value in net.values()]

    first, second = each_rank(2, body)
    moved = sum(0.1 * 1.5 * (2 - 0.5**step) for step in range(6))
    assert first == second
    assert first[0] == pytest.approx([1 - moved] * 3)
