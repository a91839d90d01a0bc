"""Steps that end by an error while others wait for their gradients."""

import threading
import unittest.mock
from typing import Any

from coordd_tensorflow import unfinished
from tests.mpi.cases import ranks


@ranks(2)
def case_a_step_is_given_up_when_all_calls_that_may_run_it_have_ended() -> None:
    """One is of the thread that trains, the other evaluates; which is which TensorFlow does not tell."""
    made: dict[str, Any] = {}
    code = "def quick_execute(entered, leave):\n entered.set()\n leave.wait(60)"
    exec(compile(code, unfinished._FILE, "exec"), made)  # noqa: S102 - a function with the name and the file of TensorFlow's
    entered, leave = [threading.Event() for _ in range(2)], [threading.Event() for _ in range(2)]
    threads = [threading.Thread(target=made["quick_execute"], args=pair) for pair in zip(entered, leave, strict=True)]
    for thread, event in zip(threads, entered, strict=True):
        thread.start()
        assert event.wait(60)
    gradients, given_up, looked = unittest.mock.Mock(), threading.Event(), threading.Semaphore(0)
    gradients.give_up.side_effect = lambda _: given_up.set()

    def contains(*call: Any) -> bool:
        looked.release()
        return usual(*call)

    usual = unfinished._contains
    with unittest.mock.patch.multiple(unfinished, _contains=contains, _LOOK_SECONDS=0.001):
        watched = unfinished.Unfinished()
        watched.begin(gradients, 1)
        leave[0].set()
        threads[0].join(60)
        for _ in range(9):
            assert looked.acquire(timeout=60)
        gradients.give_up.assert_not_called()
        leave[1].set()
        assert given_up.wait(60)
    gradients.give_up.assert_called_once_with(1)
