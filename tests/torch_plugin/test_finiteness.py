"""Gradients that are not finite, and optimizers that do not have the same parameters; ranks are threads."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import coordd.torch as cd
from tests.local_ranks import each_rank, local_ranks


def stepped(values, **settings):
    """Steps of two ranks, rank 1 with these gradients; the weights after each step."""

    def body(rank):
        net = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2)), "b": nn.Parameter(torch.zeros(2))})
        plain = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5)
        optimizer = cd.DistributedOptimizer(plain, net.named_parameters())
        found = []
        for value in values:
            optimizer.zero_grad()
            factor = value if rank else 1.0
            (net["a"] * torch.tensor([factor, 1.0]) + net["b"]).sum().backward()
            optimizer.step()
            found.append(net["a"].detach().tolist())
        return found

    return each_rank(2, body, **settings)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_is_skipped_on_all_ranks(bad, caplog):
    wanted = [[-1.0, -1.0], [-1.0, -1.0], [-2.5, -2.5]]
    assert stepped([1.0, bad, 1.0], nonfinite="skip") == [wanted] * 2
    named = [record.getMessage() for record in caplog.records if "not finite:" in record.getMessage()]
    assert len(named) == 1
    assert "'a' on rank 1" in named[0]


def test_it_can_be_only_named(caplog):
    [(_, after), _] = stepped([1.0, math.nan], nonfinite="warn")
    assert math.isnan(after[0])
    assert "1 NaN, 0 infinite" in caplog.text


def test_by_default_nobody_looks(caplog):
    stepped([math.nan])
    assert "finite" not in caplog.text


def test_it_can_be_an_error_that_all_hear_of():
    with pytest.raises(cd.NonFiniteError, match="the gradient of 'a' on rank 1 is not finite"):
        stepped([math.inf], nonfinite="raise")


def test_different_parameters_are_listed_on_all_ranks():
    def body(rank):
        net = nn.ParameterDict({"a": nn.Parameter(torch.zeros(2 + rank)), "b": nn.Parameter(torch.zeros(1))})
        if rank == 1:
            net["c"] = nn.Parameter(torch.zeros(1))
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
        sum(value.sum() for value in net.values()).backward()
        optimizer.step()

    with local_ranks(3) as ranks:
        for error in ranks.errors(body, cd.MismatchError):
            text = str(error)
            assert "c (1,) float32 on rank 1 only" in text
            assert "a (2,) float32 on rank 0 only" in text
            assert " b " not in text


def test_the_number_of_elements_may_be_all_that_counts():
    def body(rank):
        shape = (2, 3) if rank else (3, 2)
        assert cd.allreduce(torch.ones(shape), op=cd.Sum).tolist() == torch.full(shape, 2.0).tolist()
        with pytest.raises(cd.MismatchError, match="shape"):
            cd.allreduce(torch.ones(2 + rank), name="w")

    each_rank(2, body, check="numel")


def test_what_was_thrown_away_does_not_skip_the_next_step():
    def body(rank):
        net = nn.ParameterDict({"a": nn.Parameter(torch.zeros(1))})
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
        for value in (1.0, math.inf, 1.0):
            optimizer.zero_grad()
            (net["a"] * value).sum().backward()
            if math.isfinite(value):
                optimizer.step()
        return net["a"].item()

    assert each_rank(2, body, nonfinite="skip") == [-2.0] * 2


def test_a_closure_s_step_is_skipped_too():
    def body(rank):
        net = nn.ParameterDict({"a": nn.Parameter(torch.zeros(1))})
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())

        def closure():
            optimizer.zero_grad()
            loss = (net["a"] * (math.nan if rank else 1.0)).sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return net["a"].item()

    assert each_rank(2, body, nonfinite="skip") == [0.0] * 2


def test_adasum_does_not_look_at_gradients():
    def body(_):
        net = nn.Linear(1, 1)
        with pytest.raises(cd.ArgumentError, match="leave nonfinite out"):
            cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), op=cd.Adasum)

    each_rank(2, body, nonfinite="skip")


def test_a_step_that_is_skipped_leaves_no_trace_in_what_compression_keeps():
    """What another bucket has sent in it was applied on no rank, so it is still to be sent."""

    def body(rank):
        named = {name: nn.Parameter(torch.zeros(4)) for name in ("a", "b")}
        compression = cd.Compression.topk(ratio=0.25)
        groups = [[value] for value in named.values()]
        optimizer = cd.DistributedOptimizer(
            torch.optim.SGD(named.values(), lr=1.0), named.items(), compression=compression, groups=groups
        )
        for number in range(8):
            optimizer.zero_grad()
            bad = math.inf if (rank, number) == (0, 4) else 1.0
            wanted = torch.tensor([4.0, 3.0, 2.0, 1.0])
            ((named["a"] * wanted).sum() + (named["b"] * wanted).sum() * bad).backward()
            optimizer.step()
        kept = compression.state_dict()["residuals"]
        return [(kept[name].view(4) - named[name].detach()).tolist() for name in named]

    wanted = [7 * value for value in (4.0, 3.0, 2.0, 1.0)]
    assert each_rank(2, body, nonfinite="skip") == [[wanted] * 2] * 2


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_are_looked_at_too(as_dense):
    def body(rank):
        table = nn.Embedding(6, 2, sparse=True)
        with torch.no_grad():
            table.weight.fill_(1.0)
        optimizer = cd.DistributedOptimizer(
            torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(), sparse_as_dense=as_dense
        )
        heard = []
        for number in range(4):
            optimizer.zero_grad()
            try:
                (table(torch.tensor([0, 2 + rank])).sum() * (math.nan if (rank, number) == (1, 2) else 1.0)).backward()
                optimizer.step()
            except cd.CoorddError as error:
                heard.append((number, type(error)))
                optimizer.discard_step()
        return heard, table.weight[0].tolist()

    wanted = [1.0 - 3] * 2
    found = each_rank(2, body, nonfinite="raise")
    assert found == [([(2, cd.DiscardedStepError)], wanted), ([(2, cd.NonFiniteError)], wanted)]
