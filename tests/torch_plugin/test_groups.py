"""Parameter groups that change while a model trains: parameters are added, replaced, pruned, frozen and thawed.

All ranks change their groups alike; which gradients they compute in a step is each rank's own matter.
"""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import coordd.torch as cd
from tests.local_ranks import each_rank
from tests.torch_plugin.test_discarded import Failing
from tests.torch_plugin.training import WAYS, weights, wrapped

OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda groups: torch.optim.SGD(groups, lr=0.1),
    lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    lambda groups: torch.optim.Adam(groups, lr=0.05),
]


class Program:
    """A training of 12 steps that changes its groups at random; equal for equal seeds, however many ranks make it."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.made = 0
        self.live = [self.new() for _ in range(4)]
        groups = [{"params": self.live[:2]}, {"params": self.live[2:]}]
        self.optimizer: Any = self.random.choice(OPTIMIZERS)(groups)
        self.passes = self.random.choice([1, 1, 2])
        self.clears = self.random.choice([self.clear, self.optimizer.zero_grad])

    def new(self) -> nn.Parameter:
        self.made += 1
        source = torch.Generator().manual_seed(self.made)
        return nn.Parameter(torch.randn(self.random.choice([1, 3, 17, 200]), generator=source, dtype=torch.float64))

    def trained(self) -> list[nn.Parameter]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def clear(self) -> None:
        """Clears gradients as scripts do that have no `zero_grad` of an optimizer's."""
        for parameter in [*self.live, *self.trained()]:
            parameter.grad = None

    def change(self) -> None:
        """Changes a group, or what the model computes."""
        kind = self.random.choice(["replace", "replace", "add", "prune", "freeze", "thaw", "unused", "used"])
        group = self.random.choice(self.optimizer.param_groups)["params"]
        number = self.random.randrange(len(group))
        chosen = group[number]
        if kind == "replace":
            group[number] = self.new()
            self.leave(chosen)
            self.live.append(group[number])
        elif kind == "add":
            self.live.append(self.new())
            self.optimizer.add_param_group({"params": [self.live[-1]]})
        elif kind == "prune" and len(group) > 1:
            self.leave(group.pop(number))
        elif kind in {"freeze", "thaw"}:
            chosen.requires_grad_(kind == "thaw")
            chosen.grad = None
        elif kind == "unused":
            self.live = [one for one in self.live if one is not chosen]
        elif kind == "used" and all(one is not chosen for one in self.live):
            self.live.append(chosen)

    def leave(self, parameter: nn.Parameter) -> None:
        self.optimizer.state.pop(parameter, None)
        self.live = [one for one in self.live if one is not parameter]

    def loss(self, seed: int) -> torch.Tensor:
        """What a rank computes in one pass, with some of the parameters."""
        source = torch.Generator().manual_seed(seed)
        used = [one for one in self.live if torch.rand(1, generator=source) < 0.8]
        parts = [(one.sin() * torch.randn(one.shape, generator=source).double()).sum() for one in used]
        return sum(parts, torch.zeros(1, requires_grad=True).sum())

    def run(self, ranks: Iterable[int], size: int) -> Iterable[list[float]]:
        """Trains with the batches of these ranks; yields the sums of all that is trained after each step."""
        alone = len(list(ranks)) == size
        for _ in range(12):
            for _ in range(self.random.choice([0, 1, 2])):
                self.change()
            self.clears()
            seed = self.random.randrange(1 << 20)
            for number in range(self.passes):
                for rank in ranks:
                    (self.loss(seed + 10 * number + rank) / (size if alone else 1)).backward()
            self.optimizer.step()
            yield [value.detach().sum().item() for value in self.trained()]


@settings(max_examples=15)
@given(seed=st.integers(0, 1 << 20), size=st.sampled_from([2, 3]), way=st.sampled_from(WAYS))
def test_groups_that_change_at_random_train_as_in_one_process(seed, size, way):
    """As long as nothing that has left its group is computed again, it does not matter when it is let go."""

    def body(rank):
        program = Program(seed)
        program.optimizer = cd.DistributedOptimizer(program.optimizer, backward_passes_per_step=program.passes)
        return list(program.run([rank], size))

    wanted = list(Program(seed).run(range(size), size))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coordd_torch.placement._UNUSED_STEPS", 1)
        found = each_rank(size, body, **way)
    assert all(one == found[0] for one in found)
    for now, then in zip(found[0], wanted, strict=True):
        assert now == pytest.approx(then, abs=1e-9)


@pytest.fixture
def soon(monkeypatch):
    """Lets what is unused go after one step, not many."""
    monkeypatch.setattr("coordd_torch.placement._UNUSED_STEPS", 1)


