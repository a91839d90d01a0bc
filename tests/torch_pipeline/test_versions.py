"""Older versions of weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coordd.pipeline.versions import Versions
from coordd_torch.pipeline.weights import Weights


@pytest.fixture
def weight():
    return nn.Parameter(torch.zeros(1))


def step(versions, weight):
    versions.advance()
    with torch.no_grad():
        weight += 1


def test_a_version_is_shown_until_another_one_is(weight):
    versions = Versions(Weights([weight]), 3)
    for _ in range(2):
        step(versions, weight)
    for version in (0, 2, 1, 1, 0, 2):
        versions.show(version)
        assert weight.item() == version


def test_a_step_changes_the_newest(weight):
    versions = Versions(Weights([weight]), 2)
    step(versions, weight)
    versions.show(0)
    step(versions, weight)
    assert weight.item() == 2


def test_only_so_many_are_kept_and_the_oldest_stands_for_older_ones(weight):
    versions = Versions(Weights([weight]), 2)
    for _ in range(5):
        step(versions, weight)
    versions.show(0)
    assert weight.item() == 4
    versions.show(5)
    assert weight.item() == 5


def test_a_new_run_counts_anew(weight):
    versions = Versions(Weights([weight]), 2)
    versions.show(-1)
    assert weight.item() == 0
    step(versions, weight)
    versions.restart()
    versions.show(-1)
    assert weight.item() == 0
    versions.show(0)
    assert weight.item() == 1


def test_what_was_before_is_forgotten(weight):
    versions = Versions(Weights([weight]), 3)
    for _ in range(2):
        step(versions, weight)
    versions.show(1)
    versions.clear()
    assert weight.item() == 2
    weight.data.fill_(9.0)
    versions.restart()
    versions.show(-1)
    assert weight.item() == 9


def test_graphs_are_gone_back_with_the_weights_that_they_were_made_with():
    """A linear layer's graph keeps a view of its weights, an elementwise one the weights themselves."""
    weight = nn.Parameter(torch.full((1, 1), 2.0))
    versions = Versions(Weights([weight]), 2)
    entering = torch.ones(1, 1, requires_grad=True)
    results = [nn.functional.linear(entering, weight), entering * weight]
    versions.advance()
    with torch.autograd.grad_mode._unsafe_preserve_version_counter((weight,)), torch.no_grad():
        weight.fill_(7.0)
    versions.show(0)
    for result in results:
        assert torch.autograd.grad(result, entering)[0].item() == 2.0
