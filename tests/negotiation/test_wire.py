"""Messages survive the wire; anything else is refused with a `WireError`, whatever the bytes."""

from __future__ import annotations

import contextlib
import zlib

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordd.errors import CoorddError
from coordd.negotiation import wire
from coordd.negotiation.wire import MAX_MESSAGE, Batch, WireError, bits, decode, encode, forget, mask
from coordd.ops.messages import (
    Abort,
    Account,
    Announcement,
    Blocked,
    Expecting,
    Failure,
    Flushed,
    Goodbye,
    Hello,
    Inquiry,
    Kind,
    Left,
    Loss,
    Message,
    Muster,
    Overdue,
    Ping,
    Plan,
    Pong,
    Recording,
    ReduceOp,
    Refused,
    Report,
    Request,
    Response,
    StallReport,
    Traffic,
    Unmatched,
    Waiting,
    Welcome,
)

whole = st.integers(0, 1 << 40)
finite = st.floats(allow_nan=False)
ranks = st.lists(st.integers(0, 63), max_size=4).map(tuple)
texts = st.text(max_size=8)
bytes_ = st.binary(max_size=9)
requests = st.builds(
    Request,
    st.sampled_from(Kind),
    texts,
    texts,
    st.lists(whole, max_size=4).map(tuple),
    st.sampled_from(ReduceOp),
    st.integers(-1, 9),
    finite,
    finite,
    ranks,
    st.booleans(),
)
announcements = st.builds(Announcement, requests, texts, st.booleans())
responses = st.builds(Response, requests, st.integers(-1, 9), ranks, texts, texts, ranks, ranks, st.booleans())
waitings = st.builds(Waiting, texts, texts, ranks)
accounts = st.builds(Account, whole, texts, texts)


def some(values: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(values, max_size=3).map(tuple)


counts = some(st.tuples(whole, whole))
traffics = st.builds(Traffic, counts, counts, counts, ranks)
triples = some(st.tuples(whole, whole, whole))
by_type = {
    Report: st.builds(Report, whole, bytes_, bytes_, some(announcements), whole, whole, bytes_, st.integers(-1, 9)),
    Plan: st.builds(
        Plan,
        whole,
        bytes_,
        bytes_,
        some(responses),
        whole,
        st.booleans(),
        unmatched=some(st.builds(Unmatched, whole, texts, whole, whole, texts)),
        left=some(st.builds(Left, whole, traffics)),
        flush=st.booleans(),
    ),
    Hello: st.builds(Hello, texts, texts, whole, texts),
    Welcome: st.builds(Welcome, ranks, some(texts), texts),
    Goodbye: st.builds(Goodbye, bytes_, st.none() | traffics),
    Expecting: st.builds(Expecting, ranks),
    Refused: st.builds(Refused, whole, texts, texts, ranks, some(texts)),
    Flushed: st.builds(Flushed, whole, whole),
    Blocked: st.builds(Blocked, texts, whole, bytes_, st.integers(-1, 9), whole, whole, triples, triples),
    Loss: st.builds(Loss, whole),
    Muster: st.builds(Muster, bytes_, some(st.builds(Hello, texts, texts, whole, texts))),
    Abort: st.builds(Abort, st.builds(Failure, whole, texts, texts)),
    Overdue: st.builds(Overdue, finite, some(texts), some(waitings), bytes_),
    Inquiry: st.builds(Inquiry, ranks),
    Account: accounts,
    StallReport: st.builds(StallReport, finite, some(waitings), some(accounts), ranks),
    Recording: st.builds(Recording, whole, texts, st.booleans()),
    Ping: st.builds(Ping, finite),
    Pong: st.builds(Pong, finite, finite),
}
messages = st.one_of(*by_type.values())


@given(messages)
def test_a_message_comes_out_as_it_went_in(message):
    assert decode(encode(message)) == message


def test_every_message_is_tried():
    assert set(by_type) == set(Message.__args__)


@settings(max_examples=1000)
@given(st.binary(max_size=64))
@example(b"")
@example(b"\xc1")
@example(b"\x91" * 60)
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\x92\xa6report\xcf\xff\xff\xff\xff\xff\xff\xff\xff")
@example(b"\xd9\x04\xff\xff\xff\xff")
def test_any_bytes_are_a_message_or_refused(data):
    try:
        message = decode(data)
    except WireError:
        return
    assert decode(encode(message)) == message


@settings(max_examples=500)
@given(messages, st.data())
def test_damaged_messages_are_refused_or_are_other_messages(message, data):
    sent = bytearray(encode(message))
    sent[data.draw(st.integers(0, len(sent) - 1))] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(sent)))
    for damaged in (bytes(sent), bytes(sent[:cut]), bytes(sent) + b"\x00"):
        with contextlib.suppress(WireError):
            assert isinstance(decode(damaged), Message)


