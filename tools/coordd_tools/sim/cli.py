"""The command line: ``python -m coordd_tools.sim --seeds 20000``, or ``--seed 4649 --trace`` for one run.

With ``--data`` the data plane runs alone, with more process sets, slower ranks and larger tensors.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TypeVar

from rich.console import Console
from rich.progress import track

from coordd_tools.sim.data import Moved, move
from coordd_tools.sim.ledger import Violation
from coordd_tools.sim.simulation import Outcome, simulate
from coordd_tools.sim.swarm import Swarm

__all__ = ["main"]

Run = TypeVar("Run")
_CONFIDENCE = 3.0
"""With no failure in N runs, the failure rate is at most 3/N with 95 % confidence (rule of three)."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one seed, or many with a progress bar; returns 1 if an invariant does not hold, else 0."""
    options = _parser().parse_args(arguments)
    if options.seed is not None:
        return _one_move(options.seed) if options.data else _one(options.seed, trace=options.trace)
    seeds = range(options.first, options.first + options.seeds)
    if options.data:
        return _many(seeds, move, _summarize_moves, "--data ")
    return _many(seeds, simulate, _summarize, "")


def _one_move(seed: int) -> int:
    try:
        print(move(seed))
    except Violation as violation:
        print(f"seed {seed}: {violation}")
        return 1
    return 0


def _one(seed: int, *, trace: bool) -> int:
    try:
        outcome = simulate(seed, show=print if trace else None)
    except Violation as violation:
        print(f"seed {seed}: {violation}")
        if violation.__cause__ is not None:
            Console(stderr=True).print_exception()
        return 1
    print(f"seed {seed}: {outcome.ranks} ranks, {outcome.events} events, {outcome.seconds:.3f} s, {outcome.digest}")
    print(f"what could happen: {outcome.swarm}")
    return 0


def _many(seeds: range, run: Callable[[int], Run], tell: Callable[[Sequence[Run]], None], option: str) -> int:
    started = time.monotonic()
    outcomes = []
    try:
        for seed in track(seeds, "simulating", console=Console(stderr=True)):
            outcomes.append(run(seed))  # noqa: PERF401 - what was done before an interruption is told, too
    except Violation as violation:
        seed = seeds[len(outcomes)]
        trace = "" if option else " --trace"
        print(f"seed {seed}: {violation}\nsee: python -m coordd_tools.sim {option}--seed {seed}{trace}")
        return 1
    except KeyboardInterrupt:
        print("interrupted")
    if outcomes:
        _conclude(len(outcomes), time.monotonic() - started)
        tell(outcomes)
    return 0


def _conclude(count: int, seconds: float) -> None:
    """Prints the bound on the failure rate after successful runs."""
    print(
        f"{count} seeds in {seconds:.1f} s ({count / seconds:.0f}/s): no invariant was violated, so at most one run in "
        f"{count / _CONFIDENCE:.0f} would be (95 %)"
    )


def _summarize_moves(outcomes: Sequence[Moved]) -> None:
    """Prints how much was moved."""
    print(
        f"{sum(run.buckets for run in outcomes)} buckets, {sum(run.words for run in outcomes)} occurrences of locked "
        f"buckets, {sum(run.turns for run in outcomes)} turns of ranks"
    )


def _summarize(outcomes: Sequence[Outcome]) -> None:
    """Prints how much was simulated, and how many runs had each switch."""
    print(
        f"{sum(run.submissions for run in outcomes)} tensors, {sum(run.messages for run in outcomes)} messages, "
        f"{sum(run.plans for run in outcomes)} plans, {sum(run.seconds for run in outcomes) / 3600:.1f} virtual hours"
    )
    switches = Counter(field.name for run in outcomes for field in fields(Swarm) if getattr(run.swarm, field.name))
    print("runs with: " + ", ".join(f"{name} {number}" for name, number in sorted(switches.items())))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m coordd_tools.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, metavar="N", help="how many runs (1000)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first of them (0)")
    parser.add_argument("--seed", type=int, metavar="SEED", help="run this one only")
    parser.add_argument("--data", action="store_true", help="the data plane alone")
    parser.add_argument("--trace", action="store_true", help="print what happens in it, line by line")
    return parser
