"""The cases on real MPI ranks, with every plugin; one ``mpirun`` a plugin."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.contract.plugin import ADAPTER
from tests.mpi.cases import Case, find
from tests.mpi.session import Session

pytestmark = pytest.mark.mpi

_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class _Way:
    """An adapter, what must be installed for it, and the variables of its ranks."""

    adapter: str
    needs: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)


_WAYS = {
    "toygrad": _Way("tests.contract.adapters.toygrad"),
    "torch": _Way("tests.contract.adapters.torch", ("torch",)),
    "tensorflow": _Way("tests.contract.adapters.tensorflow", ("tensorflow",), _QUIET),
    "keras-on-tensorflow": _Way(
        "tests.contract.adapters.keras", ("tensorflow", "keras"), _QUIET | {"KERAS_BACKEND": "tensorflow"}
    ),
    "keras-on-torch": _Way("tests.contract.adapters.keras", ("torch", "keras"), _QUIET | {"KERAS_BACKEND": "torch"}),
}
if stranger := os.environ.get(ADAPTER):
    _WAYS = {stranger: _Way(stranger)}
_NAMES = {
    "torch": ("PyTorch", "torch"),
    "tensorflow": ("TensorFlow", "tensorflow"),
    "keras": ("Keras", "tensorflow"),
}
"""What modules are called, and the extra by which they are installed."""


@pytest.fixture(scope="module", params=_WAYS)
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """Starts the ranks of a plugin with the first case, and sees that they leave in order after the last."""
    way = _WAYS[request.param]
    for module in way.needs:
        if importlib.util.find_spec(module) is None:
            name, extra = _NAMES[module]
            pytest.skip(f"{name} is not installed: pip install 'coordd[{extra}]'")
    session = Session(2, framework="tests.contract.plugin", settings=way.settings | {ADAPTER: way.adapter})
    yield session
    if problem := session.close():
        pytest.fail(problem, pytrace=False)


@pytest.mark.parametrize("case", find("tests.contract", Path(__file__).parent), ids=str)
def test_case(session: Session, case: Case) -> None:
    """Passes on both ranks."""
    if problem := session.run(case):
        pytest.fail(problem, pytrace=False)
