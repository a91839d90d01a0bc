from __future__ import annotations

import signal

import pytest

from coordd.launch.exit_status import Record, Verdict, judge
from coordd.launch.frames import Ended
from coordd.launch.outcome import Outcome

FINE = Outcome()
BAD = Outcome(3, exception="ValueError: bad sample")
PEER = Outcome(1, consequence=True, exception="PeerError: rank 1 raised ValueError: bad sample")
WHY = "RefusedError: rank 1 refused allreduce 'a' at x.py:3: no type"
REFUSED = Outcome(1, consequence=True, exception=f"coordd.errors.{WHY}")
KILLED = Outcome(signal=signal.SIGKILL)
TERMINATED = Outcome(signal=signal.SIGTERM, last="epoch 3")
LEFT = Outcome(left=True)
ABSENT = Outcome(absent=True)
DIED = Outcome(
    1, consequence=True, exception="coordd.errors.PeerError: rank 1 (pid 7 on a) died: its connection closed"
)
SILENT = Outcome(1, consequence=True, exception="PeerError: rank 0 (pid 7 on a) does not answer")
STOPPED = Outcome(signal=signal.SIGTERM, told=True)
ENTERING = STOPPED._replace(entering=True)
BOX = """\
--------------------------------------------------------------------------
MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD
  Proc: [[43381,1],1]
  Errorcode: 5

NOTE: invoking MPI_ABORT causes Open MPI to kill all MPI processes.
"""


def record(*ends: tuple[int, Outcome], size: int = 2, hosts: str = "aa", **more) -> Record:
    return Record(size, "Open MPI 5", dict(enumerate(hosts)), [Ended(*end) for end in ends], **more)


@pytest.mark.parametrize(
    ("seen", "status", "text"),
    [
        (record((1, FINE), (0, FINE)), 0, ""),
        (record((1, FINE), (0, FINE), status=1), 0, ""),
        (record((1, BAD), (0, FINE)), 3, "rank 1 exited with code 3: ValueError: bad sample"),
        (record((1, BAD), (0, FINE), hosts="ab"), 3, "rank 1 (host b) exited with code 3: ValueError: bad sample"),
        (record((0, PEER), (1, BAD)), 3, "rank 1 exited with code 3: ValueError: bad sample"),
        (record((0, PEER)), 1, "rank 1 raised ValueError: bad sample; rank 0 exited with code 1 because of that"),
        (record((0, REFUSED), (1, BAD)), 3, "rank 1 exited with code 3: ValueError: bad sample"),
        (
            record((0, REFUSED), (1, Outcome(1, consequence=True, exception=f"PeerError: rank 0 failed: {WHY}"))),
            1,
            "rank 1 refused allreduce 'a' at x.py:3: no type; rank 0 exited with code 1 because of that",
        ),
        (record((1, LEFT), (0, DIED)), 1, "rank 1 exited with code 0 but without shutdown(), as os._exit(0) does"),
        (record((0, LEFT), (1, LEFT), (2, DIED), size=3, hosts="aaa"), 1, "rank 1 exited with code 0 but without"),
        (record((1, LEFT), (0, STOPPED)), 1, "rank 1 exited with code 0 but without shutdown()"),
        (record((1, ABSENT), (0, STOPPED)), 143, "rank 0 ended by SIGTERM"),
        (
            record((1, ABSENT), (0, ENTERING)),
            1,
            "rank 1 exited with code 0 without calling init(), in which",
        ),
        (record((1, ABSENT), (0, ENTERING), stopped_by=signal.SIGTERM), 143, "ended by SIGTERM"),
        (record((1, ABSENT), (0, FINE), waiting={0}), 1, "rank 1 exited with code 0 without calling init(), in which"),
        (
            record((1, ABSENT), (0, KILLED._replace(entering=True))),
            1,
            "rank 1 exited with code 0 without calling init(), in which",
        ),
        (record((1, ABSENT), (0, KILLED)), 137, "rank 0 ended by SIGKILL"),
        (record((0, KILLED._replace(entering=True)), (1, ABSENT)), 137, "rank 0 ended by SIGKILL"),
        (record((1, ABSENT), (0, BAD)), 3, "rank 0 exited with code 3: ValueError: bad sample"),
        (record((1, ABSENT), (0, ABSENT)), 0, ""),
        (record((1, LEFT), (0, FINE)), 1, "rank 1 exited with code 0 but without shutdown()"),
        (record((1, LEFT), (0, BAD)), 3, "rank 0 exited with code 3: ValueError: bad sample"),
        (record((1, LEFT), (0, LEFT)), 0, ""),
        (record((1, SILENT), (0, STOPPED)), 1, "rank 0 (pid 7 on a) does not answer; rank 1 exited with code 1"),
        (record((0, STOPPED), (1, BAD)), 3, "rank 1 exited with code 3: ValueError: bad sample"),
        (record((0, STOPPED)), 143, "rank 0 ended by SIGTERM"),
        (record((0, BAD), (1, BAD)), 3, "rank 0 exited with code 3: ValueError: bad sample (rank 1 too)"),
        (
            record((2, BAD), (1, PEER), (0, BAD), (3, BAD), size=4, hosts="aaaa"),
            3,
            "rank 2 exited with code 3: ValueError: bad sample (ranks 0, 3 too)",
        ),
        (record((1, TERMINATED), (0, STOPPED)), 143, "rank 1 ended by SIGTERM"),
        (record((1, TERMINATED), (0, TERMINATED._replace(last="step 7"))), 143, "rank 1 ended by SIGTERM (rank 0 too)"),
        (
            record((0, STOPPED), (1, STOPPED), said=BOX.splitlines()),
            5,
            "rank 1 exited with code 5: it called MPI_Abort",
        ),
        (record(stopped_by=signal.SIGINT), 130, "interrupted"),
        (record((1, BAD), stopped_by=signal.SIGTERM), 143, "ended by SIGTERM"),
        (record((1, FINE), stopped_by=signal.SIGTERM), 143, "ended by SIGTERM"),
        (record((1, FINE), (0, STOPPED), stopped_by=signal.SIGTERM), 143, "ended by SIGTERM"),
        (record((1, FINE), (0, FINE), stopped_by=signal.SIGTERM), 0, "all ranks have ended in time, with exit code 0"),
        (record((1, FINE), (0, FINE), stopped_by=signal.SIGINT), 130, "interrupted"),
        (record(hosts="", status=213), 213, "Open MPI 5 exited with code 213 before any rank had started; what it"),
        (record(hosts="", status=0), 1, "Open MPI 5 exited with code 0 before any rank had started"),
        (record((0, FINE), status=-9), 137, "Open MPI 5 was ended by SIGKILL while rank 1 ran"),
        (record(status=-15), 143, "Open MPI 5 was ended by SIGTERM while ranks 0-1 ran"),
    ],
)
def test_the_cause_is_named_and_decides_the_exit_code(seen, status, text):
    verdict = judge(seen)
    assert verdict.status == status
    assert verdict.text.startswith(text)


