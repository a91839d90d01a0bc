"""What is waited for: everything that was started, and the first error of it."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coordd_torch.pending import Underway


class Daemon:
    """Answers what was submitted when somebody is in a hurry for it, on another thread."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.entries: list[object] = []
        self.over = 0

    def submit(self, entry: object, *, lazy: bool) -> None:
        self.entries.append(entry)

    def hurry(self, _: str) -> Any:
        threading.Thread(target=lambda: [self.answer() for _ in self.entries]).start()
        return self.end

    def note_broken_wait(self) -> None:
        raise AssertionError

    def end(self) -> None:
        self.over += 1


def started(count: int, answer: Any) -> tuple[Underway, Daemon]:
    daemon = Daemon(lambda: answer(underway))
    underway = Underway(SimpleNamespace(daemon=daemon, check_in_step=lambda: None))  # type: ignore[arg-type]
    for entry in range(count):
        underway.submit(entry)  # type: ignore[arg-type]
    return underway, daemon


def test_all_of_it_is_waited_for():
    values: list[np.ndarray] = []
    underway, daemon = started(3, lambda to: to.land(np.ones(1), values.append))
    underway.settle()
    assert daemon.entries == [0, 1, 2]
    assert (len(values), daemon.over) == (3, 1)
    underway.settle()  # there is nothing to wait for
    assert daemon.over == 1


@pytest.mark.parametrize(
    "answer", [lambda to: to.fail(ZeroDivisionError()), lambda to: to.land(np.ones(1), lambda _: 1 / 0)]
)
def test_an_error_is_raised_once_when_all_is_done(answer):
    underway, daemon = started(2, answer)
    with pytest.raises(ZeroDivisionError):
        underway.settle()
    assert daemon.over == 1
    underway.settle()


def test_the_first_error_is_the_one_that_is_told():
    first = ValueError("first")
    underway, _ = started(0, None)
    for error in (first, ValueError("second")):
        underway.fail(error)
    assert underway.failed is first
