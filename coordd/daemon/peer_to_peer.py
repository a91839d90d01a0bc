"""Matched operations: a send and a receive that name each other, in any order, without negotiation.

A message is a header of fixed size, which describes what follows, and the payload, which travels only when a receive
asks for it: so an early send costs its receiver no memory, and a receive of another shape or dtype fails instead of
truncating. A payload in memory that is lent to a rank of the same host does not travel: the header gives its location.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np

from coordd.collectives.ring import Steps
from coordd.errors import ArgumentError, MismatchError, RefusedError, ShutdownError
from coordd.negotiation.fusion import item_size
from coordd.ops.arguments import name_of
from coordd.ops.dtypes import dtype_of
from coordd.ops.event_buffer import Deck
from coordd.ops.handles import Handle
from coordd.ops.messages import Left, Traffic, Waiting
from coordd.transport.protocol import ANY, Lane, Ticket
from coordd.transport.shared_memory.loans import Loan
from coordd.transport.shared_memory.notes import Notes

__all__ = ["Letter", "Mailbox"]

_HEADER_BYTES = 2048
_HEADER_TAG = 0
_PART_BYTES = 256 << 20
_SERVES_SECONDS = 0.3
"""How long a rank keeps calling MPI after all ranks have left, if another one had not got all its headers by then."""
_DONE = object()

Disagreement = list[tuple[str, list[int], list[str]]]


class _Counts(NamedTuple):
    """How many messages a rank that has left sent to this rank, and how many headers it got from this rank."""

    sent: int
    heard: int


class _Header(msgspec.Struct, frozen=True, array_like=True):
    """Describes a message; ``serial`` counts the sender's messages, and gives the payload its tag.

    Nothing follows if the sender has ``refused`` to send, for this reason. ``after`` is the last plan known to the
    sender that failed sends and receives.
    """

    sender: int
    serial: int
    name: str
    dtype: str
    shape: tuple[int, ...]
    loan: Loan | None = None
    refused: str = ""
    after: int = 0


class Letter:
    """One send or receive of this rank; ``array`` is None when the receiver accepts any shape and dtype.

    With ``refused``, the reason why this rank refused to send or receive it, the operation completes without the
    script: the receiver gets the error, or the received message is dropped. So the next message of that name matches
    the next one.
    """

    __slots__ = ("array", "handle", "land", "name", "number", "outgoing", "peer", "refused")

    def __init__(  # noqa: PLR0913 - a record
        self,
        name: str,
        peer: int,
        array: np.ndarray | None,
        handle: Handle[Any],
        *,
        outgoing: bool,
        land: Callable[[np.ndarray], Any] | None = None,
        refused: str = "",
    ) -> None:
        self.refused = refused
        self.number = 0  # of a send, among all sends to this peer
        self.name = name
        self.peer = peer
        self.array = array
        self.handle = handle
        self.outgoing = outgoing
        self.land = land

    @property
    def word(self) -> str:
        """Name of the operation: ``send`` or ``recv``."""
        return "send" if self.outgoing else "recv"

    def finish(self, array: np.ndarray) -> None:
        """Completes the handle with the result."""
        self.handle.land(array, self.land)


_serials = itertools.count(1)
"""Counts across sessions, so that a message left on the network by an earlier session matches nothing."""


class Mailbox:
    """The sends and receives of one rank."""

    def __init__(self, lane: Lane, rank: int, deck: Deck | None = None, *, notes: Notes | None = None) -> None:
        """Creates an empty mailbox.

        Args:
            lane: what messages travel on.
            rank: this rank.
            deck: records them.
            notes: to and from ranks of this host, which wake each other, which MPI does not, and lend each other
                memory.
        """
        self._lane = lane
        self.notes = notes or Notes()
        self._lines: dict[int, deque[bytes]] = {}
        self._deck = deck or Deck()
        self._rank = rank
        self._wanted: dict[tuple[int, str], deque[Letter]] = {}
        self._arrived: dict[tuple[int, str], deque[_Header]] = {}
        self._unclaimed: dict[tuple[int, int], _Header] = {}  # by sender and tag
        self._early: dict[tuple[int, int], tuple[np.ndarray, list[Ticket]]] = {}  # by sender and serial number
        self._moving: list[tuple[Letter, Steps]] = []
        self._abandoned: list[tuple[Letter, Steps]] = []
        self._left: dict[int, _Counts] = {}  # by rank that has left
        self._numbers: dict[tuple[int, int], int] = {}  # of unclaimed messages, by sender and serial number
        self._sent: Counter[int] = Counter()
        self._heard: Counter[int] = Counter()
        self._withdrawn: list[Steps] = []
        self._held: deque[_Header] = deque()
        self._after = 0
        self._heard_at_goodbye: dict[int, int] = {}
        self.lane_messages = 0
        """How many messages have begun to move on the lane rather than through lent memory."""
        self._slot = np.zeros(_HEADER_BYTES, np.uint8)
        self._listening: Ticket | None = None
        self.done = {"send": 0, "recv": 0}
        """How many sends and receives are done."""
        self.bytes = {"send": 0, "recv": 0}
        """How many bytes they have moved."""

    def __len__(self) -> int:
        return len(self._moving) + sum(len(queue) for queue in self._wanted.values())

    def __bool__(self) -> bool:  # called in every cycle
        return bool(self._moving or self._wanted)

    @property
    def letters(self) -> list[Letter]:
        """All sends and receives in flight."""
        return [*(letter for letter, _ in self._moving), *self.wanted]

    @property
    def offered(self) -> list[Letter]:
        """The sends that have not ended."""
        return [letter for letter, _ in self._moving if letter.outgoing]

    @property
    def in_transit(self) -> bool:
        """Whether the network still has a message of this rank that its receiver has not taken."""
        return bool(self._moving or self._abandoned or self._withdrawn)

    @property
    def receiving(self) -> bool:
        """Whether a receive's message has arrived and its payload is in flight."""
        return any(not letter.outgoing for letter, _ in self._moving)

    @property
    def sent(self) -> tuple[tuple[int, int], ...]:
        """How many messages this rank has begun to send, by receiver."""
        return tuple(sorted(self._sent.items()))

    @property
    def traffic(self) -> Traffic | None:
        """The counts that ranks that exchange messages with this one need when it leaves; None without messages."""
        if not (self._sent or self._heard or self._wanted):
            return None
        wants = tuple(sorted({letter.peer for letter in self.wanted}))
        self._heard_at_goodbye = {peer: self._heard[peer] for peer in wants}
        return Traffic(self.sent, tuple(sorted(self._heard.items())), self.unclaimed, wants)

    def is_through(self, seconds: float) -> bool:
        """Returns whether nothing is in flight any more, ``seconds`` after all ranks have left.

        A rank that had not received all headers of this one when it left takes them in now, which may need calls of MPI
        here.
        """
        coming = any(self._heard[rank] < counts.sent for rank, counts in self._left.items())
        unheard = any(counts.heard < self._sent[rank] for rank, counts in self._left.items())
        return not (self or self.in_transit or coming or (unheard and seconds < _SERVES_SECONDS))

    @property
    def has_unclaimed(self) -> bool:
        """Whether the lane has delivered a header for which no receive has begun."""
        return bool(self._unclaimed)

    @property
    def unclaimed(self) -> tuple[tuple[int, int], ...]:
        """The messages that have arrived and for which no receive has begun, by sender and number."""
        return tuple(sorted((sender, number) for (sender, _), number in self._numbers.items()))

    def heard(self, sender: int) -> int:
        """Returns how many messages of a rank have arrived, wanted or not."""
        return self._heard[sender]

    @property
    def wanted(self) -> list[Letter]:
        """The receives for which nothing has arrived yet."""
        return [letter for queue in self._wanted.values() for letter in queue]

    @property
    def unheralded(self) -> bool:
        """Whether this rank must poll: for data in flight, or for messages from other hosts, which cause no wake-up."""
        return bool(self._moving) or self._waits_afar

    @property
    def news(self) -> bool:
        """Whether neighbours have left notes."""
        return self.notes.news

    @property
    def _waits_afar(self) -> bool:
        return bool(self._wanted) and any(peer not in self.notes for peer, _ in self._wanted)

    def start(self, letter: Letter, header: _Header | None = None) -> None:
        """Starts a send or a receive; fails it if the other rank has left.

        Args:
            letter: the send or receive.
            header: of the message to receive; by default the first of that name.
        """
        if letter.peer in self._left and (letter.outgoing or not self._comes_from(letter.peer)):
            letter.handle.fail(ShutdownError(letter.name, (letter.peer,), message=True))
            return
        if letter.outgoing and letter.array is not None:
            self._sent[letter.peer] += 1
            letter.number = self._sent[letter.peer]
            self._moving.append((letter, self._send(letter, letter.array)))
            return
        key = (letter.peer, letter.name)
        if headers := self._arrived.get(key):
            header = header or headers[0]
            headers.remove(header)
            del self._numbers[header.sender, header.serial]
            if not headers:
                del self._arrived[key]
            if self._unclaimed.get((header.sender, self._tag(header))) is header:
                del self._unclaimed[header.sender, self._tag(header)]
            self._accept(letter, header)
        else:
            self._wanted.setdefault(key, deque()).append(letter)

    def note_left(self, left: Left) -> None:
        """Records that a rank has left, and fails the operations in which it no longer takes part."""
        traffic = left.traffic
        counts = _Counts(dict(traffic.sent).get(self._rank, 0), dict(traffic.heard).get(self._rank, 0))
        self._left[left.rank] = counts
        heard = math.inf if self._rank in traffic.wants else counts.heard
        for letter, steps in [each for each in self._moving if each[0].outgoing and each[0].peer == left.rank]:
            if letter.number > heard or (self._rank, letter.number) in traffic.unclaimed:
                self._withdraw(letter, steps, ShutdownError(letter.name, (left.rank,), message=True))
        self._end_receives(left.rank)

    def _withdraw(self, letter: Letter, steps: Steps, error: BaseException) -> None:
        """Fails a send; the network keeps its buffer until the other rank has dropped the message."""
        self._moving.remove((letter, steps))
        self._withdrawn.append(steps)
        letter.handle.fail(error)

    def withdraw(self, receiver: int, number: int, error: BaseException) -> None:
        """Fails the send of this number to a rank, if it has not ended."""
        for letter, steps in list(self._moving):
            if letter.outgoing and (letter.peer, letter.number) == (receiver, number):
                self._withdraw(letter, steps, error)

    def drop(self, sender: int, number: int) -> None:
        """Receives and discards a message whose send has failed on the sender."""
        for header in [header for (peer, _), queue in self._arrived.items() for header in queue if peer == sender]:
            if self._numbers[sender, header.serial] == number:
                self.start(Letter(header.name, sender, None, Handle(header.name), outgoing=False), header)

    def drop_all(self) -> None:
        """Receives and discards all messages for which no receive has begun: all ranks have left."""
        for sender, number in self.unclaimed:
            self.drop(sender, number)

    def drop_unwanted(self) -> None:
        """Discards messages that arrived after this rank's goodbye from ranks from which it still wanted one then.

        These ranks cannot know which of their messages this rank wanted, so they send all of them.
        """
        for sender, number in self.unclaimed:
            if number > self._heard_at_goodbye.get(sender, math.inf):
                self.drop(sender, number)

    def _comes_from(self, sender: int) -> bool:
        """Returns whether a rank that has left has sent messages for which no receive has begun."""
        return self._heard[sender] < self._left[sender].sent or any(peer == sender for peer, _ in self._arrived)

    def _end_receives(self, sender: int) -> None:
        """Fails the receives from a rank that has left, once all its messages have arrived."""
        if sender not in self._left or self._heard[sender] < self._left[sender].sent:
            return
        for key in [key for key in self._wanted if key[0] == sender]:
            for letter in self._wanted.pop(key):
                letter.handle.fail(ShutdownError(letter.name, (sender,), message=True))

    def give_up(self, sender: int, name: str) -> list[Letter]:
        """Removes the receives of a name for which nothing has arrived, and returns them."""
        return [*self._wanted.pop((sender, name), ())]

    def take_back(self, handle: Handle[Any]) -> bool:
        """Cancels a receive if nothing has arrived for it; returns whether it did."""
        for key, queue in self._wanted.items():
            if mine := [letter for letter in queue if letter.handle is handle]:
                queue.remove(mine[0])
                if not queue:
                    del self._wanted[key]
                handle.fail(ShutdownError(handle.name))
                return True
        return False

    def advance(self) -> bool:
        """Drives the sends and receives in flight; returns whether a header arrived or an operation completed."""
        heard = self._listen()
        if self._withdrawn:
            self._withdrawn = [steps for steps in self._withdrawn if next(steps, _DONE) is not _DONE]
        if not self._moving:
            return heard
        done = [moving for moving in self._moving if next(moving[1], _DONE) is _DONE]
        for moving in done:
            self._moving.remove(moving)
        return heard or bool(done)

    def waiting(self) -> Iterator[tuple[float, Waiting]]:
        """Yields the sends and receives in flight, with their start times."""
        for letter in self.letters:
            yield letter.handle.submitted, Waiting(letter.name, letter.word, (letter.peer,))

    def clear(self) -> list[Letter]:
        """Abandons all sends and receives, and returns them."""
        letters = self.letters
        self._wanted.clear()
        # Their buffers live on, because the network may still write into them.
        self._abandoned += self._moving
        self._moving.clear()
        if self._listening is not None:
            self._lane.cancel(self._listening)
            self._listening = None
        return letters

    def _send(self, letter: Letter, array: np.ndarray) -> Steps:
        serial = next(_serials)
        near = letter.peer in self.notes
        loan = self.notes.loans.lend(array) if near else None
        header = _Header(
            self._rank, serial, letter.name, name_of(array.dtype), array.shape, loan, letter.refused, self._after
        )
        tickets = []
        if near:
            yield from self._note(letter.peer, _encoded(header))
        else:
            tickets.append(self._lane.isend(_frame(header), letter.peer, _HEADER_TAG))
        if loan is None:
            self.lane_messages += 1
            payload = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            tickets += [self._lane.isend(part, letter.peer, self._tag(header)) for part in _parts(payload)]
        while tickets and not self._lane.done(tickets):
            yield
        if not letter.handle.poll():  # else it has failed meanwhile
            self._finish(letter, array, header)

    def _note(self, peer: int, data: bytes) -> Steps:
        """Leaves a note with a neighbour, once the notes before it are left."""
        line = self._lines.setdefault(peer, deque())
        line.append(data)
        while line[0] is not data or not self.notes.put(peer, data):
            yield
        line.popleft()

    def _tag(self, header: _Header) -> int:
        return _HEADER_TAG + 1 + header.serial % (self._lane.tags - 1)

    def _finish(self, letter: Letter, array: np.ndarray, header: _Header) -> None:
        self.done[letter.word] += 1
        self.bytes[letter.word] += array.nbytes
        if (tape := self._deck.tape) is not None:
            spot, since = (header.sender, header.serial), letter.handle.submitted
            tape.delivered(letter.word, letter.name, letter.peer, spot=spot, nbytes=array.nbytes, since=since)
        letter.finish(array)

    def peek(self) -> bool:
        """Takes in headers from other hosts, too, though no receive waits for one; returns whether there were any."""
        return self._listen(anyway=True)

    def _listen(self, *, anyway: bool = False) -> bool:
        """Takes in headers, those of other hosts only while a receive waits for one; returns whether there were any."""
        heard = False
        for data in self.notes.take():
            heard = True
            self._sort(msgspec.msgpack.decode(data, type=_Header))
        while self._waits_afar or anyway:
            if self._listening is None:
                self._listening = self._lane.irecv(self._slot, ANY, _HEADER_TAG)
            if not self._lane.done([self._listening]):
                break
            heard = True
            self._listening = None
            length = int.from_bytes(self._slot[:4].tobytes(), "big")
            header = msgspec.msgpack.decode(self._slot[4 : 4 + length].tobytes(), type=_Header)
            self._sort(header)
        return heard

    def note_failed(self, plan: int) -> None:
        """Records that a plan failed sends and receives: messages that arrive now may have been sent after that."""
        self._after = plan
        held, self._held = self._held, deque()
        for header in held:
            self._sort(header)

    def _sort(self, header: _Header) -> None:
        """Matches a header with a receive; a header sent after a failure waits until this rank knows of the failure."""
        if header.after > self._after or any(earlier.sender == header.sender for earlier in self._held):
            self._held.append(header)
            return
        self._heard[header.sender] += 1
        key = (header.sender, header.name)
        queue = self._wanted.get(key)
        if header.loan is None:
            self.lane_messages += 1
            self._make_way(header)
        if not queue:
            self._arrived.setdefault(key, deque()).append(header)
            self._numbers[header.sender, header.serial] = self._heard[header.sender]
            if header.loan is None:
                self._unclaimed[header.sender, self._tag(header)] = header
        else:
            letter = queue.popleft()
            if not queue:
                del self._wanted[key]
            self._accept(letter, header)
        self._end_receives(header.sender)

    def _make_way(self, header: _Header) -> None:
        """Takes in a payload that no receive has asked for yet, because a new message has the same tag.

        There are as many tags as MPI has, at least 32767; then the first is used again.
        """
        if (older := self._unclaimed.pop((header.sender, self._tag(header)), None)) is not None:
            raw = np.empty(_size(older), np.uint8)
            self._early[older.sender, older.serial] = raw, self._take(raw, older)

    def _take(self, raw: np.ndarray, header: _Header) -> list[Ticket]:
        return [self._lane.irecv(part, header.sender, self._tag(header)) for part in _parts(raw)]

    def _accept(self, letter: Letter, header: _Header) -> None:
        steps = self._receive(letter, header)
        if header.loan is None and next(steps, _DONE) is _DONE:  # now: later messages may have the same tag
            return
        self._moving.append((letter, steps))

    def _receive(self, letter: Letter, header: _Header) -> Steps:
        """Takes the payload in, and only then compares: a sent message must be taken, whether it fits or not."""
        sent, wanted = _describe(header.dtype, header.shape), letter.array
        fits = wanted is not None and sent == _describe(name_of(wanted.dtype), wanted.shape)
        early = self._early.pop((header.sender, header.serial), None)
        direct = fits and header.loan is None and early is None and wanted is not None and wanted.flags.c_contiguous
        if header.loan is not None:
            raw = self.notes.loans.take(letter.peer, header.loan, _size(header))
        else:
            if early is None:
                if direct and wanted is not None:
                    raw = wanted.reshape(-1).view(np.uint8)
                else:
                    raw = np.empty(_size(header), np.uint8)
                early = raw, self._take(raw, header)
            raw, tickets = early
            while not self._lane.done(tickets):
                yield
        self._hand_over(letter, header, raw, direct=direct)

    def _hand_over(self, letter: Letter, header: _Header, raw: np.ndarray, *, direct: bool) -> None:
        """Ends a receive with its payload; ``direct`` means that it is in the receiver's array already."""
        sent, wanted = _describe(header.dtype, header.shape), letter.array
        if header.refused:
            letter.handle.fail(RefusedError(header.sender, header.refused))
        elif wanted is None:
            self._finish(letter, raw.view(dtype_of(header.dtype)).reshape(header.shape), header)
        elif direct or sent == _describe(name_of(wanted.dtype), wanted.shape):
            if not direct:
                wanted[...] = raw.view(wanted.dtype).reshape(wanted.shape)
            self._finish(letter, wanted, header)
        else:
            here = _describe(name_of(wanted.dtype), wanted.shape)
            values: Disagreement = [(sent, [letter.peer], []), (here, [self._rank], [])]
            letter.handle.fail(MismatchError(letter.name, "tensor that is sent and received", values))


def _encoded(header: _Header) -> bytes:
    data = msgspec.msgpack.encode(header)
    if len(data) > _HEADER_BYTES - 4:
        text = f"the name {header.name[:40]!r}… is too long to be sent: use at most 1000 characters"
        raise ArgumentError(text)
    return data


def _frame(header: _Header) -> np.ndarray:
    data = _encoded(header)
    frame = np.zeros(_HEADER_BYTES, np.uint8)
    frame[: 4 + len(data)] = np.frombuffer(len(data).to_bytes(4, "big") + data, np.uint8)
    return frame


def _size(header: _Header) -> int:
    return math.prod(header.shape) * item_size(header.dtype)


def _parts(raw: np.ndarray) -> list[np.ndarray]:
    return [raw[start : start + _PART_BYTES] for start in range(0, raw.size, _PART_BYTES)]


def _describe(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"
