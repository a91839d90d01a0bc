from __future__ import annotations

import sys

import pytest

from coordd.launch import checkup
from coordd.launch.finding import Finding, Health

GOOD = {"vendor": "Open MPI", "version": "5.0.11", "threads": "multiple", "ulfm": True}


def told(findings: list[Finding]) -> dict[str, tuple[str, str]]:
    return {finding.what: (finding.health.value, finding.found) for finding in findings}


def test_a_good_library_is_good():
    assert told(checkup.judged(GOOD, "Open MPI")) == {
        "MPI library": ("good", "Open MPI 5.0.11"),
        "thread level": ("good", "multiple"),
        "fault tolerance": ("good", "ULFM"),
    }


@pytest.mark.parametrize(
    ("change", "what", "health", "advice"),
    [
        ({"vendor": "MPICH"}, "MPI library", "problem", "the ranks would not find each other"),
        ({"threads": "single"}, "thread level", "problem", "built with thread support"),
        ({"ulfm": False}, "fault tolerance", "note", "always ends the job"),
    ],
)
def test_each_weakness_comes_with_advice(change, what, health, advice):
    findings = {finding.what: finding for finding in checkup.judged(GOOD | change, "Open MPI")}
    assert findings.pop(what).health.value == health
    assert all(finding.health is Health.GOOD for finding in findings.values())
    assert any(advice in finding.advice for finding in checkup.judged(GOOD | change, "Open MPI"))


def test_a_library_of_another_name_may_still_fit():
    assert told(checkup.judged(GOOD | {"vendor": "Cray MPICH"}, "MPICH"))["MPI library"][0] == "good"


def test_without_mpi4py_it_says_what_to_install():
    (finding,) = checkup.library(None, "Open MPI")
    assert finding.health is Health.PROBLEM
    assert "pip install" in finding.advice


def test_a_library_that_does_not_start_is_a_problem_in_its_own_words(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (finding,) = checkup.library("4.1.2", "Open MPI")
    assert finding.found == "4.1.2, which cannot start MPI: it said nothing"


def test_frameworks_are_found_without_importing_them():
    assert told(checkup.frameworks({"PyTorch": "2.13.0", "Keras": None})) == {"PyTorch": ("good", "2.13.0")}
    assert checkup.frameworks({"PyTorch": None})[0].health is Health.NOTE


@pytest.mark.parametrize(("free", "health"), [(None, "note"), (64 << 20, "problem"), (1 << 30, "good")])
def test_shared_memory_has_to_suffice(free, health):
    finding = checkup.shared_memory(free)
    assert finding.health.value == health
    assert bool(finding.advice) == (health != "good")


def test_cores_and_memory_are_counted():
    assert "hardware thread" in checkup.cores().found
    assert "GiB free of" in checkup.memory().found


def test_a_failed_self_test_is_told_by_its_last_line(monkeypatch):
    monkeypatch.setattr(checkup, "_ask", lambda _: (3, "coordd: 2 ranks\ncoordd: rank 1 exited with code 3\n", 1.0))
    finding = checkup.selftest()
    assert finding.found == "failed with code 3: coordd: rank 1 exited with code 3"
    monkeypatch.setattr(checkup, "_ask", lambda _: (0, "2 ranks agree\n", 1.25))
    assert checkup.selftest() == Finding("self-test", "2 ranks agree (1.2 s)")


def test_who_does_not_answer_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(checkup, "_PATIENCE", 0.05)
    assert checkup._ask(["-c", "import signal; signal.pause()"])[:2] == (124, "no answer within 0.05 s")
