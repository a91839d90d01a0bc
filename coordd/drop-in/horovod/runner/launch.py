"""`horovodrun` as a module: ``python -m horovod.runner.launch -np 2 python train.py``."""

from __future__ import annotations

import sys

from coordd.launch.build import build
from coordd.launch.cli import main

__all__ = ["check_build", "run_commandline"]


def check_build(verbose: bool = False) -> None:  # noqa: ARG001 - Horovod's signature
    """Prints what `horovodrun --check-build` prints, and ends the process as Horovod does."""
    sys.stdout.write(build())
    sys.exit(0)


def run_commandline() -> None:
    """Runs `coordd run --as-horovod` with the arguments of this process; ends the process with the job's exit code."""
    sys.exit(main(["run", "--as-horovod", *sys.argv[1:]]))


if __name__ == "__main__":
    run_commandline()
