"""Records every submission and its outcome, and checks that the outcome is right.

The invariants are those of a coordination protocol: nothing is lost, nothing is carried out twice, a tensor is released
only when all members have announced the same, and an error reaches exactly the affected ranks, with the same text.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable

import numpy as np

from coordd.errors import DuplicateNameError, MismatchError, PeerError, RefusedError, ShutdownError
from coordd.negotiation.tensor_table import Entry, show_site
from coordd.ops.handles import Handle
from coordd.ops.messages import Kind, Plan, StallReport
from coordd_tools.sim.script import ROOTLESS, Part, Round, Script
from coordd_tools.sim.verdicts import quarrel_text
from coordd_tools.sim.waits import Turn, Waits

__all__ = ["LOCKED", "Ledger", "Submission", "Violation", "demand"]

_SCRIPT = compile("", "train.py", "exec")
_ARRAY = np.empty(0)
LOCKED = "locked allreduce"


class Violation(AssertionError):  # noqa: N818 - not an error of the program, but what it has found
    """An invariant of the protocol does not hold."""


def demand(holds: object, text: str) -> None:
    """Checks an invariant.

    Raises:
        Violation: it does not hold.
    """
    if not holds:
        raise Violation(text)


class Submission(Handle[object]):
    """The handle of one tensor that one rank has submitted; it knows its round."""

    __slots__ = ("duplicate", "entry", "ledger", "outcome", "part", "rank", "turn")

    def __init__(self, ledger: Ledger, rank: int, turn: Round, *, duplicate: bool) -> None:
        super().__init__(turn.name)
        self.ledger = ledger
        self.rank = rank
        self.turn = turn
        self.part: Part = turn.parts[rank]
        self.duplicate = duplicate
        self.outcome: object = self
        self.entry = Entry(self.part.request, _ARRAY, self, site=(_SCRIPT, self.part.line), filler=self.part.filler)
        self.entry.patient = self.part.request.kind is Kind.JOIN

    @property
    def failed(self) -> bool:
        """Whether it ended with an error."""
        return isinstance(self.outcome, BaseException)

    @property
    def open(self) -> bool:
        """Whether the coordinator may still wait for it: it is pending, or failed here with a `PeerError`."""
        return self.outcome is self or isinstance(self.outcome, PeerError)

    def reuse(self, entry: Entry) -> None:
        """Reuses the entry of an earlier submission in place of a new one, as plugins do with gradients."""
        entry.request, entry.site, entry.filler = self.entry.request, self.entry.site, self.entry.filler
        entry.handle = self
        self.entry = entry

    def resolve(self, result: object) -> None:
        """Completes the submission; the ledger checks the outcome."""
        self.ledger.settle(self, result)
        super().resolve(result)

    def fail(self, error: BaseException) -> None:
        """Fails the submission; the ledger checks the outcome."""
        self.ledger.settle(self, error)
        super().fail(error)
        if not self.turn.free:
            self.error()  # the script learns of the error at once

    def __repr__(self) -> str:
        return f"round {self.turn.number} ({self.turn.name}) on rank {self.rank}"


class Ledger:
    """All submissions of a run."""

    def __init__(self, script: Script) -> None:
        self.failed = False
        self.submissions: list[Submission] = []
        self.waits = Waits()
        self.ended: set[Turn] = set()
        self.gone: set[int] = set()
        self.receipts: list[Handle[object]] = []
        self._leavers = frozenset(script.leavers)
        self._entries: dict[tuple[int, str], Entry] = {}
        self._by_round: dict[Round, dict[int, Submission]] = defaultdict(dict)
        self._reported: dict[int, deque[tuple[int, list[Submission]]]] = defaultdict(deque)
        self._locks: list[tuple[int, frozenset[str]]] = []
        self._heard: dict[Round, set[int]] = defaultdict(set)
        self._texts: dict[Round, str] = {}
        self._condemned: set[str] = set()

    def submit(self, rank: int, turn: Round, *, duplicate: bool = False) -> Submission:
        """Records a submission."""
        made = Submission(self, rank, turn, duplicate=duplicate)
        self.submissions.append(made)
        if not duplicate:
            if not self.failed:  # after a failure, data may still be on its way to an entry whose handle has failed
                made.reuse(self._entries.setdefault((rank, turn.name), made.entry))
            again = turn.free and rank in self._by_round[turn] and not self._by_round[turn][rank].open
            demand(again or rank not in self._by_round[turn], f"{made!r} was submitted twice: the simulator is wrong")
            self._by_round[turn][rank] = made
            self.waits.submit(rank, turn)
        return made

    def report(self, rank: int, entries: Iterable[Entry], *, seen: int) -> None:
        """Records the contents of a report of this rank, and the last plan it had seen."""
        told = [entry.handle for entry in entries]
        self._reported[rank].append((seen, [made for made in told if isinstance(made, Submission)]))

    def hear(self, rank: int) -> None:
        """Records that the coordinator received a rank's next report; tensors overtaken by a lock do not count."""
        seen, told = self._reported[rank].popleft()
        for made in told:
            joins = made.part.request.kind is Kind.JOIN
            if not any(number > seen and (joins or made.turn.name in names) for number, names in self._locks):
                self._heard[made.turn].add(rank)

    def lock(self, number: int, names: frozenset[str]) -> None:
        """Records that a plan locks names: their incomplete announcements do not count any more."""
        self._locks.append((number, names))
        for turn, ranks in self._heard.items():
            if turn.name in names and len(ranks) < len(turn.parts):
                ranks.clear()

    def agree(self, turn: Round) -> None:
        """Records that all members have voted valid on a round."""
        self._heard[turn].update(turn.parts)

    def heard(self, turn: Round) -> bool:
        """Returns whether the coordinator has received, from each member of a round, its announcement or its join."""
        return self._missing(turn) == ()

    def _missing(self, turn: Round) -> tuple[int, ...]:
        """Returns the members from which the coordinator has received neither an announcement nor a join."""
        joined = self._heard[turn.join] if turn.join is not None else set()
        return tuple(sorted(({*turn.members} - self._heard[turn]) | (turn.absent - joined)))

    def settle(self, made: Submission, outcome: object) -> None:
        """Checks how a submission ended."""
        shown = repr(outcome) if outcome is None or isinstance(outcome, BaseException) else "data"
        demand(made.outcome is made, f"{made!r} ended twice, then with {shown}")
        made.outcome = outcome
        if isinstance(outcome, PeerError):
            demand(self.failed, f"{made!r} failed with {shown} though no rank has failed")
        elif made.duplicate or isinstance(outcome, DuplicateNameError):
            named = isinstance(outcome, DuplicateNameError) and show_site(made.entry.site) in str(outcome)
            demand(made.duplicate and named, f"{made!r}, duplicate: {made.duplicate}, ended with {shown}")
        elif isinstance(outcome, ShutdownError):
            gone = set(outcome.ranks)
            true = gone & self._leavers and gone <= {*made.turn.members}
            demand(true or (self.failed and not gone), f"{made!r} was refused with {shown}")
        elif isinstance(outcome, RefusedError):
            demand(outcome.rank in made.turn.refusers, f"{made!r} failed with {shown}; {made.turn.refusers} refuse it")
        elif isinstance(outcome, MismatchError) and outcome.attribute == "order":
            demand(made.turn.free, f"{made!r} failed with {shown}, though no ranks can wait for each other")
            self._heard[made.turn].discard(made.rank)
        elif isinstance(outcome, MismatchError):
            self._quarrel(made, outcome)
        else:
            demand(not made.turn.quarrel, f"{made!r} was carried out, but the {made.turn.quarrel} differ")
            demand(self.heard(made.turn), f"{made!r} was carried out before all members had announced it")
            demand(made.turn.void == (outcome is None), f"{made!r} ended with {shown}, void is {made.turn.void}")

    def _quarrel(self, made: Submission, error: MismatchError) -> None:
        """Checks that a mismatch is real, and that its text is the same on all ranks."""
        turn = made.turn
        wanted = "root rank" if turn.quarrel == ROOTLESS else turn.quarrel
        demand(error.attribute == wanted, f"{made!r} has {error!r}; in truth it is {turn.quarrel or 'well'!r}")
        text = self._texts.setdefault(turn, str(error))
        demand(str(error) == text, f"{made!r} was told {str(error)!r}, another rank {text!r}")
        if turn.quarrel != "process set":
            demand(self.heard(turn), f"{made!r} was refused before all members had announced it")
            expected = quarrel_text(turn)  # Horovod's text comes before it
            demand(text.endswith(expected), f"{made!r} was told {text!r} in place of {expected!r}")

    def judge(self, plan: Plan) -> None:
        """Checks that operations a plan fails as deadlocked belong to ranks that really wait for each other."""
        failed = [response for response in plan.responses if response.attribute == "order"]
        if not (failed or plan.unmatched) or self.failed:
            return
        blocked = self.waits.deadlocked(self._pending)
        for each in plan.unmatched:
            both = {each.rank, each.peer} <= blocked
            demand(both, f"{each.name!r} fails on {each.rank}; {blocked or 'no'} ranks wait for each other")
        for response in failed:
            name, told = response.request.name, {*response.recipients}
            missing = {*(response.request.members or self.waits.ranks)} - told
            owed = len(told) == 1 and not told & blocked  # a rank that submits after the decision, unaware of it
            true = (told & blocked and missing & blocked) or (owed and name in self._condemned)
            demand(true, f"{name!r} fails on {told}; in truth {blocked or 'no'} ranks wait for each other")
            self._condemned.add(name)

    def _pending(self, turn: Turn) -> set[int] | None:
        """Returns the ranks whose part of a round or message is pending; None if one of them has completed its part."""
        if not isinstance(turn, Round):
            return None if turn in self.ended else {turn.members[-1]}
        told = self._by_round[turn]
        if any(not isinstance(made.outcome, BaseException | Submission) for made in told.values()):
            return None
        return {rank for rank, made in told.items() if made.outcome is made}

    def stalled(self, report: StallReport, *, exact: bool) -> None:
        """Checks that a stall report names the ranks whose announcements the coordinator has not received.

        Args:
            report: its contents.
            exact: whether it may name no other rank; below foremen, which may still hold reports, it may.
        """
        for waiting in report.waiting:
            if waiting.operation == LOCKED:
                continue
            truths = [
                self._missing(turn)
                for turn, told in self._by_round.items()
                if turn.name == waiting.name and any(made.open for made in told.values())
            ]
            named = waiting.missing
            told = named in truths if exact else any({*named} >= {*missing} for missing in truths)
            fits = told if named and not (self._quarrels(waiting.name) or self._fails(waiting.name)) else True
            demand(fits, f"a stall report says that {waiting.name} waits for {waiting.missing}; in truth: {truths}")

    def _quarrels(self, name: str) -> bool:
        return any(turn.quarrel == "process set" for turn in self._by_round if turn.name == name)

    def _fails(self, name: str) -> bool:
        """Whether a refusal or a deadlock may have withdrawn announcements of a name from the coordinator."""
        return any(turn.free or turn.refusers for turn in self._by_round if turn.name == name)

    def waiting(self) -> str:
        """Lists the submissions in flight."""
        return ", ".join(f"{made!r}" for made in self.submissions if made.outcome is made) or "nothing is in flight"

    def close(self, *, dead: Iterable[int], fatal: bool) -> None:
        """Checks at the end that every submission of a live rank has ended, in the same way on all members."""
        for made in self.submissions:
            demand(made.rank in dead or made.outcome is not made, f"{made!r} never ended")
        for receipt in self.receipts:
            demand(receipt.poll() or getattr(receipt, "rank", -1) in dead, f"{receipt!r} never ended")
        if not fatal:
            for turn, told in self._by_round.items():
                kinds = {type(made.outcome).__name__ for made in told.values()}
                if turn.free and turn.refusers:  # ranks may have waited for each other before the refusal arrived
                    kinds.discard("RefusedError")
                demand(len(kinds) <= 1, f"round {turn.number} ({turn.name}) ended differently: {kinds}")
