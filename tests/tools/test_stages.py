"""What pipelines are for, measured: what is worked out here, and on real ranks only that it runs."""

from __future__ import annotations

import json
import mmap

import pytest
import torch

from coordd_tools.bench.group import GroupError
from coordd_tools.stages import cap, cli, growth, memory
from coordd_tools.stages.cnn import Took, calibrate, network, stand_in
from coordd_tools.stages.ranks import attempt, run
from coordd_tools.stages.speedup import Row, ideal, measure, stages_of

EVEN = [Took(str(number), 0.001, 0.002, (3, 2), 5) for number in range(4)]


def test_the_network_is_that_of_the_paper():
    assert sum(parameter.numel() for parameter in network().parameters()) == 320 + 18496 + 1179776 + 1290
    assert network()(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_calibration_says_what_each_layer_makes_and_takes():
    took = calibrate(2, repeats=1)
    assert [each.name for each in took[:3]] == ["Conv2d", "ReLU", "Conv2d"]
    assert took[6].output == (64 * 12 * 12,)
    assert all(each.forward > 0 for each in took)
    assert took[2].backward > 0


def test_a_stand_in_makes_the_same_shapes_and_takes_its_time():
    took = [Took("a", 0.02, 0.03, (3, 2), 7), Took("b", 0.0, 0.0, (4,), 0)]
    model, x = stand_in(took), torch.zeros(6, 5)
    y = model(x)
    assert y.shape == (6, 4)
    y.sum().backward()
    assert [parameter.numel() for parameter in model.parameters()] == [7, 1]
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_ideal_is_the_closed_form_of_1f1b():
    spans = stages_of(EVEN, 2)
    assert [len(span) for span in spans] == [2, 2]
    assert ideal(EVEN, spans, "1f1b") == pytest.approx((10 + 2 - 1) * 0.006)
    assert ideal(EVEN, stages_of(EVEN, 1), "1f1b") == pytest.approx(10 * 0.012)


def test_speed_ups_are_those_of_images_a_second():
    base, row = Row(1, 1, (4,), 1.0, 1.25), Row(2, 2, (2, 2), 0.55, 0.6)
    assert (base.efficiency, base.speedup(base), base.limit(base)) == (0.8, 1.0, 1.0)
    assert row.speedup(base) == pytest.approx(2 * 1.25 / 0.6)
    assert row.limit(base) == pytest.approx(2 / 0.55)


def test_memory_is_counted_at_its_peak():
    before, common = memory.resident(), memory.shared()
    memory.forget_peak()
    with mmap.mmap(-1, 64 << 20) as block:  # new memory, whatever the heap has left
        block[::4096] = bytes(len(block) // 4096)
        assert memory.shared() - common > 60 << 20
    assert memory.shared() - common < 60 << 20
    assert memory.peak() - before > 60 << 20
    memory.forget_peak()
    assert memory.peak() - before < 60 << 20


def test_the_layers_of_a_need():
    assert cap.layers_of(cap.STATE * 4 * cap.WIDTH**2 * 9) == 9


@pytest.mark.mpi
@pytest.mark.slow
def test_steps_of_a_pipeline_that_sleeps_take_as_long_as_that():
    found = list(
        measure([Took(each.name, 0.004, 0.008, (10,), 5) for each in EVEN], [(2, 2)], schedule="1f1b", steps=2)
    )
    assert [(row.stages, row.replicas, row.layers) for row in found] == [(2, 2, (2, 2))]
    assert found[0].ideal == pytest.approx(11 * 0.024)
    assert found[0].seconds > 11 * 0.024


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.sweep
def test_1f1b_keeps_the_same_whatever_the_number_of_microbatches():
    short, long, everything = (
        max(row.peaks)
        for row in (
            *growth.measure(2, ["1f1b"], [4, 16]),
            *growth.measure(2, ["gpipe"], [16]),
        )
    )
    assert long < 1.3 * short
    assert everything > 2.5 * long


@pytest.mark.mpi
@pytest.mark.slow
def test_stages_train_a_large_model_as_one_piece_does_and_a_limit_is_one():
    small = {"layers": 4, "width": 512}
    whole = run("cap", 1, {**small, "whole": True})
    staged = run("cap", 2, {**small, "whole": False})
    assert staged["losses"] == pytest.approx(whole["losses"], rel=1e-6)
    assert len(staged["peaks"]) == 2
    failed = attempt("cap", 1, {"layers": 64, "width": 2048, "whole": True, "data_limit": 512 << 20})
    assert failed.code != 0
    assert "can't allocate memory" in failed.said
    with pytest.raises(GroupError, match="cap on 1 ranks exited with"):
        run("cap", 1, {"layers": 64, "width": 2048, "whole": True, "data_limit": 512 << 20})


@pytest.mark.mpi
@pytest.mark.slow
def test_the_command_prints_a_table_and_writes_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(growth, "MICROBATCHES", (4,))
    monkeypatch.setattr(growth, "SCHEDULES", ("1f1b",))
    assert cli.main(["growth", "-n", "2", "--json", str(tmp_path / "found.json")]) == 0
    assert "1f1b" in capsys.readouterr().out
    (row,) = json.loads((tmp_path / "found.json").read_text())
    assert (row["schedule"], row["microbatches"], len(row["peaks"])) == ("1f1b", 4, 2)
