from __future__ import annotations

import threading

import numpy as np
import pytest

from coordd.transport.local import LocalWorld
from coordd.transport.protocol import ANY

DEADLINE = 10.0


@pytest.fixture
def lanes():
    world = LocalWorld(3)
    return [world.join(rank).collective for rank in range(3)]


@pytest.mark.parametrize("early", ["send", "receive"])
def test_a_message_needs_both_halves_in_any_order(lanes, early):
    sent, wanted = np.arange(3.0), np.zeros(3)
    starts = [lambda: lanes[0].isend(sent, 1, 7), lambda: lanes[1].irecv(wanted, 0, 7)]
    first, second = starts if early == "send" else reversed(starts)
    ticket = first()
    assert not lanes[0].done([ticket])
    other = second()
    assert lanes[0].done([ticket, other])
    assert wanted.tolist() == [0.0, 1.0, 2.0]


def test_messages_of_one_source_and_tag_keep_their_order(lanes):
    for value in (1, 2, 3):
        lanes[0].isend(np.array([value]), 1, 7)
    slots = [np.zeros(1, int) for _ in range(3)]
    assert lanes[1].done([lanes[1].irecv(slot, 0, 7) for slot in slots])
    assert [int(slot[0]) for slot in slots] == [1, 2, 3]


def test_source_destination_and_tag_tell_messages_apart(lanes):
    wanted = {key: np.zeros(1, int) for key in [(0, 1, 7), (0, 1, 8), (2, 1, 7), (1, 2, 7)]}
    tickets = [lanes[to].irecv(slot, source, tag) for (source, to, tag), slot in wanted.items()]
    for number, (source, to, tag) in enumerate(reversed(wanted)):
        lanes[source].isend(np.array([number]), to, tag)
    assert lanes[0].done(tickets)
    assert [int(slot[0]) for slot in wanted.values()] == [3, 2, 1, 0]


def test_a_receive_from_anybody_takes_the_oldest(lanes):
    lanes[2].isend(np.array([2]), 1, 0)
    lanes[0].isend(np.array([0]), 1, 0)
    slot = np.zeros(1, int)
    lanes[1].irecv(slot, ANY, 0)
    assert slot.tolist() == [2]
    late = lanes[1].irecv(slot, ANY, 0)
    assert slot.tolist() == [0]
    assert lanes[1].done([late])


def test_a_message_may_be_shorter_than_its_place_and_of_another_type(lanes):
    slot = np.zeros(8, np.uint8)
    lanes[0].isend(np.array([1], np.int32), 1, 0)
    assert lanes[1].done([lanes[1].irecv(slot, 0, 0)])
    assert slot[:4].view(np.int32).tolist() == [1]


def test_a_rank_can_send_to_itself(lanes):
    slot = np.zeros(1)
    tickets = [lanes[0].irecv(slot, 0, 0), lanes[0].isend(np.ones(1), 0, 0)]
    assert lanes[0].done(tickets)
    assert slot.tolist() == [1.0]


def test_a_withdrawn_receive_takes_nothing(lanes):
    old, new = np.zeros(1), np.zeros(1)
    lanes[1].cancel(lanes[1].irecv(old, ANY, 0))
    lanes[0].isend(np.ones(1), 1, 0)
    lanes[1].irecv(new, ANY, 0)
    assert (old.tolist(), new.tolist()) == ([0.0], [1.0])


def test_the_two_lanes_of_a_transport_do_not_mix():
    world = LocalWorld(2)
    ends = [world.join(rank) for rank in range(2)]
    slot = np.zeros(1)
    ticket = ends[1].matched.irecv(slot, 0, 0)
    ends[0].collective.isend(np.ones(1), 1, 0)
    assert not ends[1].matched.done([ticket])


def test_the_rank_that_waited_is_woken_and_only_it():
    world, rung = LocalWorld(2), []
    lanes = [world.join(rank, lambda rank=rank: rung.append(rank)).collective for rank in range(2)]
    lanes[0].isend(np.ones(1), 1, 0)
    assert rung == []
    lanes[1].irecv(np.zeros(1), 0, 0)
    assert rung == [0]


def test_values_are_gathered_by_rank_again_and_again():
    world = LocalWorld(3)
    ends = [world.join(rank) for rank in range(3)]
    found = [[], [], []]
    threads = [
        threading.Thread(target=lambda end=end: [found[end.rank].append(end.gather((end.rank, i))) for i in range(20)])
        for end in ends
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert found[0] == found[1] == found[2] == [[(0, i), (1, i), (2, i)] for i in range(20)]
