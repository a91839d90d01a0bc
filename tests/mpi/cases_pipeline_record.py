"""What was done on real ranks, beside what was expected."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

import coordd.torch as cd
from coordd.errors import ArgumentError, RefusedError
from coordd.pipeline.action import Kind
from coordd.pipeline.recording import Recording
from tests.mpi.cases import ranks
from tests.mpi.cases_pipeline import build, pipeline, random


@ranks(2, 4, deadline=60)
def case_a_run_is_recorded_in_one_time() -> None:
    folder = Path(cd.broadcast_object(tempfile.mkdtemp() if cd.rank() == 0 else None, 0, name="folder"))
    x, y = random(32, 6), torch.zeros(32, dtype=torch.long)
    for split in ("layers", "time"):
        pipe = pipeline(build("plain"), x, split=split)
        with pytest.raises(ArgumentError, match="nothing was run that could be recorded: train a batch first"):
            pipe.record(folder / "none.json")
        pipe.train_batch(x, y)
        for ending in ("json", "svg"):
            pipe.record(folder / f"{split}.{ending}")
        pipe.eval_batch(x, y)
        recording = pipe.record()  # of the training
        assert str(recording).startswith("1f1b: ")
        assert 0 < recording.measured.bubble < 1
        assert [len(mine) for mine in recording.predicted.spans] == [2 * 4] * cd.size()
    with pytest.raises(ArgumentError, match=r"let run\.txt end in"):
        pipe.record(folder / "run.txt")
    with pytest.raises(ArgumentError if cd.rank() == 0 else RefusedError, match=r"let run\.txt end in"):
        pipe.record(folder / "run.txt" if cd.rank() == 0 else None)
    pipe.train_batch(x, y)
    cd.barrier()
    if cd.rank() == 0:
        for split, unit in (("layers", "activations"), ("time", "B")):
            found = Recording.read(folder / f"{split}.json")
            assert found.units.memory == unit
            _follow_each_other(found)
            told = (folder / f"{split}.svg").read_text("utf-8")
            assert "predicted: makespan" in told
            assert "measured: makespan" in told


def _follow_each_other(found: Recording) -> None:
    """A stage begins with a microbatch after the stage before has begun with it, by the one clock."""
    assert [len(spans) for spans in found.spans] == [2 * 4 + 1] * cd.size()
    assert [spans[-1].action.kind for spans in found.spans] == [Kind.STEP] * cd.size()
    begins = {
        (span.action.stage, span.action.microbatch): span.begin
        for spans in found.measured.spans
        for span in spans
        if span.action.kind is Kind.FORWARD
    }
    for stage in range(1, cd.size()):
        assert all(begins[stage, microbatch] > begins[stage - 1, microbatch] for microbatch in range(4))
    assert found.predicted.makespan > 0
