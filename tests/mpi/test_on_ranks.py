"""All cases on real MPI ranks: one item per case and number of ranks, one ``mpirun`` per number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.mpi.cases import Case, find
from tests.mpi.session import Session

pytestmark = pytest.mark.mpi

_CASES = find("tests.mpi", Path(__file__).parent)
_SIZES = sorted({size for case in _CASES for size in case.sizes})
_ITEMS = [pytest.param(size, case, id=f"{case}-{size}") for size in _SIZES for case in _CASES if size in case.sizes]


class _Sessions(dict[int, Session]):
    """Sessions by number of ranks."""

    def __missing__(self, size: int) -> Session:
        self[size] = Session(size, framework="coordd.torch")
        return self[size]


@pytest.fixture(scope="module")
def sessions() -> Iterator[Mapping[int, Session]]:
    """Starts a session when its first case comes, and sees that all ranks leave in order at the end."""
    sessions = _Sessions()
    yield sessions
    if problem := "\n\n".join(filter(None, [session.close() for session in sessions.values()])):
        pytest.fail(problem, pytrace=False)


@pytest.mark.parametrize(("size", "case"), _ITEMS)
def test_case(sessions: Mapping[int, Session], size: int, case: Case) -> None:
    """Passes on every rank."""
    if problem := sessions[size].run(case):
        pytest.fail(problem, pytrace=False)
