"""What the ranks below a foreman have announced, added up until all of them have said the same.

Pure. It looks for sameness only and judges nothing: each report that it makes is true of exactly the ranks that it
names, so what it fails to add up costs a longer message and nothing else. It adds up in three ways, the cheapest first:
bits over the cache's slots, whole batches by their bytes, and single tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

from coordd.ballot import lowest
from coordd.messages import Announcement, Plan, Report, Request
from coordd.wire import Batch, bits, mask

__all__ = ["Tally"]

_SILENT_PLANS = 256

Part = Announcement | bool
"""What can be said of a tensor: an announcement, or its slot's bit, which may be a filler's."""

Key = tuple[str, tuple[int, ...]] | int
"""A tensor: its name and process set, or its slot."""


class _Tensor:
    """Who has said what about one tensor; ranks are bits, those of ``passed`` have been reported."""

    __slots__ = ("parts", "passed", "told", "turn", "wanted")

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.told = 0
        self.passed = 0
        self.parts: dict[Part, int] = {}
        self.turn = (0, 0)


class _Sum:
    """One batch, word for word, and who has said it."""

    __slots__ = ("batch", "told", "wanted")

    def __init__(self, batch: Batch, wanted: int) -> None:
        self.batch = batch
        self.wanted = wanted
        self.told = 0


class Tally:
    """Adds up the reports of the children of one foreman."""

    def __init__(self, spans: Mapping[int, int], *, batch: int = 32) -> None:
        """Starts with nothing said.

        Args:
            spans: for each child the bit mask of the ranks that it speaks for.
            batch: how many new tensors at a time are worth comparing as a whole.
        """
        self._batch = batch
        self._spans = dict(spans)
        self._span = sum(spans.values())
        self._seen = 0
        self._reported = 0
        self._floors = dict.fromkeys(spans, 0)
        self._announced = dict.fromkeys(spans, 0)
        self._filled = dict.fromkeys(spans, 0)
        self._requests: dict[int, Request] = {}
        self._changed: dict[int, int] = {}
        self._last_change = 0
        self._slots_of: dict[tuple[int, ...], int] = {}
        self._speakers: dict[tuple[int, ...], list[int]] = {}
        self._sums: dict[bytes, _Sum] = {}
        self._tensors: dict[Key, _Tensor] = {}
        self._loose = 0
        self._due: dict[Key, _Tensor] = {}
        self._turn = 0
        self._out: list[Report] = []

    @property
    def holds(self) -> bool:
        """Whether something has been said that is not yet reported."""
        return bool(self._sums or self._due) or any(self._announced.values())

    def hear(self, child: int, report: Report) -> None:
        """Enters what a child has new."""
        self._floors[child] = max(self._floors[child], report.seen if report.floor < 0 else report.floor)
        ranks = int.from_bytes(report.ranks, "little") or self._spans[child]
        hits = int.from_bytes(report.hits, "little")
        if hits:
            fillers = int.from_bytes(report.fillers, "little")
            if old := self._outdated(report.seen, hits):
                self._out.append(self._report(seen=report.seen, hits=old, fillers=old & fillers, ranks=ranks))
                hits &= ~old
            for slot in bits(hits & (-1 if report.ranks else self._loose)):
                hits &= ~(1 << slot)
                self._count(slot, ranks, filler=bool(fillers >> slot & 1))
            self._announced[child] |= hits
            self._filled[child] |= hits & fillers
        if report.fresh:
            self._add(ranks, report.fresh)

    def follow(self, plan: Plan) -> None:
        """Learns from a plan what the slots mean, and who has got an answer.

        What was said before the plan is reported first if it could be misunderstood afterwards.
        """
        changed = [response for response in plan.responses if response.slot >= 0]
        slots = sum(1 << slot for slot in {response.slot for response in changed})
        if slots & (self._loose | self._said_by_any()):
            self._flush()
        self._seen = plan.sequence
        for response in changed:
            self._learn(response.slot, response.request)
        for response in plan.responses:
            if response.recipients:
                self._forget(response.request.name, sum(1 << rank for rank in response.recipients))

    def turn(self, *, late: bool = False) -> list[Report]:
        """Reports what all have said alike; and the rest, too, if it is late."""
        self._pass_bits()
        if late:
            self._flush()
        else:
            self._pass_sums()
            self._pass_tensors(late=False)
        out, self._out = self._out, []
        if not out and min(self._floors.values()) - self._reported >= _SILENT_PLANS:
            out = [self._report()]  # a sign of life, so that what older reports might refer to can be forgotten
        if out:
            self._reported = out[-1].floor
        return out

    # Known tensors, by bits.

    def _pass_bits(self) -> None:
        ready = filled = 0
        for members, slots in self._slots_of.items():
            common = fillers = slots
            for child in self._speakers[members]:
                common &= self._announced[child]
                fillers &= self._filled[child]
            ready |= common
            filled |= fillers
        if ready:
            self._out.append(self._report(hits=ready, fillers=ready & filled))
            for child in self._spans:
                self._announced[child] &= ~ready
                self._filled[child] &= ~ready

    def _said_by_any(self) -> int:
        said = 0
        for slots in self._announced.values():
            said |= slots
        return said

    def _outdated(self, seen: int, hits: int) -> int:
        """The hits whose slots have changed hands since."""
        if seen >= self._last_change:
            return 0
        return sum(1 << slot for slot in bits(hits) if self._changed[slot] > seen)

    def _learn(self, slot: int, request: Request) -> None:
        """Notes what a slot holds, and which children have a part in it."""
        if slot in self._tensors:
            self._end(slot)  # who has yet to announce what the slot held before will be outdated
        self._changed[slot] = self._last_change = self._seen
        if (former := self._requests.get(slot)) is not None and former.members in self._slots_of:
            self._slots_of[former.members] &= ~(1 << slot)
            if not self._slots_of[former.members]:
                del self._slots_of[former.members], self._speakers[former.members]
        self._requests[slot] = request
        if request.members not in self._slots_of:
            wanted = self._wanted(request.members)
            if not wanted:
                return
            self._speakers[request.members] = [child for child, span in self._spans.items() if span & wanted]
        self._slots_of[request.members] = self._slots_of.get(request.members, 0) | 1 << slot

    # New tensors, in batches.

    def _add(self, ranks: int, announcements: tuple[Announcement, ...]) -> None:
        """Keeps a long batch as it is, as long as nobody says part of it in other words."""
        if len(announcements) < self._batch:
            self._enter_all(ranks, announcements)
            return
        batch = announcements if isinstance(announcements, Batch) else Batch(announcements)
        if (kept := self._sums.get(batch.data)) is None:
            wanted = 0
            for members in {announcement.request.members for announcement in batch}:
                wanted |= self._wanted(members)
            kept = self._sums[batch.data] = _Sum(batch, wanted)
        kept.told |= ranks & kept.wanted

    def _pass_sums(self) -> None:
        """Reports what all have said word for word; looks at single tensors where they did not."""
        for key in [key for key, kept in self._sums.items() if kept.told == kept.wanted]:
            self._out.append(self._report(fresh=self._sums.pop(key).batch))
        told = 0
        for kept in self._sums.values():
            told |= kept.told
        if self._tensors or any(not kept.wanted & ~told for kept in self._sums.values()):
            self._take_apart()

    def _take_apart(self) -> None:
        sums, self._sums = self._sums, {}
        for kept in sums.values():
            self._enter_all(kept.told, kept.batch)

    # Single tensors.

    def _count(self, slot: int, ranks: int, *, filler: bool) -> None:
        """Counts a known tensor singly; the other children's bits for it, too."""
        if not self._loose >> slot & 1:
            self._loosen(1 << slot)
        self._enter(slot, ranks, filler, self._requests[slot].members)

    def _loosen(self, slots: int) -> None:
        """Takes what was said in bits apart."""
        self._loose |= slots
        for child, span in self._spans.items():
            for slot in bits(self._announced[child] & slots):
                self._enter(slot, span, bool(self._filled[child] >> slot & 1), self._requests[slot].members)
            self._announced[child] &= ~slots
            self._filled[child] &= ~slots

    def _enter_all(self, ranks: int, announcements: Iterable[Announcement]) -> None:
        for announcement in announcements:
            members = announcement.request.members
            self._enter((announcement.request.name, members), ranks, announcement, members)

    def _enter(self, key: Key, ranks: int, part: Part, members: tuple[int, ...]) -> None:
        if (tensor := self._tensors.get(key)) is None:
            tensor = self._tensors[key] = _Tensor(self._wanted(members))
        ranks &= tensor.wanted
        if not tensor.told or lowest(ranks) < lowest(tensor.told):
            self._turn += 1
            tensor.turn = (lowest(ranks), self._turn)
        tensor.told |= ranks
        tensor.parts[part] = tensor.parts.get(part, 0) | ranks
        self._due[key] = tensor

    def _pass_tensors(self, *, late: bool) -> None:
        """Reports single tensors: those that all have announced, or, if it is late, whatever was said."""
        due = [(key, tensor) for key, tensor in self._due.items() if late or tensor.told == tensor.wanted]
        said: dict[int, list[tuple[Key, Part]]] = {}
        for key, tensor in sorted(due, key=_turn_of):
            del self._due[key]
            for part, ranks in tensor.parts.items():
                whole = ranks == tensor.wanted and not tensor.passed
                said.setdefault(0 if whole else ranks, []).append((key, part))
            tensor.passed, tensor.parts = tensor.told, {}
            if tensor.told == tensor.wanted:
                self._end(key)
        self._out += [self._spell(ranks, parts) for ranks, parts in said.items()]

    def _spell(self, ranks: int, said: Iterable[tuple[Key, Part]]) -> Report:
        hits = fillers = 0
        fresh = []
        for key, part in said:
            if isinstance(key, int):
                hits |= 1 << key
                fillers |= (part is True) << key
            elif isinstance(part, Announcement):
                fresh.append(part)
        return self._report(hits=hits, fillers=fillers, fresh=tuple(fresh), ranks=ranks)

    def _end(self, key: Key) -> None:
        del self._tensors[key]
        if isinstance(key, int):
            self._loose &= ~(1 << key)

    def _forget(self, name: str, ranks: int) -> None:
        """Drops what ranks have announced under a name: they were refused."""
        for key in [key for key in self._tensors if self._name(key) == name]:
            tensor = self._tensors[key]
            tensor.told &= ~ranks
            tensor.passed &= ~ranks
            if not tensor.told:
                self._due.pop(key, None)
                self._end(key)

    def _name(self, key: Key) -> str:
        return self._requests[key].name if isinstance(key, int) else key[0]

    # Reports.

    def _flush(self) -> None:
        """Reports everything, as far as it has come."""
        self._pass_bits()
        self._pass_sums()
        self._loosen(self._said_by_any())
        self._take_apart()
        self._pass_tensors(late=True)

    def _wanted(self, members: tuple[int, ...]) -> int:
        return _mask(members) & self._span if members else self._span

    def _report(
        self,
        *,
        seen: int | None = None,
        hits: int = 0,
        fillers: int = 0,
        fresh: tuple[Announcement, ...] = (),
        ranks: int = 0,
    ) -> Report:
        floor = min(self._floors.values())
        return Report(self._seen if seen is None else seen, mask(hits), mask(fillers), fresh, mask(ranks), floor)


def _turn_of(item: tuple[Key, _Tensor]) -> tuple[int, int]:
    return item[1].turn


@lru_cache(maxsize=256)
def _mask(ranks: tuple[int, ...]) -> int:
    return sum(1 << rank for rank in ranks)
