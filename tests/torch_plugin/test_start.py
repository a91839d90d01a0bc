"""Ranks whose optimizers are not made alike, or that start with different values, are told."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from torch import nn

import coordd.torch as cd
from coordd_torch.wrappers import check_parallel
from tests.local_ranks import each_rank, local_ranks


def net(seed: int = 0, depth: int = 1) -> nn.Module:
    """A model with values of its own generator: ranks, which are threads, have the usual one in common."""
    made = nn.Sequential(*(nn.Linear(2, 2) for _ in range(depth)))
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in made.parameters():
            value.copy_(torch.randn(value.shape, generator=source))
    return made


def distributed(model: nn.Module, lr: float = 0.1, **more):
    return cd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr), model.named_parameters(), **more)


def step(model: nn.Module, optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


SETTINGS = {
    "depth": (lambda rank: distributed(net(depth=1 + rank)), r"1\.weight"),
    "op": (lambda rank: distributed(net(), op=cd.Average if rank else cd.Sum), "op=Sum on rank 0 only"),
    "passes": (
        lambda rank: distributed(net(), backward_passes_per_step=1 + rank),
        "backward_passes_per_step=1 on rank 0",
    ),
    "groups": (lambda rank: distributed(net(), num_groups=1 + rank), "groups"),
    "class": (
        lambda rank: cd.DistributedOptimizer(
            (torch.optim.Adam if rank else torch.optim.SGD)(net().parameters(), lr=0.1)
        ),
        "optimizer SGD on rank 0 only",
    ),
}


def in_another_order_on_rank_1(rank):
    model = net()
    parameters = [*model.parameters()][:: -1 if rank else 1]
    optimizer = cd.DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), model.named_parameters())
    for _ in range(4):
        step(model, optimizer)
    return [value.tolist() for value in model.parameters()]


def test_a_parameter_of_one_value_may_have_a_stride():
    def body(rank):
        del rank
        model = net()
        model[0].scale = nn.Parameter(torch.ones(1, 7)[:, 3])
        assert model[0].scale.stride() == (7,)
        optimizer = distributed(model)
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.ones(1, 2)).sum() * model[0].scale).sum().backward()
            optimizer.step()
        return model[0].scale.item()

    first, second = each_rank(2, body)
    assert first == second != 1.0


def test_parameters_in_another_order_are_told_before_the_first_step():
    with local_ranks(3) as ranks:
        for error in ranks.errors(in_another_order_on_rank_1, cd.MismatchError):
            assert "another order: where rank 0 has 0.weight, rank 1 has 0.bias: let all" in str(error)


def test_as_horovod_the_order_of_parameters_is_each_ranks_own(caplog):
    """Gradients are matched by name; values are compared before the first step and in the second."""
    with caplog.at_level(logging.WARNING, "coordd"):
        first, second = each_rank(2, in_another_order_on_rank_1, as_horovod=True)
    assert first == second
    assert not caplog.records


@pytest.mark.parametrize("name", SETTINGS)
def test_what_differs_is_told_to_all_when_the_optimizer_is_made(name):
    make, text = SETTINGS[name]

    def body(rank):
        with pytest.raises(cd.MismatchError, match=text):
            make(rank)
        model = net()
        step(model, distributed(model))
        return model[0].weight.tolist()

    first, second = each_rank(2, body)
    assert first == second


@pytest.mark.parametrize("op", [cd.Average, cd.Sum, cd.Adasum])
def test_models_with_other_seeds_are_told_before_the_first_step(op):
    def body(rank):
        model = net(seed=rank)
        optimizer = distributed(model, op=op)
        with pytest.raises(cd.MismatchError, match=r"start with different values of .*broadcast_parameters"):
            step(model, optimizer)

    each_rank(2, body)


def test_values_may_be_broadcast_after_the_optimizer_is_made():
    def body(rank):
        model = net(seed=rank)
        optimizer = distributed(model)
        cd.broadcast_parameters(model.state_dict())
        step(model, optimizer)

    each_rank(2, body)


def test_other_learning_rates_are_told_and_both_can_be_allowed():
    def body(rank):
        model = net()
        with pytest.raises(cd.MismatchError, match=r"lr=0\.1 of parameter group 0 on rank 0"):
            step(model, distributed(model, lr=0.1 + rank))

    def allowed(rank):
        model = net(seed=rank)
        step(model, distributed(model, lr=0.1 + rank))

    each_rank(2, body)
    each_rank(2, allowed, check_parameters=False)


def test_as_horovod_it_is_a_warning(caplog):
    def body(rank):
        model = net(seed=rank)
        optimizer = distributed(model)
        for _ in range(3):
            step(model, optimizer)

    with caplog.at_level(logging.WARNING, logger="coordd"):
        each_rank(2, body, as_horovod=True)
    assert len([record for record in caplog.records if "start with different values" in record.message]) == 1


@pytest.mark.parametrize("op", [cd.Max, cd.Min, cd.Product])
def test_what_is_no_mean_or_sum_of_gradients_is_refused(op):
    def body(_):
        with pytest.raises(cd.ArgumentError, match=f"op={op.name.capitalize()}"):
            distributed(net(), op=op)

    each_rank(2, body)


@pytest.mark.parametrize("how", ["thawed", "added"])
def test_adasum_combines_parameters_that_are_thawed_or_added_later(how):
    def body(rank):
        model = net(depth=2)
        late = list(model[1].parameters())
        before = [value.tolist() for value in late]
        if how == "thawed":
            model[1].requires_grad_(requires_grad=False)
            plain = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            plain = torch.optim.SGD(model[0].parameters(), lr=0.1)
        optimizer = cd.DistributedOptimizer(plain, op=cd.Adasum)
        for number in range(4):
            if number == 2:
                if how == "thawed":
                    model[1].requires_grad_(requires_grad=True)
                else:
                    optimizer.add_param_group({"params": late})
            optimizer.zero_grad()
            model(torch.full((1, 2), 1.0 + rank)).sum().backward()
            optimizer.step()
        assert [value.tolist() for value in late] != before
        return [value.tolist() for value in model.parameters()]

    first, second = each_rank(2, body)
    assert first == second


class Sharded(nn.Parameter):
    """As FullyShardedDataParallel and DeepSpeed mark them."""


@pytest.mark.parametrize(("mark", "name"), [("_fsdp_flattened", "FullyShardedDataParallel"), ("ds_id", "DeepSpeed")])
def test_sharded_parameters_are_refused_in_a_sentence(mark, name):
    def body(_):
        model = net()
        for place, parameter in enumerate(model.parameters()):
            setattr(parameter, mark, place + 1)
        with pytest.raises(cd.ArgumentError, match=f"reduced by {name}"):
            distributed(model)

    each_rank(2, body)


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_model_in_ddp_or_fully_shard_is_refused_in_a_sentence(process_group):
    plain, sharded = net(), net()
    wrapped = nn.parallel.DistributedDataParallel(plain)
    torch.distributed.fsdp.fully_shard(sharded, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))

    def body(_):
        with pytest.raises(cd.ArgumentError, match="reduced by DistributedDataParallel already"):
            distributed(wrapped)
        with pytest.raises(cd.ArgumentError, match="reduced by fully_shard"):
            distributed(sharded)

    each_rank(2, body)


def test_so_it_is_in_a_pipeline(process_group):
    plain, sharded = net(), net()
    part = nn.Sequential(nn.parallel.DistributedDataParallel(plain), nn.ReLU())
    torch.distributed.fsdp.fully_shard(sharded, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))

    def body(_):
        for model, owner in ((part, "DistributedDataParallel"), (sharded, "fully_shard")):
            with pytest.raises(cd.ArgumentError, match=f"reduced by {owner}.*give Pipeline the plain model"):
                cd.Pipeline(model, optimizer=torch.optim.SGD, loss=nn.functional.mse_loss)

    each_rank(2, body)


def test_a_model_that_is_wrapped_after_its_optimizer_is_made_is_refused_by_the_first_step(process_group):
    models, wrapped = [net(), net()], []

    def body(rank):
        optimizer = distributed(models[rank])
        cd.barrier()
        if rank == 0:
            wrapped.extend(nn.parallel.DistributedDataParallel(model) for model in models)
        cd.barrier()
        with pytest.raises(cd.ArgumentError, match="reduced by DistributedDataParallel already"):
            step(models[rank], optimizer)

    each_rank(2, body)


def test_wrappers_are_looked_for_while_other_threads_make_tuples(process_group):
    """A tuple that is not complete yet must not be touched: its maker would get a SystemError."""
    failed, over = [], threading.Event()

    def make():
        try:
            while not over.is_set():
                tuple(number for number in range(1000))
        except SystemError as error:
            failed.append(error)

    maker = threading.Thread(target=make)
    maker.start()
    try:
        for _ in range(20):
            check_parallel(None, net().parameters())
    finally:
        over.set()
        maker.join()
    assert not failed


def test_data_parallel_of_one_process_is_fine():
    def body(_):
        model = nn.DataParallel(net())
        step(model, distributed(model))

    each_rank(2, body)
