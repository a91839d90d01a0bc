"""Formats a survey for the terminal: the ranks' states, plans, traffic and stacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from coordd.errors import spans
from coordd.monitoring.status.probe_result import Survey
from coordd.monitoring.status.report import Stack, Standing
from coordd.monitoring.status.view import Row, duration, plan_words, rows, size_words, verdict

__all__ = ["Speed", "picture"]

_STACK_LINES = 12
_NOTABLE_SECONDS = 1e-4
_IDLE = ("/threading.py:", "/queue.py:", "/selectors.py:", "/concurrent/futures/", "/multiprocessing/connection.py:")

Speed = dict[int, float]
"""Bytes per second, by rank."""


def picture(survey: Survey, speed: Speed | None = None, *, every_thread: bool = False) -> RenderableType:
    """Formats a survey.

    Args:
        survey: the statuses of the ranks.
        speed: recent bytes per second of each rank; by default the average since the rank's start.
        every_thread: whether to show sleeping threads too.
    """
    found = rows(survey)
    parts: list[RenderableType] = [_title(survey), ""]
    if said := verdict(survey):
        parts += [*(Text(sentence, "bold yellow") for sentence in said), ""]
    parts += [_ranks(found), ""]
    told = [seen.standing for seen in survey.sightings if seen.standing is not None]
    if told:
        parts += [_numbers(told, speed), ""]
    parts += _stacks(survey, every_thread=every_thread)
    return Group(*parts)


def _title(survey: Survey) -> Text:
    ranks = f"{survey.size:,} {'rank' if survey.size == 1 else 'ranks'}"
    title = Text(survey.command or survey.job, "bold")
    told = [seen.standing for seen in survey.sightings if seen.standing is not None]
    since = f" · {duration(max(standing.seconds for standing in told))}" if told else ""
    versions = ", ".join(sorted({standing.version for standing in told}))
    title.append(f"\n{ranks}{since} · job {survey.job}" + f" · coordd {versions}" * bool(versions), "not bold dim")
    if survey.unasked:
        title.append(f" · {survey.unasked:,} ranks of other hosts were not asked", "not bold dim")
    return title


def _ranks(found: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("rank", justify="right")
    table.add_column("host", no_wrap=True)
    table.add_column("pid", justify="right")
    table.add_column("state", overflow="fold", ratio=3)
    some = any(map(_behind, found))
    if some:
        table.add_column("behind", justify="right", no_wrap=True)
    table.add_column("last submitted", overflow="fold", ratio=2, style="dim")
    for row in found:
        style = "yellow" if row.trouble else "green"
        pid = str(row.pid) if row.pid else ""
        cells = [str(row.rank), escape(row.host), pid, f"[{style}]{escape(row.state)}[/]"]
        table.add_row(*cells, *[_behind(row)] * some, escape(row.last))
    return table


def _behind(row: Row) -> str:
    """Formats the delay of a rank in milliseconds, because it recurs in every step."""
    return f"{1e3 * row.behind:,.1f} ms" if row.behind >= _NOTABLE_SECONDS else ""


def _numbers(told: Sequence[Standing], speed: Speed | None) -> Table:
    """Returns the table of plans and traffic; ranks with equal numbers share a row."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("ranks", "plan", "cache", "operations", "moved", "a second", "common memory"):
        table.add_column(title, overflow="fold")
    groups: dict[tuple[str, ...], list[int]] = {}
    for standing in told:
        groups.setdefault(_cells(standing, speed), []).append(standing.rank)
    for cells, ranks in groups.items():
        table.add_row(spans(ranks), *cells)
    return table


def _cells(standing: Standing, speed: Speed | None) -> tuple[str, ...]:
    plan, traffic = standing.plan, standing.traffic
    announced = plan.hits + plan.misses
    total = sum(traffic.operations.values())
    locked = f", {traffic.locked / total:.0%} locked" if traffic.locked else ""
    moved = [f"{kind} {size_words(traffic.bytes[kind])}" for kind in traffic.operations]
    average = sum(traffic.bytes.values()) / max(standing.seconds, 1e-9)
    return (
        plan_words(plan),
        f"{plan.hits / announced:.0%} of {announced:,}" if announced else "",
        f"{total:,}{locked}",
        "\n".join(moved),
        size_words(average if speed is None else speed.get(standing.rank, 0.0)),
        size_words(traffic.memory) if traffic.memory else "",
    )


def _stacks(survey: Survey, *, every_thread: bool) -> Iterator[RenderableType]:
    """Yields the stacks of all ranks; ranks with equal stacks share one."""
    groups: dict[tuple[str, tuple[str, ...], str], list[int]] = {}
    for seen in survey.sightings:
        stacks = seen.standing.stacks if seen.standing is not None else seen.stacks
        for place, stack in enumerate(stacks):
            if every_thread or place == 0 or not _sleeps(stack):
                name = "main thread" if place == 0 else stack.thread
                groups.setdefault((name, stack.lines, stack.inside), []).append(seen.rank)
    for (name, lines, inside), ranks in groups.items():
        title = f"{'rank' if len(ranks) == 1 else 'ranks'} {spans(ranks)}, {name}"
        yield Text(title + f", in {inside}()" * bool(inside), "bold")
        if len(lines) > _STACK_LINES:
            yield Text(f"  … {len(lines) - _STACK_LINES} more", "dim")
        yield from (Text(f"  {line}") for line in lines[-_STACK_LINES:])


def _sleeps(stack: Stack) -> bool:
    """Returns whether a thread only waits for work."""
    return bool(stack.lines) and not stack.inside and any(place in stack.lines[-1] for place in _IDLE)