def test_a_parameter_may_be_replaced_again_and_again():
    """Models grow that way; each new parameter takes the place of the one before in its group."""

    def body(rank):
        net = weights({"a": 3, "b": 2})
        optimizer = cd.DistributedOptimizer(torch.optim.SGD([{"params": [value]} for value in net.values()], lr=1.0))
        for step in range(9):
            if step % 3 == 2:
                net["a"] = nn.Parameter(torch.cat([net["a"].detach(), torch.ones(1, dtype=torch.float64)]))
                optimizer.param_groups[0]["params"][0] = net["a"]
            optimizer.zero_grad()
            ((net["a"].sum() + net["b"].sum()) * (rank + 1)).backward()
            optimizer.step()
        return net["a"].tolist()

    first, second = each_rank(2, body)
    assert first == second == [1 - 9 * 1.5] * 3 + [1 - 7 * 1.5, 1 - 4 * 1.5, 1 - 1.5]


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("op", [cd.Average, cd.Adasum], ids=["average", "adasum"])
@pytest.mark.parametrize("cleared", [True, False], ids=["zero_grad", "no zero_grad"])
def test_parameters_that_were_replaced_are_not_kept_alive(cleared, op):
    """Else a model that grows all the time needs more and more memory, and reduces zeros for what is gone."""

    def body(rank):
        net = weights({"a": 3, "b": 2, "c": 2})
        groups = [{"params": [net["a"], net["b"]]}, {"params": [net["c"]]}]
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(groups, lr=1.0), op=op)
        gone = []
        for step in range(24):
            if step > 1 and step % 2:
                gone.append(weakref.ref(net["a"]))
                net["a"] = nn.Parameter(torch.cat([net["a"].detach(), torch.ones(1, dtype=torch.float64)]))
                optimizer.param_groups[0]["params"][0] = net["a"]
            if cleared:
                optimizer.zero_grad()
            else:
                for value in net.values():
                    value.grad = None
            sum(value.sum() * (rank + 1) for value in net.values()).backward()
            optimizer.step()
        gc.collect()
        alive = [number for number, value in enumerate(gone) if value() is not None]
        return [net[name].tolist() for name in "abc"], alive

    (first, kept), (second, also_kept) = each_rank(2, body)
    assert first == second
    assert {*kept, *also_kept} <= {0, 10}  # Horovod's own attribute has the first; the last has left only now


@pytest.mark.usefixtures("soon")
def test_a_parameter_that_has_left_its_group_is_reduced_while_it_gets_gradients():
    """Scripts clip by the norm of all gradients of a model, also of what its optimizer does not train any more."""

    def body(rank):
        net, seen = weights({"a": 3, "b": 2, "c": 2}), []
        optimizer = cd.DistributedOptimizer(torch.optim.SGD([net["a"], net["b"]], lr=1.0))
        for step in range(8):
            if step == 3:
                optimizer.param_groups[0]["params"][0] = net["c"]
            optimizer.zero_grad()
            net["a"].grad = None
            used = net.values() if step < 6 else [net["b"], net["c"]]
            sum(value.sum() * (rank + 1) for value in used).backward()
            optimizer.step()
            seen.append(net["a"].grad.tolist() if step < 6 else None)
        with pytest.raises(cd.ArgumentError, match="add it to a group, or freeze it"):
            net["a"].sum().backward()
        optimizer.zero_grad()
        net["a"].grad = None
        optimizer.add_param_group({"params": [net["a"]]})
        (net["a"].sum() * (rank + 1)).backward()
        optimizer.step()
        return seen, net["a"].tolist()

    (seen, last), (also_seen, also_last) = each_rank(2, body)
    assert seen == also_seen == [[1.5] * 3] * 6 + [None] * 2
    assert last == also_last == [1.0 - 4 * 1.5] * 3


@pytest.mark.usefixtures("soon")
def test_one_rank_alone_that_computes_a_gradient_which_has_left_tells_all():
    def body(rank):
        net = weights({"a": 3, "b": 2})
        optimizer = cd.DistributedOptimizer(torch.optim.SGD([net["a"]], lr=1.0))
        for step in range(4):
            if step == 2:
                optimizer.param_groups[0]["params"][0] = net["b"]
            optimizer.zero_grad()
            (net["b" if step > 1 else "a"].sum() * (rank + 1)).backward()
            optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(cd.DiscardedStepError if rank else cd.ArgumentError):
            (net["b" if rank else "a"].sum() * (rank + 1)).backward()
        optimizer.zero_grad()
        (net["b"].sum() * (rank + 1)).backward()
        optimizer.step()
        return net["b"].tolist()

    assert each_rank(2, body) == [[1.0 - 3 * 1.5] * 2] * 2


