from __future__ import annotations

import os

from coordd.launch.frames import LIMIT, Ended, Output, decode
from coordd.launch.lines import Piece
from coordd.launch.outcome import Outcome
from coordd.launch.output_forwarder import Relay


class Ear:
    """Takes packets as the launcher does."""

    def __init__(self):
        self.packets = []

    def __call__(self, packet):
        self.packets.append(packet)

    @property
    def frames(self):
        return [decode(line) for packet in self.packets for line in packet.splitlines()]


def relay(write):
    """Makes a relay and the two ends to write to."""
    (out, to_out), (err, to_err) = os.pipe(), os.pipe()
    return Relay(7, out=out, err=err, write=write), out, to_out, err, to_err


def test_output_arrives_in_frames_of_its_stream():
    ear = Ear()
    relayed, out, to_out, err, to_err = relay(ear)
    os.write(to_out, b"one\ntw")
    os.write(to_err, b"ValueError: x\n")
    assert relayed.read(out)
    assert relayed.unfinished
    assert relayed.read(err)
    relayed.flush()
    assert ear.frames == [
        Output(7, 1, Piece(b"one", b"\n")),
        Output(7, 2, Piece(b"ValueError: x", b"\n")),
        Output(7, 1, Piece(b"tw", b"")),
    ]
    assert relayed.words.last == "ValueError: x"
    for descriptor, end in ((out, to_out), (err, to_err)):
        os.close(end)
        assert relayed.open
        assert not relayed.read(descriptor)
    assert not relayed.open


def test_packets_are_full_but_never_too_full():
    ear = Ear()
    relayed, out, to_out, err, to_err = relay(ear)
    os.write(to_out, b"".join(b"%d\n" % number for number in range(2000)))
    relayed.read(out)
    assert [int(frame.piece.text) for frame in ear.frames] == list(range(2000))
    assert all(len(packet) <= LIMIT for packet in ear.packets)
    assert len(ear.packets) < 40
    for descriptor in (out, to_out, err, to_err):
        os.close(descriptor)


def test_a_launcher_that_has_gone_is_told_nothing_more():
    calls = []

    def gone(packet):
        calls.append(packet)
        raise BrokenPipeError

    relayed, *descriptors = relay(gone)
    relayed.say([Ended(7, Outcome())])
    relayed.say([Ended(7, Outcome())])
    assert len(calls) == 1
    for descriptor in descriptors:
        os.close(descriptor)
