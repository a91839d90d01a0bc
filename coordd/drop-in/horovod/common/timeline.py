"""Timelines as Horovod has them: one file, of rank 0, with a process for each tensor.

coordd records a folder with a file for each rank, which `coordd timeline` makes one of, clocks aligned. That folder
stays beside Horovod's file, as ``<file>.ranks``.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coordd import api
from coordd.ops.messages import Kind

__all__ = ["start_timeline", "stop_timeline"]

_KINDS = {kind.name for kind in Kind}
_ACTIVITIES = {"FUSE": "MEMCPY_IN_FUSION_BUFFER", "UNFUSE": "MEMCPY_OUT_FUSION_BUFFER"}
"""What Horovod calls what coordd does; the rest has the same names, or none there."""

_file: Path | None = None
"""Where the timeline that is being recorded will be."""


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Records a timeline from now on, on all ranks.

    Args:
        file_path: what rank 0 writes when the recording ends, for chrome://tracing; beside it, in
            ``<file_path>.ranks``, is what all ranks have recorded, for `coordd timeline`.
        mark_cycles: whether to record the daemon's cycles, too.

    Raises:
        ArgumentError, PeerError, NotInitializedError: as `coordd.torch.start_timeline`.
    """
    global _file  # noqa: PLW0603 - one recording at a time, of this process
    api.start_timeline(f"{os.fspath(file_path)}.ranks", mark_cycles)
    _file = Path(file_path)
    atexit.register(_at_exit)


def stop_timeline() -> None:
    """Ends the recording; on rank 0 Horovod's file is there when this returns.

    Raises:
        PeerError, NotInitializedError: as `coordd.torch.stop_timeline`.
        OSError: the file cannot be written.
    """
    global _file
    api.stop_timeline()
    file, _file = _file, None
    if file is not None and api.rank() == 0:
        events = json.loads(Path(f"{file}.ranks", "rank.0.json").read_text("utf-8"))
        lines = ",\n".join(json.dumps(event, separators=(",", ":")) for event in _translated(events))
        file.write_text(f"[\n{lines}\n]\n", "utf-8")


def _at_exit() -> None:
    if _file is not None and api.is_initialized() and not api.operations().daemon.failing:
        stop_timeline()


def _translated(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Writes coordd's events of one rank as Horovod's.

    ``X`` events of a tensor's row carry the operation that they belong to. Its kind is the name of the event in which
    the data moves, and the others come before or after that one.
    """
    began = next(event["args"]["began"] for event in events if event["name"] == "coordd")
    about = {"start_time_since_epoch_in_micros": int(began * 1e6)}
    yield {"name": "process_name", "ph": "M", "pid": 0, "args": about}
    tensors = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X" and "op" in event.get("args", {})]
    moves = {(event["tid"], event["args"]["op"]): event for event in spans if event["name"] in _KINDS}
    rows: dict[int, str] = {}
    for span in spans:
        row = span["tid"]
        if (move := moves.get((row, span["args"]["op"]))) is None:
            continue
        if row not in rows:
            rows[row] = f"{move['name'].lower()}.{tensors[row]}"
            yield {"name": "process_name", "ph": "M", "pid": row, "args": {"name": rows[row]}}
            yield {"name": "process_sort_index", "ph": "M", "pid": row, "args": {"sort_index": row}}
        yield from _span(span, move)
    for event in events:
        if event["name"] == "CYCLE":
            yield {"name": "CYCLE_START", "ph": "i", "pid": 0, "ts": event["ts"], "s": "g"}


def _span(span: dict[str, Any], move: dict[str, Any]) -> Iterator[dict[str, Any]]:
    name, args = span["name"], {}
    if name == "NEGOTIATE":
        name = f"NEGOTIATE_{move['name']}"
    elif span is move:
        args = {"args": {key: str(move["args"][key]) for key in ("dtype", "shape") if key in move["args"]}}
    name = _ACTIVITIES.get(name, name)
    yield {"name": name, "ph": "B", "pid": span["tid"], "ts": span["ts"]}
    yield {"name": name, "ph": "E", "pid": span["tid"], "ts": span["ts"] + span["dur"], **args}
