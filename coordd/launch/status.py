"""`coordd status`: shows what a running job is doing, once or periodically."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import msgspec
from rich.console import RenderableType
from rich.live import Live

from coordd.launch.console import wide_console
from coordd.monitoring.status import process
from coordd.monitoring.status.address import Address, listed
from coordd.monitoring.status.client import survey
from coordd.monitoring.status.job_selection import Jobs, NoJobError, choose, jobs
from coordd.monitoring.status.paths import seen_from
from coordd.monitoring.status.picture import Speed, picture
from coordd.monitoring.status.probe_result import Life, Survey
from coordd.monitoring.status.view import rows, verdict

__all__ = ["status"]


def status(options: argparse.Namespace) -> int:
    """Runs `coordd status`; returns the exit code.

    Raises:
        NoJobError: no job fits the request, or several do.
    """
    if options.watch is None:
        found = _look(options.job)
        if options.json:
            sys.stdout.write(msgspec.json.format(_told(found), indent=2).decode() + "\n")
        else:
            wide_console().print(_drawn(found, None, options))
        return 0
    try:
        _watch(options)
    except KeyboardInterrupt:
        return 0
    return 0


def _look(word: str) -> Survey:
    return survey(choose(_jobs(), word, ancestors=process.ancestors))


def _jobs() -> Jobs:
    """Returns the jobs with a live process; a child forked by a dead rank may still hold its socket."""
    found = jobs(listed())
    return {job: ranks for job, ranks in found.items() if any(_lives(rank) for rank in ranks)}


def _lives(address: Address) -> bool:
    return process.glance(address.pid).life is not Life.DEAD


def _watch(options: argparse.Namespace) -> None:
    """Shows the status every ``--watch`` seconds until the job has ended."""
    job, before = "", None
    console = wide_console()
    with Live(auto_refresh=False, console=console, vertical_overflow="crop") as live:
        while True:
            try:
                found = _look(job or options.job)
            except NoJobError:
                if job:  # the job was there before, so it has ended
                    return
                raise
            job = found.job
            if options.json:
                sys.stdout.write(_told(found).decode() + "\n")
                sys.stdout.flush()
            elif console.is_terminal:
                live.update(_drawn(found, before, options), refresh=True)
            else:
                console.print(_drawn(found, before, options))
                sys.stdout.flush()
            before = found
            time.sleep(options.watch)


def _drawn(found: Survey, before: Survey | None, options: argparse.Namespace) -> RenderableType:
    return picture(seen_from(str(Path.cwd()), found), _speed(found, before), every_thread=options.threads)


def _speed(found: Survey, before: Survey | None) -> Speed | None:
    """Returns bytes per second by rank between two surveys; None for the first survey."""
    if before is None:
        return None
    former = {seen.rank: seen.standing for seen in before.sightings}
    speed = {}
    for seen in found.sightings:
        now, then = seen.standing, former.get(seen.rank)
        if now is not None and then is not None and now.seconds > then.seconds:
            moved = sum(now.traffic.bytes.values()) - sum(then.traffic.bytes.values())
            speed[seen.rank] = moved / (now.seconds - then.seconds)
    return speed


def _told(found: Survey) -> bytes:
    """Encodes a survey as JSON: all fields, and the states and verdict that the tables show."""
    states = {row.rank: row for row in rows(found)}
    ranks = [
        {
            **msgspec.to_builtins(seen),
            "state": states[seen.rank].state,
            "waits_for": states[seen.rank].waits_for,
            "trouble": states[seen.rank].trouble,
            "behind": states[seen.rank].behind,
        }
        for seen in found.sightings
    ]
    whole = {**msgspec.to_builtins(found), "verdict": verdict(found), "ranks": ranks}
    del whole["sightings"]
    return msgspec.json.encode(whole)
