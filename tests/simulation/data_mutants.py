"""Bugs of the data plane, each of which its simulation must find."""

from __future__ import annotations

from collections import Counter

from coordd.collectives import scheduler
from coordd.collectives.dispatch import Plane
from coordd.collectives.scheduler import Flights
from coordd.negotiation.sequence_numbers import Numbering
from coordd.transport.shared_memory.board import Board
from coordd.transport.shared_memory.host_memory import Meeting
from tests.simulation.planting import Mutants

DATA_MUTANTS = Mutants()
mutant = DATA_MUTANTS.enter


@mutant
def takes_slots_in_any_order(monkeypatch):
    """As it was once; without the check in `Meeting.enter`, which came later."""

    def _start(self):
        flying = Counter(flight.bucket.request.members for flight in self._active if flight.bucket is not None)
        ready = [
            queue.popleft()
            for members, queue in self._queues.items()
            for _ in range(min(scheduler._ACTIVE - flying[members], len(queue)))
        ]
        self._active += [scheduler._Flight(bucket, self._turn(bucket)) for bucket in ready]
        self._queues = {members: queue for members, queue in self._queues.items() if queue}
        return bool(ready)

    monkeypatch.setattr(Flights, "_start", _start)
    unchecked(monkeypatch)


@mutant
def gives_slots_to_all_sets_in_turn(monkeypatch):
    """The rule of once, whole: 64 slots for all sets together, or as few as the run has."""

    def next_(self, members):
        self._sequence += 1
        return self._sequence, self._sequence % min(64, self._depth * len(self._taken))

    DATA_MUTANTS["takes_slots_in_any_order"](monkeypatch)
    monkeypatch.setattr(Numbering, "next", next_)


def unchecked(monkeypatch):
    """Lets stamps go back."""
    enter = Meeting.enter

    def _enter(self, *, word=True):
        over = self._before is None or self._before.over()
        if over and self._words[self._base] >= self.stamp:
            self._words[self._base] = 0
        return enter(self, word=word)

    monkeypatch.setattr(Meeting, "enter", _enter)


@mutant
def takes_a_slot_that_others_still_read(monkeypatch):
    monkeypatch.setattr(Meeting, "over", lambda self: True)


@mutant
def forgets_that_others_may_have_come_before_it_slept(monkeypatch):
    def nod_off(self):
        self._plane.fall_asleep(data=len(self) > 0)
        return False

    monkeypatch.setattr(Flights, "nod_off", nod_off)


@mutant
def rings_for_messages_only(monkeypatch):
    ring = Board.ring
    monkeypatch.setattr(Board, "ring", lambda self, what=1: ring(self, min(what, 1)))
    monkeypatch.setattr("coordd_tools.sim.memory._Board.ring", lambda self, what=1: None)


@mutant
def lets_words_on_a_bucket_overtake_each_other(monkeypatch):
    def _locked(self, word, spot, line):
        if word.bucket is None:
            yield from self._plane.refuse(spot)
        else:
            yield from self._allreduce(spot, word.bucket, word)
        line.remove(word)

    monkeypatch.setattr(Flights, "_locked", _locked)
    unchecked(monkeypatch)


@mutant
def asks_other_hosts_that_are_not_there(monkeypatch):
    """A refusal, while an adaptive sum is on the lane."""
    refuse = Plane.refuse

    def _refuse(self, spot):
        if self._commons is None or len(self._commons.ranks) < len(self.world) or self.heralded:
            yield from refuse(self, spot)
            return
        way = self._way(())
        meeting = self._commons.meeting(spot.slot, spot.stamp, way.neighbours)
        while not meeting.enter(word=False):
            yield
        yield from self._agree_on_levels(spot, meeting, way, valid=False)
        meeting.finish()

    monkeypatch.setattr(Plane, "refuse", _refuse)


@mutant
def keeps_what_it_has_borrowed(monkeypatch):
    monkeypatch.setattr("coordd.transport.shared_memory.host_memory.Commons.give_back", lambda self, block: None)