@pytest.mark.parametrize("how", ["thawed", "added"])
def test_what_comes_after_zero_grad_is_averaged_when_backward_returns(how):
    """Scripts thaw layers at the start of an epoch, and clip before `step`."""

    def body(rank):
        net, seen = weights({"a": 3, "b": 2}), []
        net["b"].requires_grad_(how == "added")
        trained = [net["a"]] if how == "added" else net.parameters()
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(trained, lr=1.0))
        optimizer.zero_grad()
        for step in range(5):
            if step == 3:
                net["b"].requires_grad_(True)
            if step == 3 and how == "added":
                optimizer.add_param_group({"params": [net["b"]]})
            (sum(value.sum() for value in net.values() if step > 2 or value is net["a"]) * (rank + 1)).backward()
            seen.append(nn.utils.clip_grad_norm_(net.parameters(), 1.0).item())
            optimizer.step()
            optimizer.zero_grad()
        return seen, net["b"].tolist()

    first, second = each_rank(2, body)
    assert first == second
    assert first[0] == pytest.approx([1.5 * 3**0.5] * 3 + [1.5 * 5**0.5] * 2)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("alone", [[0], [0, 1]], ids=["one rank", "all ranks"])
@pytest.mark.parametrize("how", ["thawed", "added"])
def test_a_pass_of_late_parameters_alone_is_averaged_when_backward_returns(how, alone, passes):
    """No hook of what is reduced already tells of such a pass, as where a frozen body's new head is trained first."""

    def body(rank):
        net, seen = weights({"a": 3, "b": 2}), []
        net["b"].requires_grad_(how == "added")
        trained = [net["a"]] if how == "added" else net.parameters()
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(trained, lr=1.0), backward_passes_per_step=passes)
        for step in range(5):
            optimizer.zero_grad()
            if step == 3:
                net["b"].requires_grad_(True)
            if step == 3 and how == "added":
                optimizer.add_param_group({"params": [net["b"]]})
            used = ["a"] if step < 3 else ["b"] if step == 3 and rank in alone else ["a", "b"]
            for _ in range(passes):
                (sum(net[name].sum() for name in used) * (rank + 1)).backward()
            seen.append(nn.utils.clip_grad_norm_(net.parameters(), 100.0).item())
            optimizer.step()
        return seen, net["b"].tolist()

    first, second = each_rank(2, body)
    assert first == second
    mixed = 0 if len(alone) == 2 else 3 * 1.0**2  # the mean over 0 and 2
    norms = [1.5 * 3**0.5] * 3 + [(mixed + 2 * 1.5**2) ** 0.5, 1.5 * 5**0.5]
    assert first[0] == pytest.approx([passes * norm for norm in norms])


def test_a_frozen_parameter_tells_only_the_optimizer_that_has_it():
    def body(rank):
        net = weights({"a": 3, "b": 2})
        net["b"].requires_grad_(False)
        for _again in range(3):
            optimizer = wrapped(net)
        net["b"].requires_grad_(True)
        optimizer.zero_grad()
        (net["b"].sum() * (rank + 1)).backward()
        seen = net["b"].grad.tolist()
        net["b"].requires_grad_(False)
        del optimizer
        gc.collect()
        net["b"].requires_grad_(True).grad = None
        (net["b"].sum() * (rank + 1)).backward()
        return seen, net["b"].grad.tolist()

    assert each_rank(2, body) == [([1.5] * 2, [1.0] * 2), ([1.5] * 2, [2.0] * 2)]


@pytest.mark.parametrize("how", ["its pass fails", "it calls discard_step"])
def test_a_rank_that_cannot_make_a_step_discards_what_others_have_thawed_after_zero_grad(how):
    def fails(optimizer, net):
        if how == "it calls discard_step":
            optimizer.discard_step()
            return
        failing = Failing.apply(torch.zeros((), requires_grad=True, dtype=torch.float64))
        with pytest.raises(MemoryError):  # what is computed first is differentiated last
            (failing + net["b"].sum()).backward()

    def body(rank):
        net = weights({"a": 3, "b": 2})
        net["b"].requires_grad_(False)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0))
        for step in range(4):
            optimizer.zero_grad()
            if step == 2:
                net["b"].requires_grad_(True)
                if rank:
                    fails(optimizer, net)
                else:
                    used = "b" if how == "its pass fails" else "ab"
                    with pytest.raises(cd.DiscardedStepError):
                        sum(net[name].sum() for name in used).backward()
                assert net["b"].grad is None
            (sum(value.sum() for value in net.values()) * (rank + 1)).backward()
            optimizer.step()
        return [net[name].tolist() for name in "ab"]

    assert each_rank(2, body) == [[[1 - 4 * 1.5] * 3, [1 - 2 * 1.5] * 2]] * 2


