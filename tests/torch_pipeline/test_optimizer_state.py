"""Optimizers go on as if nothing had happened, whatever the number of stages was and is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coordd.errors import ArgumentError
from coordd_torch.pipeline.checkpoint import save_stage, write_manifest
from coordd_torch.pipeline.optimizer_state import load_optimizer, save_optimizer

_LAYERS = 6


def adamw(parameters) -> torch.optim.Optimizer:
    parameters = list(parameters)
    decayed = [one for one in parameters if one.dim() > 1]
    rest = [one for one in parameters if one.dim() <= 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "betas": (0.8, 0.9)}], lr=1e-2)


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def tensor_rate(parameters) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=torch.tensor(1e-3))


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(_LAYERS)))


def cut(whole: nn.Sequential, stages: int) -> list[dict[str, nn.Parameter]]:
    def stage(name: str) -> int:
        return int(name.partition(".")[0]) * stages // _LAYERS

    return [{name: one for name, one in whole.named_parameters() if stage(name) == own} for own in range(stages)]


def train(whole: nn.Sequential, optimizers, steps: int) -> None:
    for step in range(steps):
        whole(torch.full((2, 3), step + 1.0)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def save(folder, parts, optimizers) -> None:
    for stage, (part, optimizer) in enumerate(zip(parts, optimizers, strict=True)):
        save_stage(folder, stage, len(parts), part)
        save_optimizer(folder, stage, len(parts), optimizer, part)
    write_manifest(folder, len(parts), optimizer=True)


@pytest.mark.parametrize("make", [adamw, sgd, tensor_rate])
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 3), (3, 1), (1, 2)])
def test_training_goes_on_at_another_number_of_stages(tmp_path, make, before, after) -> None:
    whole = model()
    first = cut(whole, before)
    optimizers = [make(part.values()) for part in first]
    train(whole, optimizers, 2)
    for optimizer in optimizers:
        optimizer.param_groups[0]["lr"] *= 0.5
    save(tmp_path, first, optimizers)

    resumed = model()
    resumed.load_state_dict(whole.state_dict())
    parts = cut(resumed, after)
    others = [make(part.values()) for part in parts]
    for part, optimizer in zip(parts, others, strict=True):
        load_optimizer(tmp_path, optimizer, part)
    assert isinstance(others[0].param_groups[0].get("betas", ()), tuple)
    assert isinstance(others[0].param_groups[0]["lr"], type(optimizers[0].param_groups[0]["lr"]))
    train(whole, optimizers, 2)
    train(resumed, others, 2)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name


def test_what_has_never_stepped_has_no_state(tmp_path) -> None:
    part = cut(model(), 1)[0]
    save(tmp_path, [part], [sgd(part.values())])
    fresh = sgd(part.values())
    load_optimizer(tmp_path, fresh, part)
    assert not fresh.state


def test_a_stage_without_parameters_has_no_optimizer(tmp_path) -> None:
    part = cut(model(), 1)[0]
    save(tmp_path, [part, {}], [sgd(part.values()), None])
    load_optimizer(tmp_path, sgd(part.values()), part)


def test_what_is_tied_is_found_by_each_of_its_names(tmp_path) -> None:
    tied = nn.Parameter(torch.ones(2))
    optimizer = sgd([tied])
    tied.sum().backward()
    optimizer.step()
    save_stage(tmp_path, 0, 1, {"first": tied}, aliases={"second": "first"})
    save_optimizer(tmp_path, 0, 1, optimizer, {"first": tied})
    write_manifest(tmp_path, 1, optimizer=True)
    other = sgd([nn.Parameter(torch.ones(2))])
    load_optimizer(tmp_path, other, {"second": other.param_groups[0]["params"][0]})
    assert torch.equal(next(iter(other.state.values()))["momentum_buffer"], torch.ones(2))


def test_missing_state_is_told(tmp_path) -> None:
    parts = cut(model(), 2)
    save(tmp_path, parts[:1], [sgd(parts[0].values())])
    with pytest.raises(ArgumentError, match=rf"the checkpoint in {tmp_path} has no optimizer state of '3.bias', "):
        load_optimizer(tmp_path, sgd(parts[1].values()), parts[1])
    with pytest.raises(ArgumentError, match="6 of the optimizer's 6 parameters have no name"):
        load_optimizer(tmp_path, sgd(parts[1].values()), parts[0])


def test_the_state_of_another_kind_is_refused(tmp_path) -> None:
    part = cut(model(), 1)[0]
    save(tmp_path, [part], [sgd(part.values())])
    with pytest.raises(ArgumentError, match=r"has the state of SGD, which AdamW cannot .* \(optimizer=False\)"):
        load_optimizer(tmp_path, torch.optim.AdamW(part.values()), part)


def test_a_checkpoint_without_optimizers_says_so(tmp_path) -> None:
    part = cut(model(), 1)[0]
    save_stage(tmp_path, 0, 1, part)
    with pytest.raises(ArgumentError, match=r"optimizer-0-of-1.safetensors .* cannot be read"):
        write_manifest(tmp_path, 1, optimizer=True)
    write_manifest(tmp_path, 1)
    with pytest.raises(ArgumentError, match="has no optimizer state of"):
        load_optimizer(tmp_path, sgd(part.values()), part)


def test_different_settings_cannot_be_those_of_one_group(tmp_path) -> None:
    parts = cut(model(), 2)
    optimizers = [torch.optim.SGD(part.values(), lr=0.1 * (stage + 1)) for stage, part in enumerate(parts)]
    save(tmp_path, parts, optimizers)
    whole = {**parts[0], **parts[1]}
    with pytest.raises(ArgumentError, match=r"'0.weight' has other settings than '3.bias', .* in one group"):
        load_optimizer(tmp_path, sgd(whole.values()), whole)


def test_state_that_is_not_plain_is_refused(tmp_path) -> None:
    part = {"x": nn.Parameter(torch.ones(2))}
    optimizer = torch.optim.LBFGS(part.values())
    optimizer.state[part["x"]] = {"old": [torch.ones(2)]}
    with pytest.raises(ArgumentError, match="the state of LBFGS cannot be saved by parameter"):
        save_optimizer(tmp_path, 0, 1, optimizer, part)
