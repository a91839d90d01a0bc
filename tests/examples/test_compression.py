"""The digits are recognised, too, when a fraction of the bytes travels; the transport is asked how many those are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mpi.launch import launch

pytestmark = pytest.mark.mpi

_DIGITS = Path(__file__).resolve().parents[2] / "examples" / "pytorch" / "digits.py"

# Runs the script with a lane that counts all that leaves this rank for another, whatever it is.
_COUNTING = """
import runpy, sys
from mpi4py import MPI
import coordd.transport.mpi as mpi

sent = 0

def counting(isend):
    def count(lane, array, destination, tag):
        global sent
        sent += array.nbytes
        return isend(lane, array, destination, tag)
    return count

mpi.MpiLane.isend = counting(mpi.MpiLane.isend)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print("bytes sent:", sent)
"""


def _train(compression: str) -> tuple[float, float, int]:
    """Returns the accuracy in percent, the ratio that the compressor reports, and the most bytes that a rank sent."""
    arguments = (str(_DIGITS), "--compression", compression)
    network = {"COORDD_SHARED_MEMORY": "0"}
    outcome = launch(2, _COUNTING, *arguments, launcher="coordd", timeout=100, variables=network)
    assert outcome.returncode == 0, str(outcome)
    sent = [int(count) for count in re.findall(r"bytes sent: (\d+)", outcome.stdout)]
    assert len(sent) == 2, str(outcome)
    accuracy = float(re.search(r"test accuracy ([\d.]+)%", outcome.stdout)[1])
    saved = re.search(r"([\d.]+) times fewer bytes", outcome.stdout)
    return accuracy, float(saved[1]) if saved else 1.0, max(sent)


@pytest.fixture(scope="module")
def plain() -> int:
    """Bytes that a rank sends without compression."""
    accuracy, ratio, sent = _train("none")
    assert accuracy >= 97
    assert ratio == 1.0
    return sent


@pytest.mark.slow
@pytest.mark.parametrize(("compression", "least"), [("powersgd", 8.0), ("topk", 8.0), ("int8", 3.8)])
def test_digits_are_recognised_with_fewer_bytes_on_the_wire(compression: str, least: float, plain: int) -> None:
    accuracy, ratio, sent = _train(compression)
    assert accuracy >= 97
    assert plain / sent >= least
    assert ratio >= least
