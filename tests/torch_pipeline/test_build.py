"""What a rank builds of a model has the weights that the whole model would have."""

from __future__ import annotations

import copy
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from coordd.errors import ArgumentError
from coordd_torch.pipeline.build import keep, materialise, outline


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(8, 8).tril())


class Handmade(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(5, 7) * 0.02)
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Dropout(rate)) for rate in rates)
        self.packed = nn.Parameter(torch.empty(7, 21))
        for part in self.packed.chunk(3, dim=1):
            nn.init.trunc_normal_(part, std=1.5)
        self.square = nn.Parameter(torch.empty(9, 9))
        nn.init.orthogonal_(self.square)
        self.sparse = nn.Parameter(torch.empty(6, 6))
        nn.init.sparse_(self.sparse, 0.5)
        self.python = nn.Parameter(torch.tensor([random.random(), float(np.random.rand())]))  # noqa: NPY002
        self.layers[2][0].weight.data = torch.randn(7, 7)
        self.layers[3][0].weight.data.copy_(self.layers[1][0].weight)
        self.to(torch.bfloat16)


def copies() -> nn.Module:
    prototype = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    return nn.Sequential(*(copy.deepcopy(prototype) for _ in range(4)), nn.Linear(6, 3))


def transformer() -> nn.Module:
    return nn.Transformer(16, 2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=24, batch_first=True)


def parametrized() -> nn.Module:
    layers = [parametrizations.spectral_norm(nn.Linear(6, 6)), parametrizations.weight_norm(nn.Linear(6, 6))]
    return nn.Sequential(*layers, nn.Conv2d(3, 4, 3))


def mlp() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(12, 12), nn.ReLU())))


def recurrent() -> nn.Module:
    return nn.Sequential(nn.LSTM(5, 6, num_layers=2), nn.GRU(6, 3))


def filled() -> nn.Module:
    """Its values come from elsewhere, as a file's do."""
    generator = torch.Generator().manual_seed(8)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    state = {name: torch.randn(value.shape, generator=generator) for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    return model


BUILDERS = [filled, recurrent, mlp, Tied, Handmade, copies, transformer, parametrized]


def seed() -> None:
    torch.manual_seed(3)
    random.seed(4)
    np.random.seed(5)  # noqa: NPY002


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def check_quarters(builder) -> None:
    seed()
    plain = builder()
    expected, after = tensors(plain), (torch.get_rng_state(), random.getstate(), np.random.get_state()[1])  # noqa: NPY002
    names = list(expected)
    for quarter in range(4):
        wanted = set(names[quarter * len(names) // 4 : (quarter + 1) * len(names) // 4])
        seed()
        built = tensors(materialise(builder, wanted))
        assert list(built) == names
        real = {name for name, tensor in built.items() if not tensor.is_meta}
        assert real == {name for name in names if any(expected[name] is expected[other] for other in wanted)}
        for name in real:
            assert torch.equal(built[name], expected[name]), name
            assert built[name].dtype == expected[name].dtype
        for name, tensor in built.items():
            assert (tensor.shape, tensor.stride()) == (expected[name].shape, expected[name].stride())
            assert tensor.requires_grad == expected[name].requires_grad
        assert torch.equal(torch.get_rng_state(), after[0])
        assert random.getstate() == after[1]
        assert np.array_equal(np.random.get_state()[1], after[2])  # noqa: NPY002


@pytest.mark.parametrize("builder", BUILDERS)
def test_quarters_equal_the_plain_build_bit_by_bit(builder) -> None:
    check_quarters(builder)


@pytest.mark.parametrize("builder", BUILDERS)
def test_an_outline_has_no_values_and_leaves_randomness_alone(builder) -> None:
    seed()
    before = torch.get_rng_state()
    drawn = tensors(outline(builder))
    assert torch.equal(torch.get_rng_state(), before)
    expected = tensors(builder())
    assert {name: tensor.shape for name, tensor in drawn.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    assert all(tensor.is_meta for tensor in drawn.values())


def test_what_is_not_wanted_draws_again_as_often_as_the_real_one() -> None:
    """A truncated normal distribution draws until everything is within its bounds."""

    def builder() -> nn.Module:
        layers = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3)))
        for layer in layers:
            nn.init.trunc_normal_(layer.weight, std=1.9)
            nn.init.trunc_normal_(layer.bias, std=1.0, a=1.0, b=3.0)
        return layers

    check_quarters(builder)


def test_what_was_just_drawn_may_be_used_in_what_is_real() -> None:
    def builder() -> nn.Module:
        layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        with torch.no_grad():
            peak = torch.tensor(-9.0).max(nn.init.trunc_normal_(layers[0].weight).max())
            seen = torch.zeros(1)
            seen += peak
            layers.register_buffer("seen", seen)
        return layers

    check_quarters(builder)


def test_ranks_may_be_threads() -> None:
    def builder() -> nn.Module:
        torch.manual_seed(6)
        return mlp()

    def build(rank: int) -> tuple[nn.Module, nn.Module]:
        mine = nn.Linear(2, 2)  # while others build
        return materialise(builder, lambda name: name.startswith(f"{2 * rank}.")), mine

    expected = tensors(builder())
    with ThreadPoolExecutor(4) as ranks:
        built = list(ranks.map(build, range(4)))
    for rank, (part, mine) in enumerate(built):
        real = {name: tensor for name, tensor in tensors(part).items() if not tensor.is_meta}
        assert real.keys() == {f"{2 * rank}.weight", f"{2 * rank}.bias"}
        assert all(torch.equal(tensor, expected[name]) for name, tensor in real.items())
        assert not mine.weight.is_meta


def test_what_other_threads_make_is_theirs() -> None:
    with ThreadPoolExecutor(1) as other:

        def builder() -> nn.Module:
            theirs = other.submit(lambda: nn.BatchNorm1d(3)).result()
            made.append(theirs)
            return nn.BatchNorm1d(2)

        made: list[nn.Module] = []
        assert outline(builder).weight.is_meta
    assert not any(tensor.is_meta for module in made for tensor in tensors(module).values())


def test_names_may_be_chosen_by_a_function() -> None:
    built = materialise(mlp, lambda name: name.startswith("2."))
    assert {name for name, tensor in tensors(built).items() if not tensor.is_meta} == {"2.weight", "2.bias"}


def test_keep_frees_what_is_not_wanted_and_leaves_ties() -> None:
    model = Tied()
    expected = copy.deepcopy(model)
    keep(model, {"head.weight", "blocks.1.bias"})
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, expected.head.weight)
    assert torch.equal(model.blocks[1].bias, expected.blocks[1].bias)
    assert model.blocks[1].weight.is_meta
    assert model.mask.is_meta
    keep(model, {"blocks.1.bias"})
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.is_meta


