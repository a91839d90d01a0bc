"""A ring is a queue of bounded size: what comes out is what went in, and what has no room is refused whole."""

from __future__ import annotations

import threading
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd.transport.shared_memory.ring_buffer import RingError, RingReader, RingWriter

HEADER = 4
ROOM = 96
COUNTS = 128


def ring(room: int = ROOM) -> tuple[RingWriter, RingReader, memoryview]:
    memory = memoryview(bytearray(COUNTS + room))
    return RingWriter(memory), RingReader(memory), memory


@given(st.lists(st.one_of(st.none(), st.binary(max_size=ROOM + 8)), max_size=200))
def test_it_is_a_queue_with_so_much_room(steps):
    """Steps are strings to put, and None to take one."""
    writer, reader, _ = ring()
    model: deque[bytes] = deque()
    for step in steps:
        if step is None:
            assert reader.news <= bool(model)
            assert reader.take() == (model.popleft() if model else None)
            assert not reader.news
        else:
            fits = sum(HEADER + len(held) for held in (*model, step)) <= ROOM
            assert writer.put(step) is fits
            if fits:
                model.append(step)
                assert reader.news
    assert [reader.take() for _ in model] == [*model]
    assert reader.take() is None


def test_news_are_what_was_put_since_the_last_look():
    writer, reader, _ = ring()
    assert not reader.news
    writer.put(b"a")
    writer.put(b"b")
    assert reader.news
    assert reader.take() == b"a"
    assert not reader.news  # the second was there when it looked
    assert reader.take() == b"b"


@pytest.mark.parametrize("written", [-1, 1, ROOM + 1, 1 << 62])
@given(length=st.integers(0, 2**32 - 1))
def test_what_cannot_be_right_is_refused(written, length):
    _, reader, memory = ring()
    memory[:COUNTS].cast("q")[0] = written
    memory[COUNTS : COUNTS + HEADER] = length.to_bytes(HEADER, "little")
    with pytest.raises(RingError):
        reader.take()


def test_a_length_beyond_what_was_written_is_refused():
    writer, reader, memory = ring()
    writer.put(b"abc")
    memory[COUNTS] = 4
    with pytest.raises(RingError, match="4 bytes among 7"):
        reader.take()


@pytest.mark.parametrize("read", [-1, 8, 1 << 62, -1 << 62])
def test_a_writer_finds_no_room_where_the_readers_count_cannot_be_right(read):
    writer, _, memory = ring()
    writer.put(b"abc")
    memory[:COUNTS].cast("q")[8] = read if read >= 0 else read - ROOM
    assert not writer.put(b"d")


def test_two_threads_neither_wait_nor_lose_anything():
    writer, reader, _ = ring(4096)
    count = 20_000
    found: list[bytes] = []

    def read():
        while len(found) < count:
            if (data := reader.take()) is not None:
                found.append(data)

    thread = threading.Thread(target=read)
    thread.start()
    for number in range(count):
        data = number.to_bytes(4, "big") * (number % 9)
        while not writer.put(data):
            pass
    thread.join(60)
    assert found == [number.to_bytes(4, "big") * (number % 9) for number in range(count)]
