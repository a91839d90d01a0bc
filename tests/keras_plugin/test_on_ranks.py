"""The cases of Keras on real MPI ranks: on each backend, and on ranks with different ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mpi.cases import Case, find
from tests.mpi.session import Sessions

pytest.importorskip("keras", reason="Keras is not installed: pip install 'coordd[tensorflow]'")
pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install 'coordd[tensorflow]'")
pytestmark = pytest.mark.mpi

_CASES = find("tests.keras_plugin", Path(__file__).parent)
_SETTINGS = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
_WAYS = {
    "tensorflow": _SETTINGS | {"KERAS_BACKEND": "tensorflow"},
    "torch": _SETTINGS | {"KERAS_BACKEND": "torch"},
    "mixed": _SETTINGS | {"TEST_KERAS_BACKENDS": "tensorflow,torch"},
}
_SIZES = {"tensorflow": (1, 2), "torch": (1, 2), "mixed": (2, 4)}
_FIT_ON_MIXED_BACKENDS = ("fit_equals_one_process_with_all_batches", "sparse_gradients_beside_dense_ones_train_alike")


def _tells_more(way: str, size: int, case: Case) -> bool:
    """Says whether a case is about what is different there; more would add nothing but minutes."""
    if case.module.endswith("cases_pipeline_fit"):
        return way != "mixed"
    if case.module.endswith("cases_pipeline"):
        return way != "mixed" or size == max(case.sizes)
    return size < 4


def _is_for_sweeps(way: str, case: Case) -> bool:
    """Returns whether each backend shows nearly the same as ranks with different ones."""
    fit = case.module.endswith("cases_fit")
    return way == "mixed" and fit and not case.name.endswith(_FIT_ON_MIXED_BACKENDS)


_ITEMS = [
    pytest.param(way, size, case, id=f"{case}-{size}-{way}", marks=[pytest.mark.sweep] * _is_for_sweeps(way, case))
    for way, sizes in _SIZES.items()
    for size in sizes
    for case in _CASES
    if size in case.sizes and _tells_more(way, size, case)
]


@pytest.fixture(scope="module")
def sessions() -> Iterator[Sessions]:
    """Starts a session when its first case comes, and sees that all ranks leave in order at the end."""
    sessions = Sessions(_WAYS, framework="coordd.api")
    yield sessions
    if problem := sessions.close():
        pytest.fail(problem, pytrace=False)


@pytest.mark.parametrize(("way", "size", "case"), _ITEMS)
def test_case(sessions: Sessions, way: str, size: int, case: Case) -> None:
    """Passes on every rank."""
    if problem := sessions[way, size].run(case):
        pytest.fail(problem, pytrace=False)
