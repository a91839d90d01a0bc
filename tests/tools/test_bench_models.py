import pytest
import torch

from coordd_tools.bench.worker.models import MODELS

COUNTS = {"gpt": 4_902_912, "mlp": 8_407_050, "wide": 33_591_306, "small": 333_450}
LOGITS = {"gpt": (4, 128, 256), "mlp": (16, 10), "wide": (16, 10), "small": (64, 10)}


@pytest.mark.parametrize("name", MODELS)
def test_the_models_have_the_stated_number_of_parameters(name):
    assert sum(parameter.numel() for parameter in MODELS[name].build().parameters()) == COUNTS[name]


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_gets_a_gradient(name):
    model = MODELS[name].build()
    inputs, labels = MODELS[name].batch(torch.Generator().manual_seed(0))
    logits = model(inputs)
    assert tuple(logits.shape) == LOGITS[name]
    torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten()).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


def test_the_gpt_does_not_see_the_future():
    model = MODELS["gpt"].build()
    tokens, _ = MODELS["gpt"].batch(torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 64:] = 0
    torch.testing.assert_close(model(tokens)[:, :64], model(changed)[:, :64])


def test_equal_seeds_make_equal_batches_and_others_do_not():
    first, again, other = (MODELS["mlp"].batch(torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
