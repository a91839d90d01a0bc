from __future__ import annotations

import argparse
import json

import pytest

from coordd.launch import doctor as module
from coordd.launch.checkup import checkup
from coordd.launch.doctor import doctor
from coordd.launch.finding import Finding, Health
from tests.launch.test_run import open_mpi

FINE = Finding("Python", "3.11 [at] /usr")
NOTE = Finding.note("frameworks", "none", "pip install torch")
BAD = Finding.problem("self-test", "failed", "look [here]")


@pytest.mark.parametrize(("findings", "status"), [([FINE], 0), ([FINE, NOTE], 0), ([FINE, BAD, NOTE], 1)])
def test_only_a_problem_makes_it_fail(monkeypatch, capsys, findings, status):
    monkeypatch.setattr(module, "checkup", lambda: iter(findings))
    assert doctor(argparse.Namespace(json=False)) == status
    shown = capsys.readouterr().out
    for finding in findings:
        assert finding.found in shown
        assert finding.advice in shown
    assert ("All is well." in shown) == (status == 0)


def test_no_line_is_folded_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    path, advice = "/long" * 800, "do this " * 50 + "last"
    monkeypatch.setattr(module, "checkup", lambda: iter([FINE, Finding.note("coordd", path, advice)]))
    doctor(argparse.Namespace(json=False))
    shown = capsys.readouterr().out
    assert path in shown
    assert advice in shown


def test_programs_get_json(monkeypatch, capsys):
    monkeypatch.setattr(module, "checkup", lambda: iter([FINE, BAD]))
    assert doctor(argparse.Namespace(json=True)) == 1
    assert json.loads(capsys.readouterr().out) == {
        "healthy": False,
        "findings": [
            {"what": "Python", "found": "3.11 [at] /usr", "health": "good", "advice": ""},
            {"what": "self-test", "found": "failed", "health": "problem", "advice": "look [here]"},
        ],
    }


@pytest.mark.mpi
@pytest.mark.skipif(not open_mpi(), reason="there is no Open MPI here")
def test_this_machine_is_healthy():
    problems = [finding for finding in checkup() if finding.health is Health.PROBLEM]
    assert problems == []
