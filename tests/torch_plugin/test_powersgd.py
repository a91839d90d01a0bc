"""Matrices of low rank instead of matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import coordd.torch as cd
from tests.torch_plugin.journeys import travelled

few = settings(max_examples=40)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@few
@given(
    st.integers(1, 4).flatmap(lambda rank: st.tuples(st.just(rank), st.integers(0, rank))),
    st.tuples(st.integers(20, 40), st.integers(20, 40)),
    st.integers(1, 3),
    st.integers(0, 1 << 31),
)
def test_matrices_of_no_higher_rank_arrive_as_they_are(ranks, shape, size, seed):
    (rank, true_rank), (rows, columns) = ranks, shape
    right = random(true_rank, columns, seed=seed)  # in common, so that the mean has the rank, too
    mine = [random(rows, true_rank, seed=seed + 1 + index) @ right for index in range(size)]
    compressors = [cd.Compression.powersgd(rank=rank) for _ in mine]
    arrivals = travelled(compressors, [[matrix] for matrix in mine])
    scale = max(1.0, *(matrix.abs().max().item() for matrix in mine))
    for arrival in arrivals:
        assert torch.equal(arrival.mean, arrivals[0].mean)
        torch.testing.assert_close(arrival.mean.view(rows, columns), sum(mine) / size, rtol=0, atol=1e-9 * scale)


@few
@given(st.integers(1, 3), st.integers(1, 3), st.integers())
def test_what_arrives_and_what_is_kept_is_all_there_is(rank, size, seed):
    mine = [[random(30, 20, seed=seed % 1000 + index), random(7, seed=index)] for index in range(size)]
    arrivals = travelled([cd.Compression.powersgd(rank=rank) for _ in mine], mine)
    whole = sum(torch.cat([part.flatten() for part in parts]) for parts in mine) / size
    kept = sum(arrival.lost for arrival in arrivals) / size
    torch.testing.assert_close(arrivals[0].mean + kept, whole)


def test_vectors_and_small_matrices_travel_exactly():
    small = [random(50, seed=1), random(3, 3, seed=2), random(1, 100, seed=3), random(seed=4)]
    parts = [*small, random(40, 5, 3, 3, seed=5)]
    (arrival,) = travelled([cd.Compression.powersgd(rank=1)], [parts])
    exact = sum(part.numel() for part in small)
    assert not arrival.lost[:exact].any()
    assert torch.equal(arrival.mean[:exact], torch.cat([part.flatten() for part in small]))
    assert arrival.lost[exact:].any()
    assert list(arrival.journey.cargo.news) == ["t4"], "only the large one has a factor"


def test_a_cargo_of_small_ones_takes_one_round():
    (arrival,) = travelled([cd.Compression.powersgd()], [[random(5, seed=1)]])
    assert arrival.journey.number == 0
    assert arrival.mean is not None


def test_a_warm_start_comes_closer_every_step():
    matrix = random(60, 3, seed=1) @ random(3, 50, seed=2) + 0.01 * random(60, 50, seed=3)
    compressor = cd.Compression.powersgd(rank=3)
    errors = [travelled([compressor], [[matrix]])[0].lost.norm().item() for _ in range(4)]
    best = torch.linalg.svdvals(matrix)[3:].norm().item()
    assert errors[0] > errors[-1]
    assert errors[-1] == pytest.approx(best, rel=1e-3)


def test_a_matrix_that_was_zero_for_a_while_comes_back():
    compressor = cd.Compression.powersgd(rank=1)
    matrix = random(20, 1, seed=1) @ random(1, 20, seed=2)
    travelled([compressor], [[torch.zeros(20, 20, dtype=torch.float64)]])
    for _ in range(2):
        (arrival,) = travelled([compressor], [[matrix]])
    torch.testing.assert_close(arrival.mean.view(20, 20), matrix)


def test_bytes_grow_with_the_sides_and_not_with_the_area():
    compressors = [cd.Compression.powersgd(rank=2) for _ in range(4)]
    travelled(compressors, [[torch.randn(256, 256)]] * 4)
    assert compressors[0].ratio == pytest.approx(256 / 4, rel=0.01)


def test_there_is_no_such_rank():
    with pytest.raises(cd.ArgumentError, match="at least 1"):
        cd.Compression.powersgd(rank=0)