def test_keep_leaves_nothing_in_recurrent_modules() -> None:
    model = recurrent()
    keep(model, {"0.weight_hh_l0"})
    assert [weight.is_meta for weight in model[0]._flat_weights] == [True, False] + [True] * 6


def test_keep_leaves_what_was_noted_on_a_parameter() -> None:
    model = nn.Linear(2, 2)
    model.weight.noted = 7
    model.bias.requires_grad_(False)
    keep(model, set())
    assert model.weight.noted == 7
    assert not model.bias.requires_grad


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"no parameter or buffer named '9.weight'"):
        materialise(mlp, {"9.weight"})
    with pytest.raises(ArgumentError, match=r"no parameter or buffer named '9.weight'"):
        keep(mlp(), {"0.weight", "9.weight"})


def test_a_wanted_parameter_without_values_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"has no values, it is on the meta device: '0.weight'"):
        keep(nn.Sequential(nn.Linear(2, 2, device="meta")), {"0.weight"})
    with pytest.raises(ArgumentError, match=r"has no values, it is on the meta device: '0.bias'"):
        materialise(lambda: nn.Sequential(nn.Linear(2, 2, device="meta")), {"0.bias"})


def test_a_builder_that_needs_values_of_others_is_told_which() -> None:
    def builder() -> nn.Module:
        layers = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
        layers[1].bias.data.fill_(layers[0].weight.max().item())
        return layers

    with pytest.raises(ArgumentError, match=r"uses the values of Linear.weight \(number 0, of shape \(2, 3\)\)"):
        outline(builder)


def test_a_builder_that_returns_what_others_made_is_refused() -> None:
    made = nn.Linear(2, 2)
    with pytest.raises(ArgumentError, match=r"has not made itself.*: '0.weight', '0.bias'"):
        outline(lambda: nn.Sequential(made, nn.Linear(2, 2)))
    assert not made.weight.is_meta


def test_a_builder_that_changes_its_mind_is_refused() -> None:
    widths = iter(range(2, 9))
    with pytest.raises(ArgumentError, match="makes something else each time"):
        materialise(lambda: nn.Linear(next(widths), 2), {"weight"})


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"returned list, not a torch\.nn\.Module"):
        outline(lambda: [nn.Linear(2, 2)])


def test_an_error_in_the_builder_leaves_parameters_as_they_were() -> None:
    def builder() -> nn.Module:
        raise KeyError("mine")

    new = nn.Parameter.__dict__["__new__"]
    with pytest.raises(KeyError, match="mine"):
        materialise(builder, set())
    assert nn.Parameter.__dict__["__new__"] is new
    assert not nn.Linear(2, 2).weight.is_meta
