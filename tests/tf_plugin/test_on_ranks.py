"""The cases of TensorFlow on real MPI ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mpi.cases import Case, find
from tests.mpi.session import Sessions

pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install 'coordd[tensorflow]'")
pytestmark = pytest.mark.mpi

_CASES = find("tests.tf_plugin", Path(__file__).parent)
_SETTINGS = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


def _is_for_sweeps(size: int, case: Case) -> bool:
    """Returns whether two ranks show the same in less time."""
    return size == 4 and case.module.endswith("cases_consistency")


_ITEMS = [
    pytest.param(size, case, id=f"{case}-{size}", marks=[pytest.mark.sweep] * _is_for_sweeps(size, case))
    for size in sorted({size for case in _CASES for size in case.sizes})
    for case in _CASES
    if size in case.sizes
]


@pytest.fixture(scope="module")
def sessions() -> Iterator[Sessions]:
    """Starts a session when its first case comes, and sees that all ranks leave in order at the end."""
    sessions = Sessions({"": _SETTINGS}, framework="coordd.tensorflow")
    yield sessions
    if problem := sessions.close():
        pytest.fail(problem, pytrace=False)


@pytest.mark.parametrize(("size", "case"), _ITEMS)
def test_case(sessions: Sessions, size: int, case: Case) -> None:
    """Passes on every rank."""
    if problem := sessions["", size].run(case):
        pytest.fail(problem, pytrace=False)
