"""A backward pass in two: the same gradients as in one, and nothing computed twice."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from coordd_torch.pipeline.boundary import Boundary
from coordd_torch.pipeline.saved_tensors import Shelf
from coordd_torch.pipeline.split import SplitBackward, obstacle, walk
from tests.torch_pipeline.graphs import GRAPHS, Custom, Scaled, multilayer
from tests.torch_pipeline.stages import Stage

pytestmark = pytest.mark.usefixtures("exact")


class Counted(TorchDispatchMode):
    """Counts the expensive operations."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    @property
    def products(self):
        return sum(self.calls[name] for name in ("mm", "addmm", "bmm", "baddbmm"))


def splitted(module, x, gradient):
    shelf = Shelf()
    with shelf.filling():
        output = module(x)
    return SplitBackward([get_gradient_edge(output)], [gradient], [x], shelf=shelf)


def taken(module, x):
    found = {"input": x.grad, **{name: parameter.grad for name, parameter in module.named_parameters()}}
    x.grad = None
    module.zero_grad()
    return found


@pytest.mark.parametrize("name", GRAPHS)
def test_the_gradients_are_those_of_one_pass(name):
    module, x, gradient = GRAPHS[name](), torch.randn(5, 4, requires_grad=True), torch.randn(5, 4)
    with Counted() as whole:
        module(x).backward(gradient)
    expected = taken(module, x)
    with Counted() as halves:
        split = splitted(module, x, gradient)
        split.first()
        assert torch.equal(x.grad, expected["input"])
        split.second()
    found = taken(module, x)
    for parameter, value in expected.items():
        same = value is found[parameter] if value is None else torch.equal(value, found[parameter])
        assert same, parameter
    assert halves.products == whole.products + (name == "mixed")  # whose common way is gone along twice


def test_the_first_pass_leaves_the_parameters_to_the_second():
    module, x = multilayer(), torch.randn(5, 4, requires_grad=True)
    split = splitted(module, x, torch.ones(5, 4))
    with Counted() as first:
        split.first()
    assert all(parameter.grad is None for parameter in module.parameters())
    with Counted() as second:
        split.second()
    assert first.products == second.products == 3
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_a_function_in_python_is_gone_back_through_once():
    module, x = Custom(), torch.randn(5, 4, requires_grad=True)
    split, before = splitted(module, x, torch.ones(5, 4)), Scaled.times
    split.first()
    split.second()
    assert Scaled.times == before + 1


def test_without_inputs_all_is_left_to_the_second():
    module, x = multilayer(), torch.randn(5, 4)
    module(x).sum().backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    split = splitted(module, x, torch.ones(5, 4))
    split.first()
    assert all(parameter.grad is None for parameter in module.parameters())
    split.second()
    assert all(torch.equal(left, right.grad) for left, right in zip(expected, module.parameters(), strict=True))


@pytest.mark.parametrize("name", ["multilayer", "tied", "twice"])
def test_hooks_of_a_parameter_see_one_gradient(name):
    module, x, calls = GRAPHS[name](), torch.randn(5, 4, requires_grad=True), Counter()
    for key, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, key=key: calls.update([key]))
        parameter.register_hook(lambda gradient: gradient * 2)
    module(x).sum().backward()
    expected = taken(module, x)
    split = splitted(module, x, torch.ones(module(x).shape))
    split.first()
    split.second()
    found = taken(module, x)
    assert set(calls.values()) == {2}
    assert all(torch.equal(found[key], value) for key, value in expected.items() if value is not None)


def test_a_hook_on_the_way_changes_a_gradient_once():
    first, second, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(5, 4, requires_grad=True)

    def hooked(values):
        hidden = first(values)
        hidden.register_hook(lambda gradient: gradient * 3)
        return second(hidden)

    hooked(x).sum().backward()
    expected, x.grad = [x.grad, first.weight.grad, first.bias.grad], None
    first.zero_grad()
    split = SplitBackward([get_gradient_edge(hooked(x))], [torch.ones(5, 4)], [x])
    split.first()
    split.second()
    assert all(map(torch.equal, [x.grad, first.weight.grad, first.bias.grad], expected))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("reentrant", "told"), [(True, "a reentrant checkpoint"), (False, "torch.utils.checkpoint")])
def test_what_cannot_be_split_is_done_at_once_and_told_once(reentrant, told, caplog):
    inner = multilayer()

    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(inner, x, use_reentrant=reentrant)

    x = torch.randn(5, 4, requires_grad=True)
    inner(x).sum().backward()
    expected = taken(inner, x)
    stage = Boundary(Stage(Wrapped(), ["x"], ["y"]), split=True)
    for number in (0, 1):
        loss = stage.forward(number, {1: ({"x": x}, [x])}, {})["y"].sum()
        assert told in obstacle(walk([get_gradient_edge(loss)]))
        found = stage.backward_input(number, loss)
        assert torch.equal(found[1][0], expected["input"])
        stage.backward_weight(number)
        assert all(torch.equal(value, expected[key]) for key, value in taken(inner, x).items() if key != "input")
    assert stage.undivided == 2
    (warning,) = caplog.messages
    assert "stage 0 are not split" in warning
    assert told in warning


def test_where_pytorch_does_not_show_who_gives_tensors_back_a_checkpoint_is_gone_back_through_twice(monkeypatch):
    monkeypatch.setattr("coordd_torch.pipeline.saved_tensors._SHOWN", False)
    inner, x = multilayer(), torch.randn(5, 4, requires_grad=True)
    inner(x * 2).sum().backward()
    expected = taken(inner, x)
    split = splitted(lambda x: checkpoint(inner, x * 2, use_reentrant=False), x, torch.ones(5, 4))
    split.first()
    split.second()
    assert all(torch.equal(value, expected[key]) for key, value in taken(inner, x).items())
