"""What runs in every rank of a session: takes the name of a case, runs it, answers how it went, and so on.

The ranks are kept in step by the session alone, which names the next case when all have answered. So a case that fails
on one rank only cannot lead the others astray, and the worker needs no MPI of its own.

Usage: ``python -m tests.mpi.worker ADDRESS FOLDER``, a Unix socket and the folder for the output of the ranks.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import random
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import IO, Any

from tests.scaled_timeout import MAX_SLOWDOWN

_WIDTH = 200
_ORPHAN_SECONDS = 60.0


def main(address: str, folder: str) -> None:
    """Runs cases until the session hangs up."""
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
    log = os.open(Path(folder, f"{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(address)
        with link.makefile("rw", encoding="utf-8") as lines:
            _answer(lines, {"rank": rank})
            for line in lines:
                _answer(lines, _run(**json.loads(line)))


def _answer(lines: IO[str], fields: dict[str, Any]) -> None:
    lines.write(json.dumps(fields) + "\n")
    lines.flush()


def _run(module: str, name: str, deadline: float) -> dict[str, Any]:
    # The session aborts what hangs; this limit is for the day on which the session itself is gone.
    faulthandler.dump_traceback_later(deadline * MAX_SLOWDOWN + _ORPHAN_SECONDS, exit=True)
    since = time.perf_counter()
    problem = ""
    try:
        case = getattr(importlib.import_module(module), name)
        _seed()
        case()
    except BaseException as error:  # noqa: BLE001 - a case that calls sys.exit is a case that failed
        problem = _story(error)
    faulthandler.cancel_dump_traceback_later()
    if "tensorflow" in sys.modules:
        gc.freeze()  # else Python searches the graphs of all earlier cases for cycles, which takes 20 s and more
    return {"problem": problem, "seconds": time.perf_counter() - since}


def _seed() -> None:
    """Has all ranks draw the same numbers: what they make without a seed of their own is to be alike."""
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


def _story(error: BaseException) -> str:
    """The traceback from the case on; in the case itself with the values of its local variables."""
    trace = error.__traceback__ and error.__traceback__.tb_next
    told = traceback.TracebackException(type(error), error, trace, capture_locals=True)
    for frame in told.stack:
        if not Path(frame.filename).name.startswith("cases_"):
            frame.locals = None
    lines = "".join(told.format()).splitlines()
    return "\n".join(line if len(line) <= _WIDTH else line[:_WIDTH] + " …" for line in lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
