"""`coordd plan`."""

from __future__ import annotations

import gc
import xml.etree.ElementTree as ET

import pytest

from coordd.cli import main
from coordd.pipeline.plan import Plan
from coordd.pipeline.simulate import simulate

SMALL = ["plan", "--stages", "4", "--microbatches", "8"]


def told(capsys, *arguments):
    assert main([*SMALL, *arguments]) == 0
    return capsys.readouterr().out


def row(text, name):
    return next(line.split() for line in text.splitlines() if line.startswith(f"{name} "))


def test_it_says_what_a_step_takes_and_draws_it_with_letters(capsys):
    text = told(capsys)
    assert text.startswith("1f1b on 4 ranks, 4 stages, 8 microbatches: makespan 33 units, bubble 27.3 %, peak 4 act")
    assert row(text, "1") == ["1", "1", "24", "units", "27.3", "%", "3", "activations"]
    assert "rank 3 ......F0B0--F1B1--" in text
    assert gc.isenabled()


def test_times_are_of_a_ranks_layers_however_they_are_cut(capsys):
    text = told(capsys, "--schedule", "zb-v", "--forward", "0.010")
    assert "makespan 255 ms" in text
    assert "peak 4 activations" in text
    assert row(text, "0")[:5] == ["0", "0,", "7", "240", "ms"]


def test_a_pass_without_a_time_takes_as_long_as_a_forward_pass(capsys):
    assert "makespan 66 s" in told(capsys, "--forward", "2")
    assert "makespan 33.6 s" in told(capsys, "--transfer", "0.1", "--schedule", "gpipe")


def test_replicas_have_pipelines_of_their_own(capsys):
    assert "on 8 ranks, 4 stages, 16 microbatches: makespan 33 units" in told(capsys, "--replicas", "2")


def test_all_schedules_side_by_side(capsys):
    text = told(capsys, "--compare")
    assert row(text, "gpipe") == ["gpipe", "33", "units", "27.3", "%", "8", "activations", "1"]
    assert row(text, "2bw")[-1] == "2"
    assert row(text, "zb-v")[-2:] == ["◀", "best"]


def test_the_best_fits_into_the_memory(capsys):
    text = told(capsys, "--compare", "--memory", "3.9")
    assert "best" not in text.partition("schedule ")[2].partition("several")[0]
    text = told(capsys, "--compare", "--memory", "4")
    assert "◀ best within 4 activations" in text
    assert row(text, "interleaved")[-3:] == ["too", "much", "memory"]


def test_a_comparison_says_what_it_leaves_out(capsys):
    assert main(["plan", "--stages", "65", "--microbatches", "2", "--compare"]) == 0
    text = capsys.readouterr().out
    assert "zb-v is left out: it is not worked out for more than 64 ranks" in text
    assert row(text, "zb-h1")[0] == "zb-h1"
    assert main(["plan", "--stages", "4", "--microbatches", "2", "--compare"]) == 0
    assert "2bw is left out: 2bw needs as many microbatches as stages" in capsys.readouterr().out


def test_actions_can_be_read_again(capsys):
    plan = Plan.parse(told(capsys, "--actions", "--schedule", "zb-h1"))
    assert plan.name == "zb-h1"
    assert simulate(plan).makespan == 27


def test_the_picture_is_in_the_file(capsys, tmp_path):
    path = tmp_path / "plan.svg"
    assert f"the picture: {path}" in told(capsys, "--schedule", "interleaved", "--chunks", "3", "--out", str(path))
    text = " ".join(ET.parse(path).getroot().itertext())  # noqa: S314 - our own
    assert "interleaved: 4 ranks, 12 stages, 8 microbatches" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--schedule", "1fb1"], "there is no schedule '1fb1', did you mean 1f1b?"),
        (["--schedule", "2bw", "--stages", "9"], "2bw needs as many microbatches as stages, not 8 for 9"),
        (["--chunks", "2"], "1f1b does not cut the layers of a rank into 2 stages"),
        (["--steps", "2"], "1f1b has an empty pipeline between steps"),
        (["--memory", "2"], "--memory chooses between schedules: add --compare"),
        (["--out", "plan.pdf"], "let plan.pdf end in .svg or .png"),
    ],
)
def test_what_cannot_be_planned_is_said_in_one_line(capsys, arguments, text):
    assert main([*SMALL, *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("coordd: ")
    assert text in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_a_file_that_cannot_be_written_is_said(capsys):
    assert main([*SMALL, "--out", "/dev/null/plan.svg"]) == 1
    assert capsys.readouterr().err.startswith("coordd: ")


@pytest.mark.parametrize(
    "arguments", [["--stages", "0"], ["--microbatches", "-1"], ["--forward", "soon"], ["--transfer", "inf"]]
)
def test_numbers_that_are_none_are_usage_errors(capsys, arguments):
    with pytest.raises(SystemExit) as stop:
        main([*SMALL, *arguments])
    assert stop.value.code == 2
    assert "is not a number from" in capsys.readouterr().err