def test_an_end_on_request_is_not_said_to_be_like_one_without():
    assert judge(record((1, TERMINATED), (0, STOPPED))).text == "rank 1 ended by SIGTERM"


def test_ranks_that_have_started_and_not_ended_are_known():
    assert record((1, FINE), size=4, hosts="aaa").running == [0, 2]


@pytest.mark.parametrize(
    ("ends", "waiting", "cannot"),
    [
        ([(1, ABSENT)], {0}, True),
        ([(1, ABSENT)], set(), False),
        ([(1, FINE)], {0}, False),
        ([], {0}, False),
    ],
)
def test_a_job_cannot_start_if_ranks_wait_in_init_for_one_that_has_ended_without(ends, waiting, cannot):
    assert record(*ends, waiting=waiting).cannot_start is cannot


def test_a_kill_from_nowhere_hints_at_memory_and_is_not_said_of_others():
    verdict = judge(record((1, KILLED), (0, KILLED)))
    assert verdict == Verdict(137, verdict.text)
    assert verdict.text.startswith("rank 1 ended by SIGKILL (if nobody sent it, the kernel did")
    assert "too" not in verdict.text


def test_a_rank_that_ends_before_init_is_named_beside_the_one_that_waits_for_it():
    alone = Outcome(1, exception="coordd.errors.StartError: the ranks did not find each other within 60 s")
    text = judge(record((1, FINE), (0, alone))).text
    assert text.endswith("within 60 s (rank 1 ended with exit code 0 without meeting the others)")


def test_a_script_that_wants_horovod_is_told_how_to_get_it():
    lost = Outcome(1, exception="ModuleNotFoundError: No module named 'horovod'")
    assert judge(record((0, lost))).text.endswith("(to run scripts of Horovod on coordd: coordd run --as-horovod)")
