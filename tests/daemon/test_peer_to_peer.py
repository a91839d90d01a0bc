"""Sends and receives: matched by source, destination and name, in any order."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import coordd.torch as cd
from coordd import api
from coordd.daemon import peer_to_peer
from coordd.errors import MismatchError, PeerError, ShutdownError
from coordd.ops.handles import Handle
from coordd.ops.messages import Left, Traffic
from coordd.transport.local import LocalLane, LocalWorld
from tests.local_ranks import LocalRanks, each_rank, local_ranks
from tests.neighbours import notes

WAIT = 10.0


def send(array: np.ndarray, destination: int, name: str):
    return api.operations().send(array, destination, name=name)


def recv(array: np.ndarray | None, source: int, name: str):
    return api.operations().recv(array, source, name=name)


@pytest.fixture
def ranks():
    with local_ranks(3) as found:
        yield found


@pytest.mark.parametrize("early", ["send", "recv"])
def test_either_side_may_come_first(ranks, early):
    def body(rank):
        first_mover = (rank == 0) == (early == "send")
        if not first_mover:
            api.operations().barrier().result(WAIT)
        found = None
        if rank == 0:
            found = send(np.arange(5.0), 1, "x")
        elif rank == 1:
            found = recv(np.zeros(5), 0, "x")
        if first_mover:
            api.operations().barrier().result(WAIT)
        return found and found.result(WAIT).tolist()

    assert ranks.each(body)[:2] == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2


def test_messages_of_one_name_keep_their_order(ranks):
    def body(rank):
        if rank == 0:
            return [send(np.array([number]), 1, "x").result(WAIT) for number in range(50)] and None
        if rank == 1:
            handles = [recv(np.zeros(1, int), 0, "x") for _ in range(50)]
            return [int(handle.result(WAIT)[0]) for handle in handles]
        return None

    assert ranks.each(body)[1] == list(range(50))


def test_a_rank_can_write_to_itself_and_to_many(ranks):
    def body(rank):
        sent = [send(np.array([rank, peer]), peer, "x") for peer in range(3)]
        received = [recv(None, peer, "x").result(WAIT).tolist() for peer in reversed(range(3))]
        for handle in sent:
            handle.result(WAIT)
        return received

    assert ranks.each(body) == [[[2, rank], [1, rank], [0, rank]] for rank in range(3)]


@pytest.mark.parametrize("wanted", [None, np.zeros(3)], ids=["a new array", "an array"])
def test_tags_that_come_again_mix_no_messages_up(monkeypatch, wanted):
    """MPI has at least 32767 of them; a message may wait for its receive while others have them all."""
    monkeypatch.setattr(LocalLane, "tags", 4)

    def body(rank):
        if rank == 0:
            handles = [send(np.full(3, 100.0 + number), 1, f"early {number}") for number in range(5)]
            handles += [send(np.full(3, float(number)), 1, "x") for number in range(20)]
            return [handle.result(WAIT) for handle in handles] and None
        found = [recv(None, 0, "x").result(WAIT).tolist() for _ in range(20)]
        late = [recv(wanted, 0, f"early {number}").result(WAIT)[0] for number in range(5)]
        return [values[0] for values in found], late

    assert each_rank(2, body, shared_memory=False)[1] == ([*map(float, range(20))], [100.0, 101.0, 102.0, 103.0, 104.0])


def test_a_receive_that_has_just_begun_keeps_its_payload(monkeypatch):
    """Though all tags come again, twice, among the messages that are looked at together."""
    monkeypatch.setattr(LocalLane, "tags", 3)
    world = LocalWorld(2)
    sender, receiver = (peer_to_peer.Mailbox(world.join(rank).matched, rank) for rank in range(2))

    def start(box, array, name):
        found = peer_to_peer.Letter(name, 1 - (box is receiver), array, Handle(name), outgoing=array is not None)
        box.start(found)
        return found

    def move():
        for _ in range(9):
            sender.advance()
            receiver.advance()

    values = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "e": 5.0}
    for name in "ab":
        start(sender, np.full(1, values[name]), name)
    found = {"b": start(receiver, None, "b")}
    move()
    for name in "cde":
        start(sender, np.full(1, values[name]), name)
    for name in ("a", "never"):
        found[name] = start(receiver, None, name)
    move()
    found |= {name: start(receiver, None, name) for name in "ced"}
    move()
    assert {name: found[name].handle.result(WAIT)[0] for name in values} == values


SHAPES = [(), (0,), (3, 0), (1,), (7,), (2, 3), (300,)]
TYPES = ["bool", "uint8", "float16", "int64", "complex128", ml_dtypes.bfloat16, ml_dtypes.float8_e5m2]


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2), st.integers(0, 2), st.sampled_from("ab"), st.sampled_from(SHAPES), st.sampled_from(TYPES)
        ),
        max_size=30,
    ),
    st.integers(0, 1 << 30),
    st.booleans(),
)
def test_any_messages_in_any_order_of_starts_reach_whom_they_are_for(letters, seed, known):
    """Within one source, destination and name the order counts; across them every rank starts as it likes."""
    values = [np.full(shape, number % 2).astype(dtype) for number, (*_, shape, dtype) in enumerate(letters)]

    def begin(rank, number):
        source, to, name, *_ = letters[number]
        place = np.empty_like(values[number]) if known else None
        sent = [(values[number], send(values[number], to, name))] if rank == source else []
        return sent + ([(values[number], recv(place, source, name))] if rank == to else [])

    def body(rank):
        mine = [number for number, (source, to, *_) in enumerate(letters) if rank in {source, to}]
        keys = list(dict.fromkeys(letters[number][:3] for number in mine))
        random.Random(seed + rank).shuffle(keys)
        mine.sort(key=lambda number: keys.index(letters[number][:3]))
        for value, handle in [started for number in mine for started in begin(rank, number)]:
            found = handle.result(WAIT)
            assert (found.dtype, found.shape) == (value.dtype, value.shape)
            assert found.tobytes() == value.tobytes()

    each_rank(3, body)


@pytest.mark.parametrize("known", [True, False])
def test_a_large_message_travels_in_parts(ranks, monkeypatch, known):
    monkeypatch.setattr(peer_to_peer, "_PART_BYTES", 1000)
    values = np.random.default_rng(0).normal(size=(77, 31))

    def body(rank):
        if rank == 2:
            return None
        handles = [send(values * (rank + 1), 1 - rank, "x"), send(values + rank, 1 - rank, "y")]
        places = [np.empty((31, 77)).T if known else None for _ in range(2)]
        found = [recv(places[1], 1 - rank, "y").result(WAIT), recv(places[0], 1 - rank, "x").result(WAIT)]
        assert np.array_equal(found[0], values + (1 - rank))
        assert np.array_equal(found[1], values * (2 - rank))
        return [handle.result(WAIT) is not None for handle in handles]

    ranks.each(body)


def test_what_does_not_fit_is_refused_and_what_follows_arrives(ranks):
    def body(rank):
        if rank == 0:
            send(np.ones((2, 3), np.float32), 1, "x").result(WAIT)
            send(np.ones(6, np.float64), 1, "x").result(WAIT)
            send(np.ones(6), 1, "x").result(WAIT)
        if rank == 1:
            place = np.zeros(6)
            with pytest.raises(MismatchError) as caught:
                recv(place, 0, "x").result(WAIT)
            with pytest.raises(MismatchError, match="float64"):
                recv(place.astype(np.float32), 0, "x").result(WAIT)
            assert place.tolist() == [0.0] * 6
            assert recv(place, 0, "x").result(WAIT).tolist() == [1.0] * 6
            return str(caught.value)
        return None

    text = "ranks disagree on the tensor that is sent and received of 'x' (rank 0: float32[2, 3]; rank 1: float64[6])"
    assert ranks.each(body)[1] == text


def test_a_tensor_is_sent_and_received_as_such(ranks):
    def body(rank):
        tensor = torch.arange(6.0).reshape(2, 3).bfloat16() + rank
        handle = cd.send_async(tensor.T, (rank + 1) % 3, "ring")
        place = torch.zeros(3, 2, dtype=torch.bfloat16)
        assert cd.recv(place, (rank - 1) % 3, "ring") is place
        cd.synchronize(handle)
        if rank == 0:
            cd.send(tensor, 1, "once")
        if rank == 1:
            cd.synchronize(cd.recv_async(tensor, 0, "once"))
        return place.float().tolist()

    plain = torch.arange(6.0).reshape(2, 3).T
    assert ranks.each(body) == [(plain + (rank - 1) % 3).tolist() for rank in range(3)]


def test_messages_travel_beside_reductions(ranks):
    def body(rank):
        handles = []
        for number in range(40):
            handles.append(send(np.array([number]), (rank + 1) % 3, f"ring{number}"))
            handles.append(api.operations().allreduce(np.full(1000, float(number)), name=str(number)))
            handles.append(recv(np.zeros(1, int), (rank - 1) % 3, f"ring{number}"))
        return [int(handle.result(WAIT).reshape(-1)[0]) for handle in handles]

    assert ranks.each(body) == [[number for number in range(40) for _ in range(3)]] * 3


@pytest.fixture
def boxes():
    """The mailboxes of two neighbours, who lend each other memory, and of a third rank elsewhere."""
    world = LocalWorld(3)
    with notes(2) as found:
        with_notes = enumerate([*found, None])
        yield [peer_to_peer.Mailbox(world.join(rank).matched, rank, notes=mine) for rank, mine in with_notes]


def letter(array: np.ndarray | None, peer: int, name: str = "x", *, outgoing: bool) -> peer_to_peer.Letter:
    return peer_to_peer.Letter(name, peer, array, Handle(name), outgoing=outgoing)


def driven(boxes: list[peer_to_peer.Mailbox], letters: Sequence[peer_to_peer.Letter]) -> None:
    for _ in range(1000):
        if all(each.handle.poll() for each in letters):
            return
        for box in boxes:
            box.advance()
    pytest.fail("something never arrives")


@pytest.mark.parametrize("early", ["send", "recv"])
def test_a_neighbour_reads_what_is_lent_where_it_lies(boxes, early):
    array = boxes[0].notes.loans.blank(1000)
    array[:] = 5
    out, back = letter(array, 1, outgoing=True), letter(None, 0, outgoing=False)
    for number, each in ((0, out), (1, back)) if early == "send" else ((1, back), (0, out)):
        boxes[number].start(each)
        boxes[number].advance()
    assert out.handle.poll()  # the memory is not this rank's any more, taken or not
    driven(boxes, [out, back])
    found = back.handle.result()
    assert (found == 5).all()
    found[0] = 6
    assert array[0] == 6


def test_what_is_lent_can_be_received_into_an_array(boxes):
    array = boxes[0].notes.loans.blank(24)
    array[:] = np.arange(24)
    place, wrong = np.zeros(24, np.uint8), np.zeros(7)
    letters = [letter(array, 1, outgoing=True), letter(place, 0, outgoing=False)]
    boxes[0].start(letters[0])
    boxes[1].start(letters[1])
    driven(boxes, letters)
    assert place.tolist() == list(range(24))
    del array
    letters = [letter(boxes[0].notes.loans.blank(24), 1, outgoing=True), letter(wrong, 0, outgoing=False)]
    boxes[0].start(letters[0])
    boxes[1].start(letters[1])
    driven(boxes, letters)
    assert isinstance(letters[1].handle.error(), MismatchError)


def test_messages_to_a_neighbour_keep_their_order_whatever_way_they_take(boxes):
    sent, received = [], []
    for number in range(60):
        array = boxes[0].notes.loans.blank(3) if number % 2 else np.zeros(3, np.uint8)
        array[:] = number
        sent.append(letter(array, 1, outgoing=True))
        received.append(letter(None, 0, outgoing=False))
        boxes[0].start(sent[-1])
        boxes[1].start(received[-1])
    driven(boxes, [*sent, *received])
    assert [each.handle.result().tolist() for each in received] == [[number] * 3 for number in range(60)]


def test_more_notes_than_there_is_room_for_come_in_order(boxes):
    names = [f"{number}.{'n' * 900}" for number in range(200)]
    sent = [letter(np.array([number]), 1, name, outgoing=True) for number, name in enumerate(names)]
    for each in sent:
        boxes[0].start(each)
    boxes[0].advance()
    assert boxes[0].unheralded
    received = [letter(None, 0, name, outgoing=False) for name in reversed(names)]
    for each in received:
        boxes[1].start(each)
    driven(boxes, [*sent, *received])
    assert [int(each.handle.result()[0]) for each in received] == list(reversed(range(200)))


def test_only_what_wakes_nobody_has_to_be_looked_for(boxes):
    assert not any(box.unheralded for box in boxes)
    boxes[1].start(near := letter(None, 0, outgoing=False))
    assert not boxes[1].unheralded
    boxes[0].start(letter(boxes[0].notes.loans.blank(8), 1, outgoing=True))
    boxes[0].advance()
    assert boxes[1].news
    assert not boxes[0].unheralded
    driven(boxes, [near])
    boxes[1].start(far := letter(None, 2, outgoing=False))
    assert boxes[1].unheralded
    boxes[2].start(letter(np.arange(3), 1, outgoing=True))
    assert boxes[2].unheralded
    driven(boxes, [far])
    assert not any(box.unheralded for box in boxes)


def test_memory_that_is_lent_goes_like_any_other_to_who_is_no_neighbour(boxes):
    array = boxes[0].notes.loans.blank(16)
    array[:] = 3
    letters = [letter(array, 2, outgoing=True), letter(None, 0, outgoing=False)]
    boxes[0].start(letters[0])
    boxes[2].start(letters[1])
    driven(boxes, letters)
    assert (letters[1].handle.result() == 3).all()
    assert not np.shares_memory(letters[1].handle.result(), array)


def test_what_a_rank_that_leaves_has_taken_or_still_wants_does_not_fail(boxes):
    """Of four sends it takes the first, has no use for the second, and has not heard of the others."""
    sender, receiver, _ = boxes
    sends = [letter(np.full(3, number), 1, str(number), outgoing=True) for number in range(1, 6)]
    wanted = [letter(None, 0, name, outgoing=False) for name in ("1", "3")]
    for each in sends[:2]:
        sender.start(each)
    receiver.start(wanted[0])
    sender.advance()
    receiver.advance()
    assert receiver.traffic == Traffic((), ((0, 2),), ((0, 2),), ())
    for each in sends[2:4]:
        sender.start(each)
    sender.note_left(Left(1, receiver.traffic))
    failed = [each.handle.poll() and isinstance(each.handle.error(), ShutdownError) for each in sends[:4]]
    assert failed == [False, True, True, True]
    driven([sender, receiver], [sends[0], wanted[0]])
    sender.start(sends[4])
    assert isinstance(sends[4].handle.error(), ShutdownError)


def test_a_message_for_which_a_rank_that_leaves_still_waits_is_delivered(boxes):
    sender, receiver, _ = boxes
    receiver.start(wanted := letter(None, 0, outgoing=False))
    sender.start(sent := letter(np.ones(3), 1, outgoing=True))
    assert receiver.traffic == Traffic((), (), (), (0,))
    sender.note_left(Left(1, receiver.traffic))
    driven([sender, receiver], [sent, wanted])
    assert sent.handle.error() is None


def test_what_a_rank_that_has_left_has_sent_is_received_first(boxes):
    receiver, sender, _ = boxes
    sender.start(letter(np.ones(3), 0, "a", outgoing=True))
    receiver.start(never := letter(None, 1, "never", outgoing=False))
    receiver.note_left(Left(1, sender.traffic))
    assert not never.handle.poll()
    for _ in range(3):
        sender.advance()
        receiver.advance()
    assert isinstance(never.handle.error(), ShutdownError)
    receiver.start(wanted := letter(None, 1, "a", outgoing=False))
    driven([sender, receiver], [wanted])
    assert wanted.handle.result().tolist() == [1.0] * 3
    receiver.start(late := letter(None, 1, "a", outgoing=False))
    assert isinstance(late.handle.error(), ShutdownError)


def test_what_is_sent_after_a_failure_is_not_matched_with_a_receive_that_is_to_fail(boxes):
    receiver, sender, _ = boxes
    receiver.start(failing := letter(None, 1, outgoing=False))
    sender.note_failed(7)
    sends = [letter(np.full(2, value), 0, outgoing=True) for value in range(2)]
    for each in sends:
        sender.start(each)
    for _ in range(5):
        sender.advance()
        receiver.advance()
    assert not failing.handle.poll()
    assert receiver.give_up(1, "x") == [failing]
    receiver.note_failed(7)
    for value in range(2):
        receiver.start(wanted := letter(None, 1, outgoing=False))
        driven([sender, receiver], [wanted])
        assert wanted.handle.result().tolist() == [value] * 2


def test_who_leaves_with_a_receive_that_nobody_matched_is_told(caplog):
    with local_ranks(2) as ranks:
        handles = ranks.each(lambda rank: recv(None, 1 - rank, "x"))
    for handle in handles:
        with pytest.raises(ShutdownError) as caught:
            handle.result(0.0)
        heard = "left the job while others still waited for 'x'" in str(caught.value)  # or it has not, and left as well
        assert heard or "left with operations that another rank has not taken part in" in caplog.text


def broken(ranks: LocalRanks) -> None:
    ranks.daemons[0].fail("failed: on purpose")


def test_a_failure_ends_what_is_under_way_and_what_comes_at_the_same_moment(ranks):
    together = threading.Barrier(3)

    def body(rank):
        early = [recv(None, (rank + 1) % 3, "never"), send(np.ones(1), (rank + 1) % 3, "nobody asks")]
        together.wait(WAIT)
        if rank == 0:
            broken(ranks)
        with pytest.raises(PeerError, match="rank 0 failed: on purpose"):
            recv(None, rank, "late").result(WAIT)
        for handle in early:
            with pytest.raises(PeerError, match="rank 0 failed: on purpose"):
                handle.result(WAIT)

    ranks.each(body)
