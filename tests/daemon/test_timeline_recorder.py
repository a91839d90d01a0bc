from __future__ import annotations

import pytest

from coordd.daemon.timeline_recorder import Recorder
from coordd.host.world import World
from coordd.monitoring.timeline.trace import Trace
from coordd.ops.messages import Goodbye, Ping, Pong, Recording


@pytest.fixture
def sent():
    return []


@pytest.fixture
def make(sent):
    made = []

    def recorder(rank=1, hosts=("a", "a")):
        found = Recorder()
        found.connect(sent.append, lambda rank, message: sent.append((rank, message)), parent=0)
        found.enter(World(rank, hosts), tuple(range(100, 100 + len(hosts))))
        made.append(found)
        return found

    yield recorder
    for found in made:
        found.close()


def test_the_first_to_say_so_tells_the_others(make, tmp_path):
    recorder = make()
    assert recorder.call(str(tmp_path), cycles=True) == Recording(1, str(tmp_path), cycles=True)
    assert recorder.deck.tape.cycles
    assert recorder.call("", cycles=False) == Recording(2)
    assert recorder.deck.tape is None


def test_saying_what_was_heard_before_changes_nothing(make, tmp_path):
    recorder = make()
    assert recorder.hear(Recording(1, str(tmp_path)))
    tape = recorder.deck.tape
    assert recorder.call(str(tmp_path), cycles=False) is None
    assert not recorder.hear(Recording(1, str(tmp_path)))
    assert recorder.deck.tape is tape


def test_a_slow_ranks_start_does_not_undo_a_fast_ones_stop(make, tmp_path):
    recorder = make()
    recorder.hear(Recording(1, str(tmp_path)))
    recorder.hear(Recording(2))
    assert recorder.call(str(tmp_path), cycles=False) is None
    assert recorder.deck.tape is None


def test_closing_completes_the_file(make, tmp_path):
    recorder = make()
    recorder.call(str(tmp_path), cycles=True)
    recorder.look()
    recorder.close()
    trace = Trace(tmp_path / "rank.1.json")
    assert [event.name for event in trace.events() if event.ph == "i"] == ["CYCLE"]
    assert trace.about["host"] == "a"
    assert not trace.guessed, "on the host of rank 0 there is nothing to compare"


def test_all_ranks_of_a_job_have_its_mark(make, tmp_path):
    for rank in range(2):
        make(rank).call(str(tmp_path), cycles=False)
    other = make(0, ("a", "b"))
    other.call(str(tmp_path / "other"), cycles=False)
    for recorder in (found for found in (other,)):
        recorder.close()


def test_questions_are_answered_and_nothing_else_is_taken_out(make, sent):
    recorder = make(0, ("a", "b"))
    rest = recorder.sift([(1, Ping(5.0)), (1, Goodbye())])
    assert rest == [(1, Goodbye())]
    ((rank, pong),) = sent
    assert (rank, pong.sent) == (1, 5.0)


def test_a_rank_on_another_host_asks_while_it_records(make, sent, tmp_path):
    recorder = make(1, ("a", "b"))
    recorder.look()
    assert not sent
    assert recorder.deadline is None
    recorder.call(str(tmp_path), cycles=False)
    assert recorder.deadline is not None
    for _ in range(8):
        recorder.look()
        parent, ping = sent.pop()
        assert parent == 0
        recorder.sift([(0, Pong(ping.sent, ping.sent + 7.0))])
    recorder.look()
    assert not sent, "that is enough for a minute"
    recorder.close()
    assert not Trace(tmp_path / "rank.1.json").guessed


def test_a_second_recording_knows_the_clock_at_once(make, tmp_path):
    recorder = make(0)
    for name in ("x", "y"):
        recorder.call(str(tmp_path / name), cycles=False)
    recorder.close()
    assert not Trace(tmp_path / "y" / "rank.0.json").guessed
