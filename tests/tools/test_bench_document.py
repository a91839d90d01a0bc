import json

from coordd_tools.bench import step
from coordd_tools.bench.blocks import Block
from coordd_tools.bench.document import SCHEMA, Document
from coordd_tools.bench.jobs import StepJob
from coordd_tools.bench.machine import machine, versions


def document():
    blocks = [(Block("gpt", engine, (wall,), wall),) for engine, wall in (("none", 0.1), ("ddp", 0.1))]
    return Document(
        command=["python", "-m", "coordd_tools.bench", "step", "--json", "a file"],
        started="2026-01-01T00:00:00+00:00",
        ranks=1,
        job=StepJob(engines=("none", "ddp"), rounds=1, seed=7, models=("gpt",), steps=2),
        launcher="mpirun (Open MPI) 5.0.11",
        machine=machine(),
        versions=versions(),
        report=step.report(blocks),
    )


def test_the_document_holds_all_that_is_needed_to_repeat_and_judge_the_run(tmp_path):
    path = tmp_path / "step.json"
    document().write(path)
    read = json.loads(path.read_text())
    assert set(read) == {
        *("schema", "bench", "command", "started", "ranks", "seed", "job", "launcher"),
        *("machine", "versions", "figures", "ratios"),
    }
    assert (read["schema"], read["bench"], read["seed"]) == (SCHEMA, "step", 7)
    assert read["command"].endswith("--json 'a file'")
    assert read["job"]["models"] == ["gpt"]
    assert {"host", "processor", "cores", "usable_threads", "busy_percent"} <= set(read["machine"])
    assert "python" in read["versions"]


def test_every_figure_has_its_spread_and_every_ratio_its_peer():
    read = document().plain()
    assert read["figures"][0] == {
        "subject": "gpt",
        "engine": "none",
        "name": "step_ms",
        "median": 100.0,
        "p10": 100.0,
        "p90": 100.0,
        "n": 1,
    }
    assert {"subject": "gpt", "engine": "ddp", "against": "none", "name": "step_ms", "value": 1.0} in read["ratios"]


def test_packages_that_are_not_installed_have_no_version():
    assert set(versions(("pytest", "no-such-package"))) == {"python", "pytest"}
