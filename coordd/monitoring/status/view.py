"""Interprets a survey: what each rank waits for, and which ranks delay which others. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from coordd.errors import spans
from coordd.monitoring.status.probe_result import Life, Sighting, Survey
from coordd.monitoring.status.report import Operation, Plan, Standing
from coordd.monitoring.straggler import behind

__all__ = ["Row", "duration", "missing", "plan_words", "rows", "size_words", "verdict"]

_LONG_SECONDS = 1.0
_JOIN = "join"


class Row(NamedTuple):
    """One rank: its process, state, last submission, and the ranks that it waits for.

    ``trouble`` is whether the rank needs attention, ``behind`` by how many seconds on average it is later than the
    first rank.
    """

    rank: int
    host: str
    pid: int
    state: str
    last: str = ""
    waits_for: tuple[int, ...] = ()
    seconds: float = 0.0
    trouble: bool = False
    behind: float = 0.0


def rows(survey: Survey) -> list[Row]:
    """Returns one row per rank of the survey."""
    standings = {seen.rank: seen.standing for seen in survey.sightings if seen.standing is not None}
    absent = tuple(seen.rank for seen in survey.sightings if seen.standing is None and not seen.pid)
    leaving = {rank for rank, standing in standings.items() if standing.phase == "leaving"}
    others = tuple(rank for rank in range(survey.size) if rank not in leaving)
    late_by = behind({rank: standing.lead for rank, standing in standings.items()})
    found = []
    for seen in survey.sightings:
        if seen.standing is None:
            found.append(Row(seen.rank, seen.host, seen.pid, _unheard(seen), trouble=True))
        else:
            late = {"starting": absent, "leaving": others}.get(seen.standing.phase, ())
            row = _row(seen.standing, late, standings, survey.size)
            found.append(row._replace(behind=late_by.get(seen.rank, 0.0)))
    return found


def missing(operation: Operation, standings: Mapping[int, Standing], size: int) -> tuple[int, ...]:
    """Returns the ranks that an operation waits for.

    If the waiting rank itself knows the missing ranks, these are returned. Else the result is the members that answered
    and have not submitted the operation or, if there are none, the members that did not answer: they may have been
    stopped before or during the transfer of its data. For an agreed operation only the latter count.
    """
    if operation.missing and operation.stage != "agreed":
        return operation.missing
    members = operation.members or range(size)
    silent = tuple(rank for rank in members if rank not in standings)
    if operation.stage == "agreed":
        return silent
    late = [rank for rank in members if rank in standings and not _has(standings[rank], operation.name)]
    return tuple(late) or silent


def _has(standing: Standing, name: str) -> bool:
    """Returns whether a rank has submitted an operation, has joined, or reports only part of its operations."""
    return standing.more > 0 or any(name == entry.name or entry.kind == _JOIN for entry in standing.operations)


def _row(standing: Standing, late: tuple[int, ...], standings: Mapping[int, Standing], size: int) -> Row:
    last = ""
    if standing.last is not None:
        last = f"{standing.last.name!r} at {standing.last.site}, {duration(standing.last.seconds)} ago"
    row = Row(standing.rank, standing.host, standing.pid, "", last)
    if standing.phase == "failed":
        return row._replace(state=f"the job has failed: {standing.failure}", trouble=True)
    if standing.phase == "starting":
        who = f"{_whom(late, 'has', 'have')} not come" if late else "all ranks are there, and connect"
        state = f"starting for {duration(standing.seconds)}: {who}"
        return row._replace(state=state, waits_for=late, seconds=standing.seconds)
    if not standing.operations:
        return row._replace(state=_at_rest(standing, late), waits_for=late)
    joined = [operation for operation in standing.operations if operation.kind == _JOIN]
    if joined:
        return row._replace(state=f"joined {duration(joined[0].seconds)} ago")
    return _busy(row, standing, standings, size)


def _at_rest(standing: Standing, late: tuple[int, ...]) -> str:
    if standing.phase == "leaving":
        return f"leaving, with {_whom(late, 'still', 'still')} there" if late else "leaving"
    inside = standing.stacks[0].inside if standing.stacks else ""
    return f"in {inside}()" if inside else "computing"


def _busy(row: Row, standing: Standing, standings: Mapping[int, Standing], size: int) -> Row:
    """Describes a rank by its oldest operation that waits for other ranks, or else by its oldest operation."""
    whom = [missing(operation, standings, size) for operation in standing.operations]
    index = next((index for index, ranks in enumerate(whom) if ranks), 0)
    operation, late = standing.operations[index], whom[index]
    count = len(standing.operations) + standing.more
    more = f" and {count - 1:,} more" if count > 1 else ""
    what = f"{operation.name!r} ({operation.kind}){more}"
    seconds = max(entry.seconds for entry in standing.operations)
    waits = bool(standing.stacks and standing.stacks[0].inside)
    if waits:
        state = f"waits for {what} for {duration(seconds)}: {_reason(operation, late)}"
    else:
        state = f"computing; {what} under way for {duration(seconds)}: {_reason(operation, late)}"
    trouble = waits and seconds > _LONG_SECONDS
    return row._replace(state=state, waits_for=late, seconds=seconds, trouble=trouble)


def _reason(operation: Operation, late: tuple[int, ...]) -> str:
    if operation.stage == "matched":
        preposition = "to" if operation.kind == "send" else "from"
        return f"{preposition} {_ranks(late)}"
    if late and operation.stage == "agreed":
        return f"all ranks have it, the data is on the way, and {_whom(late, 'does', 'do')} not answer"
    if late:
        return f"{_whom(late, 'has', 'have')} not submitted it"
    if operation.stage == "held":
        return "held back until the others of its bucket come"
    return "all ranks have it, the data is on the way"


def _unheard(seen: Sighting) -> str:
    if seen.life is Life.DEAD:
        return "dead"
    if not seen.life.can_answer:
        return str(seen.life)
    if not seen.pid:
        return "not seen: it has not called init(), has ended, or runs on another host"
    if seen.cores < 0:
        return seen.reason
    life = seen.life or "in an unknown state"
    return f"{seen.reason} ({life}, {seen.cores:.0%} of a core): native code may hold Python's lock"


def verdict(survey: Survey) -> list[str]:
    """Returns sentences on which ranks delay which others; empty if no rank waits for long and all answer."""
    found = rows(survey)
    state = {row.rank: row for row in found}
    victims: dict[tuple[int, ...], list[Row]] = {}
    for row in found:
        if row.waits_for and row.seconds > _LONG_SECONDS:
            victims.setdefault(row.waits_for, []).append(row)
    waiting = {row.rank for group in victims.values() for row in group}
    sentences = []
    for late, group in victims.items():
        who = [row.rank for row in group]
        seconds = duration(max(row.seconds for row in group))
        sentences.append(f"{_whom(who, 'has', 'have').capitalize()} waited for {_ranks(late)} for {seconds}.")
        sentences += [_sentence(state[rank], survey) for rank in late if rank in state and rank not in waiting]
    told = {rank for late in victims for rank in late}
    sentences += [_sentence(row, survey) for row in found if _is_silent(row) and row.rank not in told]
    return list(dict.fromkeys(sentences))


def _sentence(row: Row, survey: Survey) -> str:
    """Describes what a rank that others wait for is doing, and where."""
    (seen,) = (seen for seen in survey.sightings if seen.rank == row.rank)
    if seen.life is Life.STOPPED and seen.standing is None:
        return f"Rank {row.rank}: stopped; `kill -CONT {row.pid}` on {row.host} lets it go on."
    stacks = seen.standing.stacks if seen.standing is not None else seen.stacks
    where = f", at {stacks[0].lines[-1]}" if stacks and stacks[0].lines else ""
    return f"Rank {row.rank}: {row.state}{where}."


def _is_silent(row: Row) -> bool:
    return row.trouble and not row.last and not row.waits_for


def plan_words(plan: Plan) -> str:
    """Describes the state of negotiation."""
    if not plan.lock:
        return f"negotiating; plan {plan.seen:,} was the last" if plan.seen else "negotiating; no plan yet"
    buckets = f"{plan.buckets:,} {'bucket' if plan.buckets == 1 else 'buckets'}"
    tensors = f"{plan.tensors:,} {'tensor' if plan.tensors == 1 else 'tensors'}"
    return f"locked since plan {plan.lock:,}: {tensors} in {buckets}, {plan.steps:,} steps"


def _whom(ranks: Sequence[int], one: str, many: str) -> str:
    return f"{_ranks(ranks)} {one if len(ranks) == 1 else many}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}" if ranks else "no rank"


def duration(seconds: float) -> str:
    """Formats a duration: ``0.02 s``, ``12.3 s``, ``4 min 5 s``, ``2 h 3 min``."""
    if seconds < 0.095:
        return f"{seconds:.2f} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def size_words(count: float) -> str:
    """Formats a number of bytes: ``12 B``, ``3.4 MiB``."""
    for unit, shift in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << shift:
            return f"{count / (1 << shift):.1f} {unit}"
    return f"{count:.0f} B"
