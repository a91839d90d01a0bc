from __future__ import annotations

import signal

import pytest

from coordd.launch.outcome import Outcome, signal_name


@pytest.mark.parametrize(
    ("outcome", "status", "text"),
    [
        (Outcome(), 0, "exited with code 0"),
        (Outcome(3), 3, "exited with code 3"),
        (Outcome(1, exception="ValueError: bad sample"), 1, "exited with code 1: ValueError: bad sample"),
        (Outcome(2, last="no such file"), 2, "exited with code 2; it said last: no such file"),
        (Outcome(signal=signal.SIGKILL), 137, "ended by SIGKILL"),
        (Outcome(signal=signal.SIGKILL, last="epoch 3"), 137, "ended by SIGKILL"),
        (
            Outcome(signal=signal.SIGSEGV, exception="Fatal Python error: x"),
            139,
            "ended by SIGSEGV: Fatal Python error: x",
        ),
    ],
)
def test_an_outcome_has_a_status_and_a_sentence(outcome, status, text):
    assert (outcome.status, outcome.text) == (status, text)
    assert outcome.failed == bool(status)


def test_a_real_time_signal_has_a_number_only():
    assert signal_name(40) == "signal 40"
