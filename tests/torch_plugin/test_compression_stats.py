"""The bytes that a compressor reports are those that the transport has moved."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

import coordd.torch as cd
from coordd.transport.local import LocalLane
from coordd_torch.compression_stats import Gauge
from tests.local_ranks import each_rank

WIDTH = 256


@pytest.fixture
def sent(monkeypatch):
    """Bytes that each rank has sent."""
    counts = Counter()
    send = LocalLane.isend

    def counting(lane, array, destination, tag):
        counts[lane._rank] += array.nbytes
        return send(lane, array, destination, tag)

    monkeypatch.setattr(LocalLane, "isend", counting)
    return counts


def train(compressor, rank, *, steps=5):
    net = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.eye_(net.weight)
    optimizer = cd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.01), net.named_parameters(), compression=compressor
    )
    source = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(8, WIDTH, generator=source)).square().mean().backward()
        optimizer.step()


APART = {"shared_memory": False, "lock_steps": 0, "check_parameters": False}
"""Nothing travels but gradients, and that over the transport, where it is counted."""


@pytest.mark.parametrize("make", [getattr(cd.Compression, name) for name in ("fp16", "int8", "topk", "powersgd")])
@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_are_counted_as_they_travel(make, ranks, sent):
    compressors = [make() for _ in range(ranks)]
    each_rank(ranks, lambda rank: train(compressors[rank], rank), **APART)
    told = sum(compressor.gauge.bytes for compressor in compressors)
    # Small reductions take one round, in which everybody sends everything; for three ranks that is half as much again.
    slack = 1.002 if ranks == 2 else 1.51
    assert told / 1.001 <= sum(sent.values()) <= slack * told
    plain = 5 * 2 * (ranks - 1) / ranks * 4 * WIDTH**2
    assert [compressor.gauge.plain_bytes for compressor in compressors] == pytest.approx([plain] * ranks, rel=0.001)


def test_nothing_has_travelled_yet():
    gauge = Gauge()
    assert gauge.ratio == 1.0
    assert gauge.error == 0.0


def test_the_error_is_that_of_late():
    gauge = Gauge()
    for _ in range(10):
        gauge.compare(10.0, 5.0)
    assert gauge.error == pytest.approx(0.5)
    gauge.compare(float("inf"), 1.0)
    assert gauge.error == pytest.approx(0.5)
    for _ in range(2000):
        gauge.compare(10.0, 0.0)
    assert gauge.error < 1e-3