@pytest.mark.parametrize(
    "content",
    [
        ["report", "zero"],
        ["report", 0, "text in place of bytes"],
        ["plan"],
        ["plan", 1, b"", b"", [[[7, "a kind that does not exist"]]]],
        ["plan", 1, b"", b"", [[[0, "w", "float32", [1.5]]]]],
        ["nobody knows this tag"],
        {"report": 0},
        [],
        None,
        ["abort", [0, 1]],
    ],
)
def test_what_does_not_fit_the_types_is_refused(content):
    with pytest.raises(WireError):
        decode(msgspec.msgpack.encode(content))


def test_a_path_that_is_not_unicode_does_not_silence_a_rank():
    """Python reads such paths with surrogates, which no message can carry as they are."""
    report = Report(1, fresh=(Announcement(Request(Kind.BARRIER, "é"), "caf\udce9.py:1"),))
    assert decode(encode(report)) == Report(1, fresh=(Announcement(Request(Kind.BARRIER, "é"), r"caf\udce9.py:1"),))
    assert decode(encode(Abort(Failure(1, "raised", "no \ud800")))) == Abort(Failure(1, "raised", r"no \ud800"))


def test_a_deep_nest_is_refused():
    with pytest.raises(WireError):
        decode(b"\x91" * 1_000_000)


def test_too_much_is_refused_on_both_sides():
    report = Report(0, bytes(MAX_MESSAGE))
    with pytest.raises(WireError, match=r"a Report of 167772\d\d bytes exceeds the limit of 16777216"):
        encode(report)
    with pytest.raises(WireError, match="bytes exceed the limit"):
        decode(bytes(MAX_MESSAGE + 1))


def test_refusals_are_coordds_own_errors():
    assert issubclass(WireError, CoorddError)
    assert set(wire.__all__) == {
        "MAX_MESSAGE",
        "Batch",
        "Scribe",
        "WireError",
        "bits",
        "decode",
        "encode",
        "forget",
        "mask",
    }


def test_a_scribe_encodes_what_goes_to_many_once():
    scribe = wire.Scribe()
    first, second = Report(1), Report(2)
    data = scribe.encode(first)
    assert data == encode(first)
    assert scribe.encode(first) is data
    assert scribe.encode(second) == encode(second)
    assert scribe.encode(first) == data


@given(st.sets(st.integers(0, 5000)))
def test_bits_and_masks_are_each_others_inverse(positions):
    number = sum(1 << position for position in positions)
    assert list(bits(number)) == sorted(positions)
    assert int.from_bytes(mask(number), "little") == number
    assert len(mask(number)) == (max(positions) // 8 + 1 if positions else 0)


@given(st.binary(max_size=40))
def test_a_mask_may_end_in_zeros(data):
    number = int.from_bytes(data, "little")
    assert mask(number) == data.rstrip(b"\0")


def batch(count: int) -> Batch:
    return Batch(
        Announcement(Request(Kind.ALLREDUCE, f"layer.{number}.weight"), "train.py:1") for number in range(count)
    )


def test_many_announcements_travel_as_a_batch_and_come_out_as_they_went_in():
    for fresh in (batch(200), tuple(batch(200)), batch(31)):
        report = Report(7, b"\1", b"", fresh, unlock=3, ranks=b"\7", floor=5)
        assert decode(encode(report)) == report


def test_equal_batches_are_read_once_and_passed_on_as_they_are():
    first, again = (decode(encode(Report(seen, fresh=batch(200)))).fresh for seen in (1, 2))
    assert first is again
    assert isinstance(first, Batch)
    assert first.data == batch(200).data
    forget()
    assert decode(encode(Report(3, fresh=batch(200)))).fresh is not first


def test_large_messages_are_compressed():
    plan = Plan(1, responses=tuple(Response(told.request, slot=slot) for slot, told in enumerate(batch(1000))))
    assert len(encode(plan)) < 20_000
    assert decode(encode(plan)) == plan
    assert len(encode(Report(0, fresh=batch(1000)))) < 10_000


def test_what_expands_beyond_the_limit_or_is_cut_off_is_refused():
    bomb = zlib.compress(b"\0" * (MAX_MESSAGE + 1))
    data = encode(Report(0, fresh=batch(1000)))
    whole = encode(Welcome(tuple(range(5000))))
    for bad in (bomb, zlib.compress(b"\0" * 99), whole[:-5], whole[:2], data[:-5], data.replace(b"\x78", b"\x79")):
        with pytest.raises(WireError):
            decode(bad)
