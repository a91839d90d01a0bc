"""The aggregator of the tree: combines the reports of the ranks below a foreman until all of them are equal.

Pure. It only compares and validates nothing: each report that it creates is true of exactly the ranks that it names, so
reports that it fails to combine cost a longer message and nothing else. It combines in three ways, the cheapest first:
cached tensors as bits, new ones in whole batches by their bytes, and the rest one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from coordd.negotiation.ballot import lowest, members_mask
from coordd.negotiation.roll import Roll
from coordd.negotiation.wire import Batch, bits, mask
from coordd.ops.messages import SILENT_PLANS, Announcement, Kind, Plan, Report, Request, Response

__all__ = ["Tally"]

Key = tuple[str, tuple[int, ...]]
"""A tensor: its name and process set."""


class _Tensor:
    """The ranks that have announced a new tensor, as bits; ``parts`` are the announcements not reported yet."""

    __slots__ = ("parts", "told", "turn", "wanted")

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted
        self.told = 0
        self.parts: list[tuple[int, Announcement]] = []
        self.turn = (0, 0)

    def enter(self, ranks: int, announcement: Announcement, turn: int) -> None:
        if not self.told or lowest(ranks) < self.turn[0]:
            self.turn = (lowest(ranks), turn)
        self.told |= ranks
        for place, (others, said) in enumerate(self.parts):
            if said == announcement:
                self.parts[place] = (others | ranks, said)
                return
        self.parts.append((ranks, announcement))


class _Sum:
    """One batch, compared byte by byte, and the ranks that have announced it."""

    __slots__ = ("batch", "told", "wanted")

    def __init__(self, batch: Batch, wanted: int) -> None:
        self.batch = batch
        self.wanted = wanted
        self.told = 0


class Tally:
    """Combines the reports of the children of one foreman."""

    def __init__(self, spans: Mapping[int, int], *, batch: int = 32) -> None:
        """Starts with nothing announced.

        Args:
            spans: for each child the bit mask of the ranks that it reports for.
            batch: how many new tensors at a time are worth comparing as a whole.
        """
        self._batch = batch
        self._spans = dict(spans)
        self._span = sum(spans.values())
        self._seen = 0
        self._reported = 0
        self._floors = dict.fromkeys(spans, 0)
        self._roll = Roll()
        self._passed = Roll()
        self._held = 0
        self._requests: dict[int, Request] = {}
        self._slots: dict[str, int] = {}
        self._slots_of: dict[tuple[int, ...], int] = {}
        self._changed: dict[int, int] = {}
        self._last_change = 0
        self._sums: dict[bytes, _Sum] = {}
        self._tensors: dict[Key, _Tensor] = {}
        self._due: dict[Key, _Tensor] = {}
        self._turn = 0
        self._joins: set[str] = set()
        self._dated = 0
        self._unlocked = 0
        self._out: list[Report] = []

    @property
    def holds(self) -> bool:
        """Whether received announcements are not yet reported."""
        return bool(self._held or self._sums or self._due)

    def hear(self, child: int, report: Report) -> None:
        """Enters a child's report."""
        self._floors[child] = max(self._floors[child], report.seen if report.floor < 0 else report.floor)
        ranks = int.from_bytes(report.ranks, "little") or self._spans[child]
        hits = int.from_bytes(report.hits, "little")
        if hits:
            fillers = int.from_bytes(report.fillers, "little")
            if old := self._outdated(report.seen, hits):
                self._out.append(self._report(seen=report.seen, hits=old, fillers=old & fillers, ranks=ranks))
                hits &= ~old
            self._roll.enter(ranks, hits, fillers)
            self._held |= hits
        if report.unlock > self._unlocked:
            self._unlocked = report.unlock
            self._out.append(self._report(seen=report.seen, unlock=report.unlock, lasted=report.lasted, ranks=ranks))
        if any(told.request.kind is Kind.JOIN for told in report.fresh):
            self._join(ranks, report)
        elif report.fresh and report.seen < self._dated:
            # Announcements of tensors that are locked do not count, and only the date shows that.
            self._out.append(self._report(seen=report.seen, fresh=report.fresh, ranks=ranks))
        elif len(report.fresh) >= self._batch:
            self._add(ranks, report.fresh)
        else:
            self._enter(ranks, report.fresh)

    def _join(self, ranks: int, report: Report) -> None:
        """Forwards joins after the ranks' earlier announcements; until the joins end, no report is held back."""
        self._flush()
        self._out.append(self._report(seen=report.seen, fresh=report.fresh, ranks=ranks))
        self._joins |= {told.request.name for told in report.fresh if told.request.kind is Kind.JOIN}

    def follow(self, plan: Plan) -> None:
        """Updates the slots from a plan, and drops the announcements that it answers.

        Announcements from before the plan are reported first if they could be misunderstood afterwards.
        """
        slots = sum(1 << slot for slot in {response.slot for response in plan.responses if response.slot >= 0})
        if plan.lock or slots & self._held:
            self._flush()
        hits = int.from_bytes(plan.hits, "little") | int.from_bytes(plan.voids, "little")
        for slot in bits(hits) if self._tensors else ():
            self._tensors.pop((self._requests[slot].name, self._requests[slot].members), None)
        # Later announcements of a slot's former tensor will be outdated.
        self._roll.drop(slots | hits)
        self._passed.drop(slots | hits)
        self._seen = plan.sequence
        for response in plan.responses:
            self._forget(response)
            if response.slot >= 0:
                self._learn(response.slot, response.request)
        if plan.lock:
            self._lock([slot for group in plan.lock for slot in group])

    def turn(self, *, late: bool = False) -> list[Report]:
        """Reports the announcements that all ranks agree on; all of them if it is late or ranks have joined."""
        if late or self._joins:
            self._flush()
        else:
            self._pass_bits()
            self._pass_sums()
            self._pass_tensors(late=False)
        out, self._out = self._out, []
        if not out and min(self._floors.values()) - self._reported >= SILENT_PLANS:
            out = [self._report()]  # an empty report, so that state that older reports might refer to can be freed
        if out:
            self._reported = out[-1].floor
        return out

    def _flush(self) -> None:
        """Reports everything, complete or not."""
        self._pass_bits()
        self._pass_parts(self._held)
        self._pass_sums()
        self._take_apart()
        self._pass_tensors(late=True)

    def _forget(self, response: Response) -> None:
        """Forgets the ranks that have announced a tensor: they got a result or an error."""
        name, members = response.request.name, response.request.members
        self._joins.discard(name)
        ranks = members_mask(response.recipients) if response.recipients else self._wanted(members)
        if (slot := self._slots.get(name, -1)) >= 0:
            self._roll.withdraw(ranks, slot)
            self._passed.withdraw(ranks, slot)
        if not response.recipients:
            self._tensors.pop((name, members), None)
        for key in [key for key in self._tensors if key[0] == name] if response.recipients else ():
            tensor = self._tensors[key]
            tensor.told &= ~ranks
            if not tensor.told:
                del self._tensors[key]

    # Cached tensors, by bits.

    def _pass_bits(self) -> None:
        """Reports the slots that all ranks have announced, in parts where some were reported before or are fillers."""
        ready = whole = void = 0
        for members, slots in self._slots_of.items() if self._held else ():
            ready |= self._roll.complete(slots & self._held, self._wanted(members))
        for told, filled, slots in self._roll if ready else ():
            if filled in {0, told}:
                whole |= slots & ready
                void |= slots & ready if filled else 0
        if whole := whole & ~self._passed.slots:
            self._out.append(self._report(hits=whole, fillers=whole & void))
        self._pass_parts(ready & ~whole)
        self._roll.drop(ready)
        self._passed.drop(ready)
        self._held &= ~ready

    def _pass_parts(self, slots: int) -> None:
        """Reports which ranks have announced which of some slots."""
        slots &= self._held
        groups = [(told, filled, there) for told, filled, known in self._roll if (there := known & slots)]
        before = [*((passed, there) for passed, _, there in self._passed), (0, ~self._passed.slots)]
        for told, filled, there in groups:
            for passed, known in before:
                if news := there & known:
                    self._tell(told & ~filled & ~passed, news, 0)
                    self._tell(filled & ~passed, news, news)
        for told, _, there in groups:
            self._passed.enter(told, there)
        self._held &= ~slots

    def _tell(self, ranks: int, hits: int, fillers: int) -> None:
        if ranks:
            self._out.append(self._report(hits=hits, fillers=fillers, ranks=ranks))

    def _lock(self, slots: list[int]) -> None:
        """Forgets the announcements of locked slots: the ranks take them back, and report nothing more of them."""
        self._dated = self._last_change = self._seen
        for slot in slots:
            self._changed[slot] = self._seen
            self._tensors.pop((self._requests[slot].name, self._requests[slot].members), None)
        self._roll.drop(sum(1 << slot for slot in slots))
        self._passed.drop(sum(1 << slot for slot in slots))

    def _outdated(self, seen: int, hits: int) -> int:
        """Returns the hits whose slots have been reassigned since."""
        if seen >= self._last_change:
            return 0
        return sum(1 << slot for slot in bits(hits) if self._changed[slot] > seen)

    def _learn(self, slot: int, request: Request) -> None:
        """Records the tensor of a slot."""
        self._changed[slot] = self._last_change = self._seen
        if (former := self._requests.get(slot)) is not None:
            del self._slots[former.name]
            self._slots_of[former.members] &= ~(1 << slot)
            if not self._slots_of[former.members]:
                del self._slots_of[former.members]
        self._requests[slot] = request
        self._slots[request.name] = slot
        self._slots_of[request.members] = self._slots_of.get(request.members, 0) | 1 << slot

    # New tensors, in batches.

    def _add(self, ranks: int, announcements: tuple[Announcement, ...]) -> None:
        """Keeps a long batch as it is, as long as no rank announces part of it differently."""
        batch = announcements if isinstance(announcements, Batch) else Batch(announcements)
        if (kept := self._sums.get(batch.data)) is None:
            wanted = 0
            for members in {announcement.request.members for announcement in batch}:
                wanted |= self._wanted(members)
            kept = self._sums[batch.data] = _Sum(batch, wanted)
        kept.told |= ranks & kept.wanted

    def _pass_sums(self) -> None:
        """Reports the batches that all ranks announce equally; falls back to single tensors where they differ."""
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
            self._enter(kept.told, kept.batch)

    # New tensors, one by one.

    def _enter(self, ranks: int, announcements: Iterable[Announcement]) -> None:
        for announcement in announcements:
            request = announcement.request
            key = (request.name, request.members)
            if (tensor := self._tensors.get(key)) is None:
                tensor = self._tensors[key] = _Tensor(self._wanted(request.members))
            self._turn += 1
            tensor.enter(ranks & tensor.wanted, announcement, self._turn)
            self._due[key] = tensor

    def _pass_tensors(self, *, late: bool) -> None:
        """Reports the tensors that all ranks have announced, or, if it is late, all announcements."""
        due = [(key, tensor) for key, tensor in self._due.items() if late or tensor.told == tensor.wanted]
        said: dict[int, list[Announcement]] = {}
        for key, tensor in sorted(due, key=_turn_of):
            del self._due[key]
            for ranks, announcement in tensor.parts:
                said.setdefault(0 if ranks == tensor.wanted else ranks, []).append(announcement)
            tensor.parts.clear()
            if tensor.told == tensor.wanted:
                del self._tensors[key]
        self._out += [self._report(fresh=tuple(fresh), ranks=ranks) for ranks, fresh in said.items()]

    # Reports.

    def _wanted(self, members: tuple[int, ...]) -> int:
        return members_mask(members) & self._span if members else self._span

    def _report(
        self,
        *,
        seen: int | None = None,
        hits: int = 0,
        fillers: int = 0,
        fresh: tuple[Announcement, ...] = (),
        ranks: int = 0,
        **lock: int,
    ) -> Report:
        floor = min(self._floors.values())
        known = self._seen if seen is None else seen
        return Report(known, mask(hits), mask(fillers), fresh, ranks=mask(ranks), floor=floor, **lock)


def _turn_of(item: tuple[Key, _Tensor]) -> tuple[int, int]:
    return item[1].turn