def test_a_pass_of_thawed_parameters_alone_is_reduced_before_clipping():
    """As where a body is frozen and its head thawed: no hook of the others tells of the pass."""

    def body(rank):
        net, seen = weights({"a": 3, "b": 2}), []
        net["b"].requires_grad_(False)
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0))
        for step in range(5):
            if step == 3:
                net["a"].requires_grad_(False)
                net["b"].requires_grad_(True)
            optimizer.zero_grad()
            (sum(value.sum() for value in net.values()) * (rank + 1)).backward()
            seen.append(nn.utils.clip_grad_norm_(net.parameters(), 1.0).item())
            optimizer.step()
        return seen

    first, second = each_rank(2, body)
    assert first == second == pytest.approx([1.5 * 3**0.5] * 3 + [1.5 * 2**0.5] * 2)


@pytest.mark.usefixtures("soon")
def test_what_was_kept_of_a_parameter_that_has_left_is_added_to_no_other():
    """Of a gradient that travels in parts the rest is kept under its name, which a new parameter may get."""

    def body(rank):
        net, seen = weights({"a": 8}), []
        optimizer = wrapped(net, compression=cd.Compression.topk(ratio=0.25))
        for step in range(16):
            if step and step % 4 == 0:
                net["a"] = optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(8, dtype=torch.float64))
            optimizer.zero_grad()
            (net["a"] * torch.arange(1.0, 9.0)).sum().mul(1000.0 if step < 4 else 1.0).backward()
            seen.append(net["a"].grad.max().item())
            optimizer.step()
        return seen

    assert max(max(seen[4:]) for seen in each_rank(2, body)) < 40


@pytest.mark.parametrize("batches", [1, 17], ids=["one more", "many more"])
@pytest.mark.usefixtures("soon")
def test_parameters_are_let_go_together_though_ranks_join(batches):
    def body(rank):
        net = weights({"a": 3, "b": 2})
        groups = [{"params": [value]} for value in net.values()]
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(groups, lr=0.01))
        for epoch in range(4):
            if epoch:
                net["a"] = nn.Parameter(torch.cat([net["a"].detach(), torch.ones(1, dtype=torch.float64)]))
                optimizer.param_groups[0]["params"][0] = net["a"]
            for _ in range(5 + batches * rank):
                optimizer.zero_grad()
                ((net["a"].sum() + net["b"].sum()) * (rank + 1)).backward()
                optimizer.step()
            optimizer.join()
        return net["a"].tolist()

    first, second = each_rank(2, body)
    step = 0.01 * (5 * 1.5 + batches * 2 / 2)
    assert first == second == pytest.approx([1 - 4 * step] * 3 + [1 - 3 * step, 1 - 2 * step, 1 - step])


@pytest.mark.usefixtures("soon")
def test_a_parameter_that_has_left_stays_while_any_pass_of_a_step_computes_its_gradient():
    def body(rank):
        net = weights({"a": 3, "b": 2, "c": 2})
        optimizer = cd.DistributedOptimizer(torch.optim.SGD([net["a"], net["b"]], lr=1.0))
        for step in range(6):
            if step == 2:
                optimizer.param_groups[0]["params"][0] = net["c"]
            optimizer.zero_grad()
            net["a"].grad = None
            for used in ("abc", "bc"):
                (sum(net[name].sum() for name in used) * (rank + 1)).backward()
            assert net["a"].grad.tolist() == [1.5] * 3
            optimizer.step()
        return net["c"].tolist()

    assert each_rank(2, body) == [[1.0 - 4 * 3.0] * 2] * 2


def test_what_comes_late_waits_until_all_ranks_have_made_the_same_rounds():
    """A rank without a backward pass makes its rounds in `step`, the others make one before."""

    def body(rank):
        net = weights({"a": 3, "b": 2, "c": 2})
        optimizer = cd.DistributedOptimizer(torch.optim.SGD([net["a"], net["b"]], lr=1.0))
        for step in range(4):
            for value in net.values():
                value.grad = None
            if step == 2:
                optimizer.add_param_group({"params": [net["c"]]})
            if rank or step != 2:
                sum(value.sum() for value in (net["a"], net["c"])).backward()
            optimizer.step()
        return [net[name].tolist() for name in "abc"]

    assert each_rank(2, body) == [[[1 - 3.5] * 3, [1.0] * 2, [1 - 1.5] * 2]] * 2
