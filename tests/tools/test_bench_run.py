"""The real thing, on MPI ranks, as short as can be."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.slow]


def bench(*arguments, ranks=2):
    command = [sys.executable, "-m", "coordd_tools.bench", *arguments, "--quick", "-n", str(ranks)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_step_measures_exchanges_over_the_floor(tmp_path):
    found = tmp_path / "step.json"
    ran = bench("step", "--models", "small", "--engines", "none,ddp,sketch", "--json", str(found))
    assert ran.returncode == 0, ran.stderr
    figures = {(f["engine"], f["name"]): f for f in json.loads(found.read_text())["figures"]}
    assert set(figures) == {
        *(("none", "step_ms"), ("none", "cpu_ms")),
        *((engine, name) for engine in ("ddp", "sketch") for name in ("step_ms", "cpu_ms", "overhead_ms")),
    }
    assert all(figure["n"] == 2 for figure in figures.values())
    assert figures["none", "step_ms"]["median"] > 0
    assert "small" in ran.stdout


def test_allreduce_measures_gloo_beside_mpi(tmp_path):
    found = tmp_path / "allreduce.json"
    ran = bench("allreduce", "--sizes", "4,64K", "--engines", "gloo,mpi", "--json", str(found))
    assert ran.returncode == 0, ran.stderr
    figures = [f for f in json.loads(found.read_text())["figures"] if f["name"] == "call_us"]
    assert [(f["subject"], f["engine"]) for f in figures] == [
        *(("4", "gloo"), ("4", "mpi")),
        *(("65536", "gloo"), ("65536", "mpi")),
    ]
    assert all(f["median"] > 0 for f in figures)


def test_sets_measures_one_set_beside_another_that_is_idle_or_waits(tmp_path):
    found = tmp_path / "sets.json"
    ran = bench("sets", "--json", str(found), ranks=4)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(found.read_text())
    figures = [f for f in report["figures"] if f["name"] == "calls_per_second"]
    assert [(f["subject"], f["engine"]) for f in figures] == [
        *(("4", "idle"), ("4", "stalled")),
        *(("4194304", "idle"), ("4194304", "stalled")),
    ]
    assert all(f["median"] > 0 and f["n"] == 2 for f in figures)
    assert [ratio["engine"] for ratio in report["ratios"]] == ["stalled"] * 2


def test_pipeline_measures_times_and_memory_of_the_same_training(tmp_path):
    found = tmp_path / "pipeline.json"
    ran = bench("pipeline", "--microbatches", "2", "--engines", "zb-h1,torch-1f1b", "--json", str(found))
    assert ran.returncode == 0, ran.stderr
    report = json.loads(found.read_text())
    figures = {(f["engine"], f["name"]): f["median"] for f in report["figures"]}
    memory = [(engine, name) for engine in ("zb-h1", "torch-1f1b") for name in ("extra_mib", "allocated_mib")]
    times = [(engine, "step_ms") for engine in ("zb-h1", "torch-1f1b")]
    assert all(figures[key] > 0 for key in (*memory, *times))
    assert {(ratio["engine"], ratio["name"]) for ratio in report["ratios"]} >= {
        ("zb-h1", "step_ms"),
        ("zb-h1", "extra_mib"),
        ("zb-h1", "allocated_mib"),
    }
