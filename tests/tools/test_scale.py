"""The simulator of many ranks: counts are exact, times are only as good as this machine, so none is compared."""

from __future__ import annotations

import json

import pytest

from coordd_tools.scale.cli import main
from coordd_tools.scale.fabric import Fabric
from coordd_tools.scale.run import Phase, Run
from coordd_tools.scale.setting import Setting
from coordd_tools.sim.agenda import Agenda

RANKS = 200
QUIET = 64
"""Bytes that a message about known tensors may have."""


def phases(**changes: object) -> dict[str, Phase]:
    setting = Setting(**{"ranks": RANKS, "hosts": 25, "tensors": 100, "fan_in": 4, "steps": 1, **changes})
    return {phase.name: phase for phase in Run(setting, progress=lambda name, ranks: None).phases()}


def test_each_neighbour_of_rank_0_speaks_once_and_is_told_once():
    found = phases()
    neighbours = len(Setting(ranks=RANKS, hosts=25, fan_in=4).posts[0].children)
    assert neighbours == 8
    for phase in found.values():
        first = phase.accounts[0]
        assert (first.heard, first.said) == (neighbours, neighbours), phase.name
        assert phase.seconds > 0
        assert sum(account.heard for account in phase.accounts) == 2 * (RANKS - 1)
        assert sum(account.heard_bytes for account in phase.accounts) == sum(one.said_bytes for one in phase.accounts)


def test_a_known_tensor_costs_bits():
    found = phases()
    assert found["steady 1"].accounts[0].heard_bytes < QUIET * found["steady 1"].accounts[0].heard
    assert found["cold"].accounts[0].heard_bytes > 10 * found["steady 1"].accounts[0].heard_bytes


def test_a_star_hears_everybody():
    found = phases(fan_in=RANKS)
    assert {phase.accounts[0].heard for phase in found.values()} == {RANKS - 1}


@pytest.mark.parametrize("changes", [{"cuts": 3, "gap": 1e-3}, {"stragglers": 5, "delay": 0.3}], ids=["cuts", "late"])
def test_what_is_not_alike_is_still_answered_everywhere(changes):
    """That all ranks are through is checked by the run itself."""
    found = phases(**changes)
    plain = phases()
    for name in ("cold", "steady 1"):
        assert plain[name].accounts[0].heard < found[name].accounts[0].heard < RANKS


def test_a_rank_that_never_speaks_is_noticed(monkeypatch):
    monkeypatch.setattr("coordd_tools.scale.node.Node.report", lambda self, step, cut: None)
    with pytest.raises(RuntimeError, match="cold: only 0 of 200 ranks are through"):
        phases()


def test_bytes_wait_for_each_other_at_both_ends():
    agenda, arrived = Agenda(), []
    setting = Setting(ranks=3, latency=1.0, bandwidth=10.0)
    fabric = Fabric(setting, agenda, lambda receiver, sender, data: arrived.append((agenda.now, receiver, sender)))
    fabric.send(0, 1, b"x" * 20, at=0.0)
    fabric.send(0, 2, b"x" * 10, at=0.0)
    fabric.send(1, 2, b"x" * 10, at=2.0)
    assert agenda.run(limit=100.0)
    assert arrived == [(3.0, 1, 0), (4.0, 2, 0), (5.0, 2, 1)]
    assert [account.said for account in fabric.settle()] == [2, 1, 0]
    assert [account.messages for account in fabric.accounts] == [0, 0, 0]


def test_the_command_prints_tables_or_everything(capsys):
    small = ["--ranks", "40", "--tensors", "5", "--fan-in", "2", "--steps", "1"]
    assert main(small) == 0
    told = capsys.readouterr().out
    assert told.startswith("40 ranks on 5 hosts, 5 tensors, fan-in 2, 20 µs a hop, 10 Gbit/s")
    assert "steady 1: most at one rank" in told
    assert main([*small, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["setting"]["hosts"] == 5
    assert [phase["phase"] for phase in found["phases"]] == ["start", "cold", "steady 1"]
    assert sum(level["ranks"] for level in found["phases"][1]["levels"]) == 40
    assert found["phases"][1]["rank_0"]["heard"] == found["phases"][1]["rank_0"]["said"] == 4
