"""Batch normalisation over all ranks, against one process that has the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import coordd.torch as cd
from tests.local_ranks import each_rank

ROWS = (3, 1, 4)
KINDS = {"1d": ((), nn.BatchNorm1d), "sequence": ((5,), nn.BatchNorm1d), "2d": ((3, 2), nn.BatchNorm2d)}


def batch(rank: int, *rest: int, rows: int | None = None) -> torch.Tensor:
    source = torch.Generator().manual_seed(rank)
    values = torch.randn(ROWS[rank] if rows is None else rows, 6, *rest, dtype=torch.float64, generator=source)
    return values * (rank + 1) + 100 * rank


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "details", [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}], ids=str
)
def test_it_is_that_of_the_whole_batch(kind, details):
    rest, plain = KINDS[kind]
    whole = torch.cat([batch(rank, *rest) for rank in range(3)]).requires_grad_()
    alone = plain(6, **details).double()
    for _ in range(2):
        expected = alone(whole)
    expected.square().mul(whole.detach()).sum().backward()

    def body(rank):
        norm = cd.SyncBatchNorm(6, **details).double()
        mine = batch(rank, *rest).requires_grad_()
        for _ in range(2):
            found = norm(mine)
        found.square().mul(mine.detach()).sum().backward()
        return norm, found, mine.grad

    ranks = each_rank(3, body)
    torch.testing.assert_close(torch.cat([found for _, found, _ in ranks]), expected)
    torch.testing.assert_close(torch.cat([gradient for _, _, gradient in ranks]), whole.grad)
    for norm, _, _ in ranks:
        torch.testing.assert_close(norm.state_dict(), alone.state_dict())
    if alone.affine:
        torch.testing.assert_close(sum(norm.weight.grad for norm, _, _ in ranks), alone.weight.grad)


def test_a_rank_may_have_no_rows():
    whole = torch.cat([batch(0), batch(2)])
    expected = nn.BatchNorm1d(6).double()(whole)

    def body(rank):
        return cd.SyncBatchNorm(6).double()(batch(rank, rows=0 if rank == 1 else None))

    torch.testing.assert_close(torch.cat(each_rank(3, body)), expected)


def test_large_means_do_not_swallow_the_variance():
    def body(rank):
        source = torch.Generator().manual_seed(rank)
        norm = cd.SyncBatchNorm(6)
        norm(torch.randn(64, 6, generator=source) + 1e4)
        return norm.running_var

    for found in each_rank(2, body):
        torch.testing.assert_close(found, torch.full((6,), 1.0), rtol=0.2, atol=0.1)


def test_evaluation_needs_nobody():
    def body(rank):
        norm = cd.SyncBatchNorm(6).double().eval()
        if rank == 0:
            torch.testing.assert_close(norm(batch(0)), nn.BatchNorm1d(6).double().eval()(batch(0)))

    each_rank(2, body)


def test_a_wrong_number_of_features_is_refused():
    def body(_):
        with pytest.raises(cd.ArgumentError, match=r"\(N, 5, ...\)"):
            cd.SyncBatchNorm(5)(torch.ones(2, 6))

    each_rank(2, body)
