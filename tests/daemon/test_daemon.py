"""The daemon under use and misuse, on ranks that are threads."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
import traceback

import numpy as np
import pytest

from coordd import api
from coordd.config import Config
from coordd.daemon.daemon import Daemon
from coordd.daemon.rendezvous import local_world
from coordd.errors import ConfigError, DuplicateNameError, NotInitializedError, PeerError, ShutdownError, StartError
from coordd.ops.messages import ReduceOp
from tests.local_ranks import LocalRanks, each_rank, local_ranks

WAIT = 10.0
HERE = re.escape(__file__)


def start(name: str | None = None, *, value: float = 1.0):
    return api.operations().allreduce(np.full(2, value), name=name, op=ReduceOp.SUM)


@pytest.fixture
def ranks():
    with local_ranks(3) as found:
        yield found


def test_a_name_in_flight_cannot_be_used_again_until_it_has_landed(ranks):
    def body(rank):
        if rank == 0:
            first = start("w")
            with pytest.raises(DuplicateNameError) as caught:
                start("w")
            assert isinstance(caught.value, ValueError)  # as Horovod's
            api.operations().barrier().result(WAIT)
            assert first.result(WAIT).tolist() == [3.0, 3.0]
            text = rf"'w', submitted at {HERE}:\d+, is still in flight from {HERE}:\d+; wait for the first one"
            assert re.search(text, str(caught.value))
        else:
            api.operations().barrier().result(WAIT)
            assert start("w").result(WAIT).tolist() == [3.0, 3.0]
        return start("w").result(WAIT).tolist()

    assert ranks.each(body) == [[3.0, 3.0]] * 3


def test_threads_of_one_rank_may_submit_at_once(ranks):
    """Eight threads, a thousand submissions each, against a rank that submits in another order."""
    names = [f"{thread}.{number}" for thread in range(8) for number in range(1000)]

    def submit(daemon: Daemon, thread: int, found: dict) -> None:
        with api.using(daemon):
            for number in range(1000):
                found[f"{thread}.{number}"] = start(f"{thread}.{number}", value=float(number))

    def body(rank):
        handles: dict = {}
        if rank == 0:
            handles = {name: start(name, value=float(name.partition(".")[2])) for name in reversed(names)}
        else:
            arguments = [(ranks.daemons[rank], thread, handles) for thread in range(8)]
            threads = [threading.Thread(target=submit, args=each, daemon=True) for each in arguments]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT)
        for name in names:
            assert handles[name].result(WAIT)[0] == 3.0 * float(name.partition(".")[2])

    ranks.each(body)


def test_threads_may_wait_for_one_handle_and_wait_alone(ranks):
    def body(rank):
        handle = start("w")
        found = []
        threads = [threading.Thread(target=lambda: found.append(handle.result(WAIT)), daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
        return len(found)

    assert ranks.each(body) == [4] * 3


def test_a_callback_may_submit(ranks):
    def body(rank):
        ended, numbers = threading.Event(), []
        ops = api.operations()

        def again(handle):
            numbers.append(int(handle.result()[0]))
            if len(numbers) == 50:
                ended.set()
                return
            ops.allreduce(np.full(1, len(numbers)), name=f"chain{len(numbers)}", op=ReduceOp.SUM).add_done_callback(
                again
            )

        ops.allreduce(np.zeros(1, int), name="chain0", op=ReduceOp.SUM).add_done_callback(again)
        assert ended.wait(WAIT)
        return numbers

    assert ranks.each(body) == [[3 * number for number in range(50)]] * 3


def test_a_callback_that_raises_harms_nobody(ranks, caplog):
    def body(rank):
        handle = start("w")
        if rank == 1:
            handle.add_done_callback(lambda _: 1 / 0)
        handle.result(WAIT)
        return start("w").result(WAIT).tolist()

    assert ranks.each(body) == [[3.0, 3.0]] * 3
    assert "a callback of 'w' failed" in caplog.text


def test_handles_that_nobody_keeps_still_land(ranks):
    def body(rank):
        array = np.ones(3)
        api.operations().allreduce(array, name="dropped", op=ReduceOp.SUM)
        gc.collect()
        api.operations().barrier().result(WAIT)
        return start("w").result(WAIT) is not None and array.tolist()

    assert ranks.each(body) == [[3.0] * 3] * 3


def test_nothing_is_kept_of_what_has_landed():
    with local_ranks(2) as ranks:
        ranks.each(lambda rank: [start("w").result(WAIT) for _ in range(10)])
        gc.collect()
        before = len(gc.get_objects())
        ranks.each(lambda rank: [start("w").result(WAIT) for _ in range(500)])
        gc.collect()
        assert len(gc.get_objects()) - before < 500


def test_an_error_on_one_rank_reaches_those_who_wait_with_its_traceback(ranks):
    def body(rank):
        if rank == 2:
            try:
                raise KeyError("lost")  # noqa: TRY301 - it is to have a traceback
            except KeyError as error:
                ranks.daemons[2].fail("failed: KeyError: 'lost'", traceback.format_exc())
                return error
        with pytest.raises(PeerError) as caught:
            start("w").result(WAIT)
        return caught.value

    first, second, _ = ranks.each(body)
    for error in (first, second):
        assert (error.rank, str(error)) == (2, "rank 2 failed: KeyError: 'lost'")
        assert 'raise KeyError("lost")' in str(error.__cause__)


def test_after_a_failure_every_use_raises_the_same_cause(ranks):
    def body(rank):
        if rank == 0:
            ranks.daemons[0].fail("failed: on purpose")
        for _ in range(3):
            with pytest.raises(PeerError, match="rank 0 failed: on purpose"):
                start().result(WAIT)
            with pytest.raises(PeerError, match="rank 0 failed: on purpose"):
                api.operations().send(np.ones(1), rank, name="x").result(WAIT)
        assert not ranks.daemons[rank].stop()

    ranks.each(body)


def test_one_of_several_failures_is_blamed_for_all(ranks):
    def body(rank):
        if rank:
            ranks.daemons[rank].fail(f"failed: {rank}")
            ranks.daemons[rank].fail("failed: again")
        return ranks.daemons[rank].blame(WAIT)

    failure, *_ = ranks.each(body)
    assert failure.rank in {1, 2}
    assert failure.reason == f"failed: {failure.rank}"


def test_who_leaves_early_fails_what_the_others_wait_for(ranks):
    def body(rank):
        assert start("w").result(WAIT).tolist() == [3.0, 3.0]
        if rank == 1:
            return ranks.daemons[1].stop()
        with pytest.raises(ShutdownError) as caught:
            start("w").result(WAIT)
        assert 1 in caught.value.ranks  # and rank 0, where it has been told and has left before rank 2 asks
        assert "'w'" in str(caught.value)
        return ranks.daemons[rank].stop()

    assert ranks.each(body) == [True] * 3


def test_what_all_have_agreed_on_lands_before_they_leave():
    def body(rank):
        handles = [start(f"{number}") for number in range(100)]
        api.operations().barrier().result(WAIT)
        return handles

    for mine in each_rank(3, body):
        assert [handle.result(0.0).tolist() for handle in mine] == [[3.0, 3.0]] * 100


def test_after_leaving_nothing_can_be_submitted():
    with local_ranks(1) as ranks:
        ranks.each(lambda rank: start("w"))
    with api.using(ranks.daemons[0]), pytest.raises(NotInitializedError):
        start("w")
    assert ranks.daemons[0].stop()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ([{}, {"fusion_mb": 1.0}, {}], "different settings (ranks 0, 2: the defaults; ranks 1: fusion_mb=1.0)"),
        ([{"cycle_ms": 0.0}, {}, {}], "different settings (ranks 0: cycle_ms=0.0; ranks 1-2: the defaults)"),
    ],
)
def test_ranks_that_do_not_fit_together_do_not_start(settings, text):
    daemons = [Daemon(Config(**each), way) for each, way in zip(settings, local_world(3), strict=True)]
    ranks = LocalRanks(daemons)

    def body(rank):
        with pytest.raises(StartError, match=re.escape(text)):
            daemons[rank].start()
        assert daemons[rank].status.ended.is_set()  # so that it uses nothing any more that the interpreter may end

    ranks.each(body)


def test_settings_that_concern_one_rank_may_differ():
    cores = os.sched_getaffinity(0)
    own = {"log_level": "info"}, {"log_level": "error", "daemon_cores": str(min(cores))}
    ranks = LocalRanks([Daemon(Config(**each), way) for each, way in zip(own, local_world(2), strict=True)])
    ranks.start()
    ranks.stop()


def test_a_daemon_runs_where_it_is_told():
    cores = os.sched_getaffinity(0)
    daemon = Daemon(Config(daemon_cores=str(max(cores))), local_world(1)[0])
    daemon.start()
    assert os.sched_getaffinity(daemon._thread.native_id) == {max(cores)}
    assert os.sched_getaffinity(0) == cores
    daemon.stop()


def test_a_daemon_that_is_told_nonsense_does_not_start():
    daemon = Daemon(Config(daemon_cores="9999"), local_world(1)[0])
    with pytest.raises(ConfigError, match="give processors that this process may use"):
        daemon.start()


def test_ranks_that_do_not_come_are_not_waited_for_for_ever():
    daemon = Daemon(Config(start_seconds=0.1), local_world(2)[0])
    with pytest.raises(StartError, match=r"did not find each other within 0.1 s \(start_seconds\)"):
        daemon.start()
    assert daemon.end(WAIT)


def test_a_way_that_fails_is_told_to_who_starts():
    def nowhere(wake):
        raise StartError("no way")

    with pytest.raises(StartError, match="no way"):
        Daemon(Config(), nowhere).start()


class Net:
    """A lane that breaks at the first look."""

    tags = 1 << 20

    def isend(self, array, destination, tag):
        return None

    irecv = isend

    def done(self, tickets):
        raise OSError("the cable is out")

    def cancel(self, ticket):
        pass


def reduce_over(ranks, lane, *, error):
    """Has rank 1 reduce over this lane, and expects the error on all ranks."""
    plane = ranks.daemons[1]._loop._flights._plane
    plane._commons, plane.lane = None, lane

    def body(rank):
        with pytest.raises(PeerError, match=error):
            start("w").result(WAIT)

    ranks.each(body)


def test_an_error_inside_the_daemon_reaches_every_rank(ranks, caplog):
    reduce_over(ranks, Net(), error="rank 1 failed in its daemon: OSError: the cable is out")
    assert "the daemon of rank 1 failed" in caplog.text


def test_an_error_inside_the_daemon_that_another_rank_has_caused_names_that_rank(ranks, caplog):
    """The memory of a neighbour that has just been killed cannot be mapped, and other ranks report the death."""

    class Gone(Net):
        def done(self, tickets):
            ranks.daemons[0].fail("was killed")
            raise OSError("no such process")

    reduce_over(ranks, Gone(), error="rank 0 was killed")
    assert "the daemon of rank" not in caplog.text


def test_an_idle_daemon_uses_no_cpu():
    with local_ranks(2) as ranks:
        ranks.each(lambda rank: start("w").result(WAIT))
        used, pause = time.process_time(), threading.Event()
        pause.wait(0.5)
        assert time.process_time() - used < 0.1


def test_a_rank_that_waits_for_another_uses_little_cpu():
    with local_ranks(2) as ranks:

        def body(rank):
            if rank == 1:
                used, pause = time.process_time(), threading.Event()
                pause.wait(0.5)
                used = time.process_time() - used
                start("w").result(WAIT)
                return used
            start("w").result(WAIT)
            return 0.0

        assert ranks.each(body)[1] < 0.1


@pytest.mark.parametrize("kind", ["entry", "letter"])
def test_what_is_submitted_at_the_very_end_is_not_forgotten(monkeypatch, kind):
    """A thread of the user's has just been told that the daemon runs when another one stops it."""
    with local_ranks(1) as ranks:
        (daemon,) = ranks.daemons
        check = daemon._check_usable
        monkeypatch.setattr(daemon, "_check_usable", lambda: [check(), daemon.stop(), daemon.end(WAIT)])
        with api.using(daemon):
            handle = start("w") if kind == "entry" else api.operations().recv(None, 0, name="w")
        with pytest.raises(ShutdownError):
            handle.result(WAIT / 10)


def test_the_batching_window_delays_nobody_who_waits():
    def body(rank):
        since = time.monotonic()
        for _ in range(20):
            start("w").result(WAIT)
        return time.monotonic() - since

    assert max(each_rank(2, body, cycle_ms=10_000.0)) < 5.0


def test_a_rank_may_submit_without_ever_waiting():
    def body(rank):
        landed = threading.Event()
        start("w").add_done_callback(lambda _: landed.set())
        assert landed.wait(WAIT)

    each_rank(2, body, cycle_ms=5.0)


@pytest.fixture
def fast_switches():
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


def test_every_operation_ends_whenever_the_others_leave(fast_switches):
    """Submissions race with a rank that leaves: each is done, failed or refused, and none is forgotten."""

    def body(rank):
        handles = []

        def go_on():
            for number in range(100_000):
                handles.append(start(str(number)))
                if handles[0].poll():
                    handles[0].result()

        if rank == 0:
            with pytest.raises((ShutdownError, NotInitializedError)):
                go_on()
        left = api.operations().daemon.stop()
        return left and all(handle.wait(WAIT) for handle in handles)

    for _ in range(10):
        assert each_rank(2, body) == [True, True]
