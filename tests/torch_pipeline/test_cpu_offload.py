"""What waits on the host. Without an accelerator only that what is there stays there, and what is taken at all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coordd_torch.pipeline.boundary import Boundary
from coordd_torch.pipeline.cpu_offload import Attic, fetched
from coordd_torch.pipeline.saved_tensors import Shelf
from tests.torch_pipeline.stages import Stage

accelerated = pytest.mark.skipif(not torch.cuda.is_available(), reason="offloads from an accelerator")


def stage(attic, **options):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 2))
    made = attic(module)
    return module, made, Boundary(Stage(module, ["x"], ["y"]), attic=made, **options)


@pytest.mark.parametrize(("way", "recompute"), [("backward", False), ("backward", True), ("backward_input", False)])
def test_gradients_are_the_same_and_parameters_are_not_taken(way, recompute):
    found = []
    for attic in (Attic, lambda _: None):
        module, made, boundary = stage(attic, recompute=recompute, split=way != "backward")
        loss = boundary.forward(0, {}, {"x": torch.ones(3, 6)})["y"].square().sum()
        getattr(boundary, way)(0, loss)
        if way != "backward":
            boundary.backward_weight(0)
        found.append([parameter.grad for parameter in module.parameters()])
        if made:
            assert made.stowed == 3  # two inputs of linear layers, one of the GELU
    assert all(map(torch.equal, *found))


def test_on_the_host_nothing_is_copied():
    attic = Attic(nn.Linear(1, 1))
    tensor = torch.ones(3)
    assert fetched(attic.stow(tensor)) is tensor


def test_a_graph_still_notices_what_is_changed_in_place():
    x, weight = torch.ones(3), torch.ones(3, requires_grad=True)
    with Shelf(Attic(nn.Linear(1, 1))).filling():
        y = weight * x
    x += 1
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


def test_an_optimizer_finds_its_state():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    attic = Attic(nn.Linear(1, 1))
    for _ in range(2):
        parameter.grad = torch.ones(3)
        with attic.emptied(optimizer):
            optimizer.step()
    assert optimizer.state[parameter]["step"] == 2


@accelerated
def test_activations_and_state_leave_the_accelerator():
    module = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda()
    optimizer = torch.optim.Adam(module.parameters())
    attic = Attic(module)
    before = torch.cuda.memory_allocated()
    with Shelf(attic).filling():
        y = module(torch.ones(4096, 1024, device="cuda"))
    assert torch.cuda.memory_allocated() - before < 3 * y.nbytes
    y.sum().backward()
    before = torch.cuda.memory_allocated()
    with attic.emptied(optimizer):
        optimizer.step()
    assert torch.cuda.memory_allocated() <= before
    assert {value.device.type for state in optimizer.state.values() for value in state.values()} == {"cpu"}
    with attic.emptied(optimizer):
        optimizer.step()
