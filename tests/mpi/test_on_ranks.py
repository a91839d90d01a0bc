"""All cases on real MPI ranks: one item per case and number of ranks, one ``mpirun`` per number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mpi.cases import Case, find
from tests.mpi.session import Session

pytestmark = pytest.mark.mpi

_CASES = find("tests.mpi", Path(__file__).parent)
_ITEMS = [pytest.param(size, case, id=f"{case}-{size}") for case in _CASES for size in case.sizes]


@pytest.fixture(scope="module")
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """The ranks; pytest sorts the items by it, so that each number of ranks starts once."""
    session = Session(request.param, framework="coordd.torch")
    yield session
    if problem := session.close():
        pytest.fail(problem, pytrace=False)


@pytest.mark.parametrize(("session", "case"), _ITEMS, indirect=["session"])
def test_case(session: Session, case: Case) -> None:
    """Passes on every rank."""
    if problem := session.run(case):
        pytest.fail(problem, pytrace=False)
