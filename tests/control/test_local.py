from __future__ import annotations

from coordd.control.local import MemoryStar
from coordd.negotiation.channel import LOST
from coordd.ops.messages import Goodbye, Inquiry


def test_messages_arrive_in_order_with_their_senders():
    star = MemoryStar(3)
    ends = [star.join(rank) for rank in range(3)]
    ends[2].send(0, Goodbye())
    ends[1].send(0, Inquiry())
    ends[0].send(2, Inquiry())
    assert ends[0].ready()
    assert ends[0].receive() == [(2, Goodbye()), (1, Inquiry())]
    assert not ends[0].ready()
    assert ends[0].receive() == []
    assert ends[2].receive() == [(0, Inquiry())]
    assert ends[1].receive() == []


def test_what_arrives_wakes_the_receiver():
    star = MemoryStar(2)
    rung = []
    star.join(0, lambda: rung.append(0))
    sender = star.join(1, lambda: rung.append(1))
    sender.send(0, Goodbye())
    assert rung == [0]


def test_the_others_hear_of_an_end_that_closes():
    star = MemoryStar(3)
    ends = [star.join(rank) for rank in range(3)]
    ends[2].close()
    assert ends[0].receive() == [(2, LOST)]
    assert ends[1].receive() == []
    ends[0].close()
    assert ends[1].receive() == ends[2].receive() == [(0, LOST)]


def test_a_world_of_one_talks_to_itself():
    end = MemoryStar().join(0)
    end.send(0, Goodbye())
    assert end.receive() == [(0, Goodbye())]
    end.close()
    assert end.receive() == []


def test_in_a_tree_neighbours_hear_of_an_end():
    star = MemoryStar(4, parents=(-1, 0, 0, 2))
    ends = [star.join(rank) for rank in range(4)]
    ends[2].send(3, Inquiry())
    assert ends[3].receive() == [(2, Inquiry())]
    ends[2].close()
    assert [end.receive() for end in ends] == [[(2, LOST)], [], [], [(2, LOST)]]
