"""All cases on real MPI ranks: one item per case and number of ranks, one ``mpirun`` per number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.mpi.cases import EVERY, Case, find
from tests.mpi.session import Sessions

pytestmark = pytest.mark.mpi

_CASES = find("tests.mpi", Path(__file__).parent)
_WAYS = {
    "memory": {},
    "network": {"COORDD_SHARED_MEMORY": "0"},
    "hosts": {"COORDD_SIMULATE_HOSTS": "2"},
}
"""How data travels: by default through memory; what is said of one way must hold on the others."""
_ON_OTHER_WAYS = {"network": (2,), "hosts": (4,)}
_ONE_WAY = ("transformers", "traces", "parity", "precision", "record", "saving", "split")
"""Cases that take long, or have nothing to do with how data travel, and of which one way must do."""
_LONG = {
    "network": ("pipeline_alike", "pipeline_buffers", "pipeline_layers", "pipeline_limits"),
    "hosts": ("pipeline", "pipeline_alike", "pipeline_limits"),
}
"""Cases of pipelines that take long on another way; shorter ones show that it carries what stages send."""


def _items() -> Iterator[ParameterSet]:
    for way in _WAYS:
        for size in sorted({size for case in _CASES for size in case.sizes}):
            for case in _CASES:
                wanted = way == "memory" or (size in _ON_OTHER_WAYS[way] and not case.module.endswith(_ONE_WAY))
                wanted |= way == "network" and case.sizes == EVERY
                if size in case.sizes and wanted:
                    marks = [pytest.mark.sweep] * _is_for_sweeps(way, size, case)
                    yield pytest.param(way, size, case, id=f"{case}-{size}-{way}", marks=marks)


def _is_for_sweeps(way: str, size: int, case: Case) -> bool:
    """Returns whether two ranks, or another way, show nearly the same in less time."""
    too_large = (way == "network" and size != 2) or (size > 2 and case.module.endswith("transformers"))
    return too_large or case.module.endswith(_LONG.get(way, ()))


@pytest.fixture(scope="module")
def sessions() -> Iterator[Sessions]:
    """Starts a session when its first case comes, and sees that all ranks leave in order at the end."""
    sessions = Sessions(_WAYS, framework="coordd.torch")
    yield sessions
    if problem := sessions.close():
        pytest.fail(problem, pytrace=False)


@pytest.mark.parametrize(("way", "size", "case"), list(_items()))
def test_case(sessions: Sessions, way: str, size: int, case: Case) -> None:
    """Passes on every rank."""
    if problem := sessions[way, size].run(case):
        pytest.fail(problem, pytrace=False)
