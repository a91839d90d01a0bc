"""The figures of a run, as tables for people and as a document for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from coordd_tools.scale.fabric import Account
from coordd_tools.scale.run import Phase
from coordd_tools.scale.setting import Setting

__all__ = ["document", "levels", "phases"]


def phases(found: Sequence[Phase]) -> Table:
    """Returns a table of each phase: its duration, and rank 0's messages, bytes and busy time."""
    table = Table("phase", "out at all ranks", "rank 0: messages", "bytes", "busy", title="phases")
    for column in table.columns[1:]:
        column.justify = "right"
    for phase in found:
        first = phase.accounts[0]
        table.add_row(
            phase.name,
            f"{phase.seconds * 1e3:.2f} ms",
            f"{first.messages:,} ({first.heard:,} in)",
            f"{first.bytes:,} ({first.heard_bytes:,} in)",
            f"{first.busy * 1e3:.2f} ms",
        )
    return table


def levels(setting: Setting, phase: Phase) -> Table:
    """Returns a table of one phase: per distance from rank 0, the maximum messages, bytes and busy time of a rank."""
    table = Table(
        "hops", "ranks", "hearing others", "messages", "bytes", "busy", title=f"{phase.name}: most at one rank"
    )
    for column in table.columns:
        column.justify = "right"
    for depth, (ranks, hubs, most) in enumerate(_by_level(setting, phase)):
        table.add_row(
            str(depth), f"{ranks:,}", f"{hubs:,}", f"{most.messages:,}", f"{most.bytes:,}", f"{most.busy * 1e3:.2f} ms"
        )
    return table


def _by_level(setting: Setting, phase: Phase) -> list[tuple[int, int, Account]]:
    found = []
    for depth in range(max(setting.depths) + 1):
        ranks = [rank for rank, there in enumerate(setting.depths) if there == depth]
        accounts = [phase.accounts[rank] for rank in ranks]
        most = Account(*(max(getattr(one, field.name) for one in accounts) for field in dataclasses.fields(Account)))
        found.append((len(ranks), sum(bool(setting.posts[rank].children) for rank in ranks), most))
    return found


def document(setting: Setting, found: Sequence[Phase]) -> dict[str, Any]:
    """Returns all settings and figures, for ``--json``."""
    return {
        "setting": dataclasses.asdict(setting),
        "phases": [
            {
                "phase": phase.name,
                "seconds": phase.seconds,
                "rank_0": dataclasses.asdict(phase.accounts[0]),
                "levels": [
                    {"ranks": ranks, "hubs": hubs, "most": dataclasses.asdict(most)}
                    for ranks, hubs, most in _by_level(setting, phase)
                ],
            }
            for phase in found
        ],
    }
