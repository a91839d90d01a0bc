"""The command line: ``python -m coordd_tools.scale --ranks 10000 --tensors 1000 --hosts 1250``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress, TaskID

from coordd_tools.scale import report
from coordd_tools.scale.run import Phase, Run
from coordd_tools.scale.setting import Setting

__all__ = ["main"]

_HONESTLY = """\
Real: every foreman, the coordinator and the wire format; their CPU time on this machine is charged to their ranks.
Shared: ranks to whom nobody reports are alike, so one member works for all of its kind, and each is charged for it.
Modelled: the network, and what a message costs at its ends beside that (--postage-us). The data is not simulated."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one simulation and prints its figures."""
    options = _parser().parse_args(arguments)
    setting = _setting(options)
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        found = _run(setting, progress)
    if options.json:
        print(json.dumps(report.document(setting, found), indent=1))
        return 0
    out = Console()
    out.print(
        f"{setting.ranks:,} ranks on {setting.hosts:,} hosts, {setting.tensors:,} tensors, fan-in {setting.fan_in}, "
        f"{setting.latency * 1e6:g} µs a hop, {setting.bandwidth * 8e-9:g} Gbit/s"
    )
    out.print(report.phases(found))
    for phase in found[1:3]:
        out.print(report.levels(setting, phase))
    out.print(_HONESTLY, highlight=False)
    return 0


def _run(setting: Setting, progress: Progress) -> list[Phase]:
    tasks: dict[str, TaskID] = {}

    def tell(phase: str, ranks: int) -> None:
        if phase not in tasks:
            tasks[phase] = progress.add_task(phase, total=setting.ranks)
        if ranks % 64 == 0 or ranks == setting.ranks:
            progress.update(tasks[phase], completed=ranks)

    return list(Run(setting, progress=tell).phases())


def _setting(options: argparse.Namespace) -> Setting:
    return Setting(
        ranks=options.ranks,
        hosts=options.hosts or max(1, options.ranks // 8),
        tensors=options.tensors,
        fan_in=options.fan_in,
        latency=options.latency_us * 1e-6,
        bandwidth=options.gbit * 1.25e8,
        postage=options.postage_us * 1e-6,
        cuts=options.cuts,
        gap=options.gap_ms * 1e-3,
        stragglers=options.stragglers,
        delay=options.delay_ms * 1e-3,
        steps=options.steps,
        seed=options.seed,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m coordd_tools.scale", description=__doc__)
    add = parser.add_argument
    add("--ranks", type=int, default=1000, metavar="N", help="how many (1000)")
    add("--hosts", type=int, metavar="N", help="how many (one for each 8 ranks)")
    add("--tensors", type=int, default=160, metavar="N", help="how many in a step (160)")
    add(
        "--fan-in",
        type=int,
        default=16,
        metavar="N",
        help="as the setting; as many as there are ranks make a star (16)",
    )
    add("--latency-us", type=float, default=20.0, metavar="US", help="of a hop (20)")
    add("--gbit", type=float, default=10.0, metavar="GBIT/S", help="bandwidth of a rank, each way (10)")
    add(
        "--postage-us",
        type=float,
        default=10.0,
        metavar="US",
        help="of a rank's time for each message, sent or got (10)",
    )
    add("--cuts", type=int, default=1, metavar="N", help="reports in which a rank's tensors come, cut in four ways (1)")
    add("--gap-ms", type=float, default=0.0, metavar="MS", help="between those (0)")
    add("--stragglers", type=int, default=0, metavar="N", help="ranks that are late (0)")
    add("--delay-ms", type=float, default=0.0, metavar="MS", help="by so much (0)")
    add("--steps", type=int, default=3, metavar="N", help="steps after the first (3)")
    add("--seed", type=int, default=0, metavar="SEED", help="chooses the stragglers (0)")
    add("--json", action="store_true", help="print everything as JSON")
    return parser
