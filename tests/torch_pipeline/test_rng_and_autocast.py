"""Random numbers and autocast, found again."""

from __future__ import annotations

import itertools

import torch
from torch.nn.functional import linear

from coordd_torch.pipeline.rng_and_autocast import Surroundings, casting, seed_for, seeded, uncast

CPU = torch.device("cpu")


def test_seeds_differ_and_are_the_same_everywhere():
    seeds = [seed_for(*numbers) for numbers in itertools.product(range(5), repeat=4)]
    assert len(set(seeds)) == 5**4
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_for(0, 0, 0, 0) == 5809880761037817570


def test_a_seed_holds_for_a_while_and_leaves_no_trace():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    drawn = []
    for _ in range(2):
        with seeded(9, CPU):
            drawn.append(torch.rand(3))
    assert torch.equal(*drawn)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_same_numbers_are_drawn_again():
    surroundings = Surroundings(CPU)
    drawn = torch.rand(3)
    state = torch.get_rng_state()
    with surroundings.again():
        assert torch.equal(torch.rand(3), drawn)
    assert torch.equal(torch.get_rng_state(), state)


def test_autocast_is_as_it_was():
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = Surroundings(CPU)
    outside = Surroundings(CPU)
    with inside.again():
        assert linear(x, x).dtype == torch.bfloat16
        with outside.again():
            assert linear(x, x).dtype == torch.float32
    assert linear(x, x).dtype == torch.float32


def test_weights_are_cast_anew():
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for value in (1, 2):
            with torch.no_grad():
                weight.fill_(value)
            with casting():
                assert linear(torch.ones(1, 2), weight)[0, 0] == 2 * value


def test_backward_passes_are_not_cast():
    with torch.autocast("cpu", dtype=torch.bfloat16), uncast(CPU):
        assert linear(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32
        assert not torch.is_autocast_enabled("cpu")
