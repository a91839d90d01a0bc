"""Autotune in training: the choice travels behind the gradients, and changes nothing but the pace."""

from __future__ import annotations

import atexit
import dataclasses
import json
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import coordd.torch as cd
from coordd.config import Config
from coordd.host.world import World
from coordd.tuning.settings import Settings
from coordd_torch.tuning import SIGNALS, Tuning
from tests.local_ranks import local_ranks
from tests.torch_plugin.training import batch, model, same, trained

STEPS = 200
START = Settings(fusion_mb=32.0, cycle_ms=20.0, buckets=1, algorithm="overlap", compression="none")


def world(rank: int) -> World:
    return World(rank, ("here", "here"))


@pytest.fixture
def config(tmp_path):
    pytest.importorskip("optuna")
    return Config(autotune=True, autotune_share=1.0, autotune_log=str(tmp_path / "record.json"))


def train(config: Config, passes: int = 1) -> list[tuple[dict[str, torch.Tensor], set[Settings]]]:
    def body(rank: int) -> tuple[dict[str, torch.Tensor], set[Settings]]:
        net = model()
        optimizer = cd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.05), net.named_parameters())
        seen: set[Settings] = set()

        def step(net: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor, targets: torch.Tensor) -> None:
            optimizer.zero_grad()
            for _ in range(passes):
                nn.functional.mse_loss(net(inputs), targets).backward()
            optimizer.step()
            seen.add(optimizer._coordd._settings)

        return trained(net, optimizer, [batch(rank, number) for number in range(STEPS)], step), seen

    with local_ranks(2, **dataclasses.asdict(config)) as ranks:
        return ranks.each(body)


@pytest.mark.parametrize("passes", [1, 2])
def test_what_is_tried_is_the_same_on_all_ranks_and_changes_no_result(config, passes):
    tuned = train(config, passes)
    assert len(tuned[0][1]) > 1
    assert tuned[0][1] == tuned[1][1]
    same([weights for weights, _ in tuned])
    same([tuned[0][0], train(Config(), passes)[0][0]])


def test_a_choice_is_forgotten_when_all_ranks_have_joined():
    """A rank that had joined has not heard of it; so all begin again with what the user wants."""

    def body(rank):
        net = model()
        optimizer = cd.DistributedOptimizer(
            torch.optim.SGD(net.parameters(), lr=0.05), net.named_parameters(), compression=cd.Compression.bf16()
        )
        reducer = optimizer._coordd
        for step in range(4):
            if step == 2:
                if not rank:
                    reducer._use(msgspec.structs.replace(reducer._settings, compression="none"))
                optimizer.join()
            optimizer.zero_grad()
            net(batch(rank, step)[0]).square().mean().backward()
            optimizer.step()
        return reducer.channel.plain, net.state_dict()

    with local_ranks(2) as ranks:
        (first, one), (second, other) = ranks.each(body)
    assert not first
    assert not second
    same([one, other])


def test_the_record_is_found_where_the_knob_says(config):
    train(config)
    assert json.loads(Path(config.autotune_log).read_text())


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_a_choice_survives_an_average_in_sixteen_bits(config, count):
    """Over however many ranks it is, of which some may have joined: small numbers are exact enough in bfloat16."""
    root = Tuning(config, world(0), [], START)
    other = Tuning(Config(), world(1), [], START)
    assert other.signals() == [0.0] * SIGNALS
    assert root.hear(other.signals()) is None
    wanted = root.signals()
    while not wanted[0]:
        root.step_done()
        wanted = root.signals()
    mean = ((torch.tensor(wanted) + torch.tensor(other.signals())) / count).bfloat16()
    assert other.hear(mean.double().tolist()) == root.hear(wanted)


def test_a_search_that_is_closed_before_the_end_does_not_write_its_record_again(config, monkeypatch):
    """A later search, after all ranks have joined, continues the record, which an older state must not replace."""
    at_exit = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    monkeypatch.setattr(atexit, "unregister", at_exit.remove)
    search = Tuning(config, world(0), [], START)
    assert len(at_exit) == 1
    search.close()
    assert not at_exit
    assert Path(config.autotune_log).exists()
