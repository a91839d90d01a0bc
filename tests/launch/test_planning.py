"""`coordd plan`."""

from __future__ import annotations

import gc
import sys
import time
import xml.etree.ElementTree as ET

import pytest

from coordd.launch.cli import main
from coordd.pipeline.action import Action, Kind
from coordd.pipeline.plan import Plan
from coordd.pipeline.recording import Recording
from coordd.pipeline.schedules.schedule import one_f_one_b
from coordd.pipeline.simulate import Costs, Span, simulate
from coordd.pipeline.units import Units
from tests.pipeline.plans import chained

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


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A module that the user has written, and is in the folder of."""
    (tmp_path / "written_by_user.py").write_text(
        "import torch\n"
        "from torch import nn\n"
        "def build(): return nn.Sequential(*(nn.Linear(16, 16) for _ in range(9)))\n"
        "def batch(): return torch.ones(64, 16)\n"
        "def wrong(): return torch.ones(64, 15)\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("written_by_user", None)


MODEL = ["--model", "written_by_user:build", "--sample", "written_by_user:batch"]


@pytest.mark.usefixtures("sources")
def test_the_layers_of_a_model_are_measured_and_split(capsys, tmp_path):
    text = told(capsys, *MODEL, "--split", "parameters", "--compare", "--out", str(tmp_path / "plan.svg"))
    assert row(text, "stage") == ["stage", "layers", "forward", "backward", "packing", "weights", "sends", "holds"]
    assert [row(text.partition("stage ")[2], str(stage))[1:4] for stage in range(4)] == [
        ["0", "to", "2"],
        ["3", "to", "4"],
        ["5", "to", "6"],
        ["7", "to", "8"],
    ]
    assert row(text, "zb-v")[0] == "zb-v"
    assert "iB" in text.splitlines()[0]
    assert (tmp_path / "plan.svg").exists()


@pytest.mark.usefixtures("sources")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([*MODEL, "--memory", "1 KiB"], "and lacks"),
        ([*MODEL, "--split", "colour"], "by='colour' is unknown"),
        ([*MODEL, "--forward", "1"], "--model measures how long passes take: leave --forward out"),
        (MODEL[:2], "add --sample module:function"),
        (["--model", "written_by_user:none", *MODEL[2:]], "there is no 'written_by_user:none'"),
        (["--model", "written_by_user", *MODEL[2:]], "write module:function"),
        (["--model", "written_by_user:number", *MODEL[2:]], "'written_by_user:number' is int, and no function"),
        ([*MODEL[:2], "--sample", "written_by_user:wrong"], "cannot be measured: RuntimeError"),
    ],
)
def test_a_model_that_cannot_be_planned_is_said_in_one_line(capsys, arguments, text):
    assert main([*SMALL, *arguments]) == 2
    shown = capsys.readouterr().err
    assert text in shown
    assert shown.startswith("coordd: ")


def test_a_stage_may_have_replicas_of_its_own(capsys):
    assert main(["plan", "--stages", "2", "--microbatches", "4", "--replicas", "2,1"]) == 0
    assert capsys.readouterr().out.startswith("1f1b on 3 ranks, 2 stages, 8 microbatches: makespan 27 units")


def test_a_run_is_shown_beside_what_was_predicted(capsys, tmp_path):
    plan = chained(one_f_one_b(2, 3))
    late = [[Span(action, 3 * begin, 3 * end) for action, begin, end in spans] for spans in simulate(plan).spans]
    recorded = Recording(plan, tuple(map(tuple, late)), Costs.even(2), Units(memory="activations"))
    recorded.write(tmp_path / "run.json")
    assert main(["plan", "--measured", str(tmp_path / "run.json"), "--out", str(tmp_path / "run.svg")]) == 0
    text = capsys.readouterr().out
    predicted, _, measured = text.partition("measured:")
    assert "makespan 12 s, bubble 25.0 %" in predicted
    assert "makespan 36 s, bubble 25.0 %" in measured
    assert "step" not in text
    assert "measured: makespan 36 s" in (tmp_path / "run.svg").read_text("utf-8")


def test_the_time_to_change_weights_is_shown_of_a_run(capsys, tmp_path):
    plan = chained(one_f_one_b(2, 3))
    changed = [Span(Action(rank, Kind.STEP, 0), 40.0, 41.5) for rank in range(2)]
    spans = tuple((*mine, span) for mine, span in zip(simulate(plan).spans, changed, strict=True))
    Recording(plan, spans, Costs.even(2), Units(memory="activations")).write(tmp_path / "run.json")
    assert main(["plan", "--measured", str(tmp_path / "run.json")]) == 0
    predicted, _, measured = capsys.readouterr().out.partition("measured:")
    assert ", step 1.5 s\n" in measured
    assert "step" not in predicted


def test_what_is_planned_must_be_said(capsys):
    assert main(["plan", "--stages", "2"]) == 2
    assert "say --microbatches, or --measured" in capsys.readouterr().err
    assert main(["plan", "--measured", "/dev/null"]) == 2
    assert "/dev/null is no recording of a pipeline" in capsys.readouterr().err


@pytest.mark.slow
def test_ten_thousand_ranks_are_planned_checked_and_drawn_within_a_minute(capsys, tmp_path):
    path = tmp_path / "large.svg"
    begin = time.process_time()
    assert main(["plan", "--stages", "2500", "--replicas", "4", "--microbatches", "16", "--out", str(path)]) == 0
    assert time.process_time() - begin < 60
    assert capsys.readouterr().out.startswith("1f1b on 10000 ranks, 2500 stages, 64 microbatches: makespan 7545 units")
    assert path.stat().st_size < 1_000_000


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
