"""Reducing gradients while backward runs: graphs that change, differ between ranks, nest, or are compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import coordd.torch as cd
from tests.local_ranks import each_rank, local_ranks
from tests.torch_plugin.training import STEPS, alone, batch, model, same, together, trained

mse = nn.functional.mse_loss


def parts(count: int) -> nn.ParameterDict:
    return nn.ParameterDict({name: nn.Parameter(torch.ones(2, dtype=torch.float64)) for name in "abcdefgh"[:count]})


def wrapped(parameters: nn.ParameterDict, **options):
    return cd.DistributedOptimizer(torch.optim.SGD(parameters.values(), lr=1.0), parameters.items(), **options)


# For each rank and step the parameters that its loss uses; "d" is never used.
USES = [
    [["abc", "ab", "", "c"], ["abc", "bc", "a", ""], ["abc", "a", "b", "a"]],
    [["a", "b", "c", "a"], ["b", "c", "a", "a"], ["c", "a", "b", "a"]],
]


@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("clip", [False, True])
def test_ranks_may_use_different_parameters_in_every_step(uses, clip):
    """Gradients count as zero where there are none; what no rank uses keeps none, so it does not even decay."""

    def body(rank):
        net = parts(4)
        optimizer = wrapped(net)
        seen = []
        for step in range(4):
            optimizer.zero_grad()
            loss = sum(((rank + 1) * net[name]).sum() for name in uses[rank][step])
            (loss + 0 * net["a"].sum()).backward()  # some backward pass on every rank
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            seen.append({name: None if net[name].grad is None else net[name].grad[0].item() for name in "abcd"})
            optimizer.step()
        return seen, net.state_dict()

    results = each_rank(3, body)
    same([weights for _, weights in results])
    for step, found in enumerate(results[0][0]):
        if not clip:
            for name in "bc":
                used = [rank + 1 for rank in range(3) if name in uses[rank][step]]
                assert found[name] == (sum(used) / 3 if used else None)
            assert found["d"] is None
        assert all(seen[step] == found for seen, _ in results)


def test_a_rank_without_a_backward_pass_takes_part_with_zeros():
    def body(rank):
        net = parts(2)
        optimizer = wrapped(net)
        for step in range(4):
            optimizer.zero_grad()
            if (step + rank) % 3:
                net["a"].sum().backward()
            optimizer.step()
        return net.state_dict()

    same(each_rank(3, body))


def test_a_rank_without_a_backward_pass_in_the_last_step_keeps_nobody():
    """A parameter that no rank uses must not be asked about more often on one rank than on another."""

    def body(rank):
        net = parts(2)
        optimizer = wrapped(net)
        for step in range(3):
            optimizer.zero_grad()
            if rank == 0 or step < 2:
                net["a"].sum().backward()
            optimizer.step()
        return net.state_dict()

    same(each_rank(2, body))


def test_ranks_may_differ_in_their_last_backward_passes():
    """An auxiliary loss on one rank only, beside a parameter that no rank uses."""

    def body(rank):
        net = parts(3)
        optimizer = wrapped(net)
        for step in range(3):
            optimizer.zero_grad()
            net["a"].sum().backward()
            if (step + rank) % 2:
                net["b"].sum().backward()
            optimizer.step()
        return net.state_dict()

    found = each_rank(2, body)
    same(found)
    assert found[0]["b"].tolist() == [1.0 - 3 * 0.5] * 2


def test_two_losses_may_use_different_parameters():
    def step(net, optimizer, inputs, targets):
        optimizer.zero_grad()
        with torch.no_grad():
            hidden = net[:2](inputs)
        mse(net[2:](hidden), targets).backward()
        net[:2](inputs).square().mean().backward()
        optimizer.step()

    same(together(2, step=step), alone(2, step=step))


def test_two_optimizers_share_nothing():
    """As for a generator and its critic: the losses of one reach into the parameters of the other."""

    def train(batches, wrap):
        one, two = model(), nn.Linear(1, 1).double()
        with torch.no_grad():
            two.weight.fill_(0.5), two.bias.fill_(0.1)
        optimizers = [wrap(torch.optim.SGD(net.parameters(), lr=0.1), net) for net in (one, two)]
        for inputs, targets in batches:
            optimizers[1].zero_grad()
            mse(two(one(inputs).detach()), targets).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            two(one(inputs)).mean().backward()
            optimizers[0].step()
        return {**one.state_dict(), **{f"two.{name}": value for name, value in two.state_dict().items()}}

    def body(rank):
        batches = [batch(rank, number) for number in range(STEPS)]
        return train(batches, lambda optimizer, net: cd.DistributedOptimizer(optimizer, net.named_parameters()))

    joined = [
        tuple(torch.cat(pair) for pair in zip(batch(0, number), batch(1, number), strict=True))
        for number in range(STEPS)
    ]
    same(each_rank(2, body), train(joined, lambda optimizer, _: optimizer))


def test_a_backward_pass_too_many_is_refused_with_the_parameters_name():
    def body(rank):
        net = parts(2)
        optimizer = wrapped(net, backward_passes_per_step=2)
        for _ in range(2):
            (net["a"] + net["b"]).sum().backward()
        with pytest.raises(
            AssertionError, match=r"computed more than backward_passes_per_step times before .*'[ab]', 2"
        ) as caught:
            (net["a"] + net["b"]).sum().backward()
        assert isinstance(caught.value, cd.CoorddError)
        optimizer.zero_grad()
        for _ in range(2):
            (net["a"] + net["b"]).sum().backward()
        optimizer.step()
        return net["a"].tolist()

    assert each_rank(2, body) == [[-1.0, -1.0]] * 2


def test_passes_may_use_different_parameters():
    def body(rank):
        net = parts(3)
        optimizer = wrapped(net, backward_passes_per_step=2)
        for _ in range(3):
            optimizer.zero_grad()
            (net["a"] * (rank + 1)).sum().backward()
            (net["b"] * (rank + 1)).sum().backward()
            optimizer.step()
        return {name: value.tolist() for name, value in net.state_dict().items()}

    assert each_rank(2, body) == [{"a": [-3.5] * 2, "b": [-3.5] * 2, "c": [1.0] * 2}] * 2


class Checkpointed(nn.Module):
    """A model whose layers are computed again in backward; ``whole`` leaves no parameter outside."""

    def __init__(self, net: nn.Module, *, reentrant: bool, whole: bool) -> None:
        super().__init__()
        self.net = net
        self.reentrant = reentrant
        self.cuts = [0, 2, len(net)] if whole else [0, 2, 4]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found = inputs.requires_grad_()
        for start, stop in zip(self.cuts, self.cuts[1:], strict=False):
            found = checkpoint(self.net[start:stop], found, use_reentrant=self.reentrant)
        return self.net[self.cuts[-1] :](found)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_checkpointed_layers_are_reduced_when_backward_returns(reentrant, whole):
    def step(net, optimizer, inputs, targets):
        net = Checkpointed(net, reentrant=reentrant, whole=whole)
        optimizer.zero_grad()
        (10 * mse(net(inputs), targets)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()

    same(together(2, step=step), alone(2, step=step))


def compiled(net, optimizer, inputs, targets):
    optimizer.zero_grad()
    function = torch.compile(net, backend="aot_eager", dynamic=False)
    mse(function(inputs), targets).backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore")  # of the compiler's own making
def test_compiled_models_are_reduced_like_others():
    """One after the other: the compiler is not made for ranks that are threads, so each compiles alone."""
    joined = alone(1, step=compiled)
    same(together(1, step=compiled), joined)

    def body(rank):
        net = model()
        optimizer = cd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net.named_parameters()
        )
        function = torch.compile(net, backend="aot_eager", dynamic=False) if rank == 0 else net

        def step(_, optimizer, inputs, targets):
            optimizer.zero_grad()
            mse(function(inputs), targets).backward()
            optimizer.step()

        return trained(net, optimizer, [batch(rank, number) for number in range(STEPS)], step)

    same(each_rank(2, body), alone(2))


def test_types_may_be_mixed():
    def body(rank):
        types = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "complex": torch.complex64}
        net = nn.ParameterDict({name: nn.Parameter(torch.ones(3, dtype=dtype)) for name, dtype in types.items()})
        net.update({"scalar": nn.Parameter(torch.tensor(1.0)), "empty": nn.Parameter(torch.ones(0))})
        optimizer = wrapped(net)
        sum((value.real.double() * (rank + 1)).sum() for value in net.values()).backward()
        optimizer.step()
        return {name: value.detach().tolist() for name, value in net.items()}

    wanted = {name: [-0.5] * 3 for name in ("fp32", "fp64", "bf16", "complex")}
    assert each_rank(2, body) == [{**wanted, "scalar": -0.5, "empty": []}] * 2


def lookup(sparse_as_dense):
    def body(rank):
        table = nn.Embedding(5, 2, sparse=True)
        with torch.no_grad():
            table.weight.fill_(1.0)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        optimizer = cd.DistributedOptimizer(optimizer, table.named_parameters(), sparse_as_dense=sparse_as_dense)
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.tensor([rank, 2])).sum().backward()
            optimizer.step()
        return table.weight[:, 0].tolist()

    return body


def test_sparse_gradients_are_reduced_as_dense_ones():
    assert each_rank(2, lookup(sparse_as_dense=True)) == [[0.0, 0.0, -1.0, 1.0, 1.0]] * 2


@pytest.mark.parametrize("sparse_as_dense", [True, False])
def test_a_sparse_gradient_of_one_value_is_reduced(sparse_as_dense):
    def body(rank):
        table = nn.Embedding(5, 1, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        optimizer = cd.DistributedOptimizer(optimizer, table.named_parameters(), sparse_as_dense=sparse_as_dense)
        cd.broadcast_parameters(table.state_dict())
        table(torch.tensor([rank])).sum().backward()
        optimizer.synchronize()
        return table.weight.grad.to_dense().flatten().tolist()

    assert each_rank(2, body) == [[0.5, 0.5, 0.0, 0.0, 0.0]] * 2


def test_sparse_gradients_are_reduced_as_they_are():
    assert each_rank(2, lookup(sparse_as_dense=False)) == [[0.0, 0.0, -1.0, 1.0, 1.0]] * 2


def test_a_failure_elsewhere_reaches_backward():
    def body(rank):
        net = parts(1)
        optimizer = wrapped(net)
        if rank == 1:
            raise ValueError("out of data")
        with pytest.raises(cd.PeerError, match=r"rank 1 failed: ValueError\('out of data'\)"):
            net["a"].sum().backward()
        return optimizer

    with local_ranks(2) as ranks, pytest.raises(ValueError, match="out of data"):
        ranks.each(body)


def test_a_disagreement_is_told_when_the_optimizer_is_made_and_names_the_parameter():
    def body(rank):
        net = nn.ParameterDict({"w": nn.Parameter(torch.ones(2 + rank))})
        with pytest.raises(cd.MismatchError, match=r"w \(2,\) float32 on rank 0 only; w \(3,\)"):
            wrapped(net)

    each_rank(2, body)


def test_gradients_of_any_layout_are_reduced_where_they_lie():
    def body(rank):
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)).to(memory_format=torch.channels_last)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.fill_(0.01)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
        images = torch.ones(2, 3, 8, 8).mul(rank + 1).contiguous(memory_format=torch.channels_last)
        for _ in range(2):
            optimizer.zero_grad()
            net(images).square().mean().backward()
            optimizer.step()
        return net.state_dict()

    same(each_rank(2, body))


def test_a_hook_of_the_users_may_take_the_gradient_away():
    def body(rank):
        net = parts(2)

        def take(parameter):
            parameter.grad = None

        if rank == 0:
            net["a"].register_post_accumulate_grad_hook(take)
        optimizer = wrapped(net)
        (net["a"] + net["b"]).sum().backward()
        optimizer.step()
        return net["a"].tolist(), net["b"].tolist()

    assert each_rank(2, body) == [([0.5, 0.5], [0.0, 0.0])] * 2


@pytest.mark.parametrize("how", ["unfreeze", "add a group"])
def test_parameters_that_come_later_are_reduced_too_or_refused(how):
    def body(rank):
        net = parts(2)
        net["b"].requires_grad_(how != "unfreeze")
        optimizer = torch.optim.SGD([net["a"], net["b"]] if how == "unfreeze" else [net["a"]], lr=1.0)
        optimizer = cd.DistributedOptimizer(optimizer)
        try:
            if how == "unfreeze":
                net["b"].requires_grad_()
            else:
                optimizer.add_param_group({"params": [net["b"]]})
            ((net["a"] + net["b"]) * (rank + 1)).sum().backward()
            optimizer.step()
        except cd.CoorddError as error:
            return str(error)
        return net["b"].tolist()

    first, second = each_rank(2, body)
    assert first == second
