"""Draws a search as one self-contained HTML page: the trials in order, each knob by itself, and a table."""

from __future__ import annotations

from html import escape

import msgspec

from coordd.tuning.autotune import Outcome, Progress, Trial
from coordd.tuning.chart import Chart
from coordd.tuning.legend import MARKS, changes, fastest, headline, percent, summary, told, word
from coordd.tuning.record import Record

__all__ = ["page"]

_STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --dim: #6b7785; --rule: #dde3ea; --paper: #fff;
        --faster: #12805c; --no: #9aa5b1; --unclear: #b7791f; --open: #2b6cb0; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --dim: #8b98a5; --rule: #2d3742; --paper: #12171d;
        --faster: #3fb68b; --no: #66717d; --unclear: #d9a441; --open: #63a4e8; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 960px;
       margin: 2.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1rem; margin: 2.2rem 0 .4rem; }
p { margin: .2rem 0; color: var(--dim); } svg { max-width: 100%; height: auto; }
.knobs { display: flex; flex-wrap: wrap; gap: .6rem; }
text { fill: var(--dim); font-size: 11px; text-anchor: middle; } text.scale { text-anchor: end; }
text.title { fill: var(--ink); } text.chosen { fill: var(--faster); font-weight: 700; }
line.grid { stroke: var(--rule); } line.start { stroke: var(--dim); stroke-dasharray: 4 3; }
.best { fill: none; stroke: var(--faster); stroke-width: 2; }
.dot { stroke-width: 2; } .span { stroke-width: 1.5; opacity: .5; }
.faster { --c: var(--faster); } .no-gain { --c: var(--no); }
.unclear { --c: var(--unclear); } .open { --c: var(--open); }
.dot.faster { fill: var(--c); } .dot { stroke: var(--c); fill: var(--paper); } .span { stroke: var(--c); }
b.faster, b.no-gain, b.unclear, b.open { color: var(--c); }
table { border-collapse: collapse; width: 100%; } td, th { text-align: right; padding: .2rem .5rem; }
td:last-child, th:last-child { text-align: left; } tr { border-bottom: 1px solid var(--rule); } th { font-weight: 600; }
"""


def page(record: Record) -> str:
    """Returns the HTML page of a record."""
    progress, key = record.progress, record.key
    about = f"model {key.model}, {key.world} ranks a host, {key.host}"
    start = told(msgspec.structs.asdict(progress.start))
    title = escape(headline(progress))
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>coordd tune: {title}</title><style>{_STYLE}</style>
<h1>{title[:1].upper() + title[1:]}</h1>
<p>{escape(summary(progress))}</p><p>{escape(about)}</p><p>The start, 100 %: {escape(start)}</p>
<h2>Step time of what was tried, in order</h2>
<p>{_key()}</p>
{_history(progress)}
<h2>Each knob by itself</h2>
<p>Every dot is a trial; the line follows the fastest trial of each choice. A flat line: the knob does not matter.</p>
<div class="knobs">{"".join(_knob(record, knob) for knob in record.space.tuned)}</div>
<h2>The figures</h2>
{_table(progress)}
</html>
"""


def _kind(outcome: Outcome) -> str:
    return outcome.value.replace(" ", "-")


def _key() -> str:
    marks = " ".join(f'<b class="{_kind(outcome)}">{mark} {outcome.value}</b>' for outcome, mark in MARKS.items())
    return f"{marks} &ensp; bars: from the lowest comparison to the highest; green line: the settings in use"


def _hint(number: int, trial: Trial, progress: Progress) -> str:
    what = changes(trial.settings, progress.start)
    return f"{number}: {what}\n{percent(trial.relative)}, {trial.outcome.value}, comparisons: {len(trial.ratios)}"


def _history(progress: Progress) -> str:
    measured = [trial for trial in progress.trials if trial.ratios]
    values = [trial.base * ratio for trial in measured for ratio in trial.ratios]
    chart = Chart(920, 320, places=len(progress.trials), values=values)
    edges = (-0.5, 0.5)
    chart.line((place + edge, trial.base) for place, trial in enumerate(progress.trials) for edge in edges)
    every = 1 + len(progress.trials) // 25
    for place, trial in enumerate(progress.trials):
        if place % every == 0:
            chart.name(place, str(place + 1))
        if trial.ratios:
            chart.span(place, [trial.base * ratio for ratio in trial.ratios], kind=_kind(trial.outcome))
            chart.dot(place, trial.relative, kind=_kind(trial.outcome), hint=_hint(place + 1, trial, progress))
    chart.title("trial")
    return str(chart)


def _knob(record: Record, knob: str) -> str:
    """Draws the step times of all trials over the choices of one knob."""
    progress, choices = record.progress, record.space.choices(knob)
    measured = [(number, trial) for number, trial in enumerate(progress.trials, 1) if trial.ratios]
    chart = Chart(300, 200, places=len(choices), values=[trial.relative for _, trial in measured])
    lowest = fastest(progress, knob)
    chart.line((place, lowest[choice]) for place, choice in enumerate(choices) if choice in lowest)
    for number, trial in measured:
        place = choices.index(getattr(trial.settings, knob))
        chart.dot(place, trial.relative, kind=_kind(trial.outcome), hint=_hint(number, trial, progress))
    for place, choice in enumerate(choices):
        chosen = choice == getattr(progress.best, knob)
        chart.name(place, word(choice), kind="chosen" if chosen else "")
    chart.title(knob)
    return str(chart)


def _table(progress: Progress) -> str:
    rows = "\n".join(_row(number, trial, progress) for number, trial in enumerate(progress.trials, 1))
    head = "<th>#</th><th>step time</th><th>ms</th><th>comparisons</th><th>outcome</th><th>what was changed</th>"
    return f"<table><tr>{head}</tr>\n{rows}\n</table>"


def _row(number: int, trial: Trial, progress: Progress) -> str:
    told_time = percent(trial.relative) if trial.ratios else ""
    seconds = f"{1000 * trial.seconds:.2f}" if trial.ratios else ""
    outcome = f'<b class="{_kind(trial.outcome)}">{MARKS[trial.outcome]} {trial.outcome.value}</b>'
    cells = (number, told_time, seconds, len(trial.ratios), outcome, escape(changes(trial.settings, progress.start)))
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
