import itertools

import pytest

from coordd.pipeline.schedules.placement import fold, loop
from coordd_tools.bench import pipeline
from coordd_tools.bench.blocks import Block
from coordd_tools.bench.worker.staged import balanced

WHOLE = (1.0, 2.0)
"""Seconds of a forward and a backward pass in one piece."""


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("microbatches", [4, 8])
def test_the_ideal_of_simple_schedules_has_the_bubble_of_the_formula(schedule, ranks, microbatches):
    found = pipeline.ideal(schedule, ranks, microbatches, whole=WHOLE, cores=ranks)
    assert found == pytest.approx(sum(WHOLE) / ranks * (microbatches + ranks - 1) / microbatches)


def test_a_schedule_that_splits_backward_has_a_better_ideal():
    order = ["1f1b", "zb-h1", "zb-v"]
    found = [pipeline.ideal(schedule, 4, 8, whole=WHOLE, cores=4) for schedule in order]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 3


def test_no_schedule_does_more_than_the_cores_can():
    assert pipeline.ideal("1f1b", 4, 8, whole=WHOLE, cores=1) == pytest.approx(3)


def test_the_report_has_times_and_ideals_of_one_group_and_the_memory_of_others():
    rows = [
        (Block("gpt", "none", (0.8, 0.8)), Block("gpt", "none", ())),
        (Block("gpt", "1f1b", (0.45, 0.45)), Block("gpt", "1f1b", (0.4, 0.4))),
        (Block("gpt", "torch-1f1b", (0.5, 0.5)), Block("gpt", "torch-1f1b", (0.5, 0.5))),
        (Block(pipeline.IDEAL, "1f1b", (0.42,)),) * 2,
        tuple(Block("gpt", "1f1b", (), peak_bytes=peak << 20, allocated_bytes=3 << 20) for peak in (5, 6)),
        tuple(Block("gpt", "torch-1f1b", (), peak_bytes=8 << 20, allocated_bytes=peak << 20) for peak in (3, 4)),
    ]
    report = pipeline.report(rows)
    assert report.rows() == [("gpt", "none"), ("gpt", "1f1b"), ("gpt", "torch-1f1b")]
    assert report.summary("gpt", "none", "step_ms").median == pytest.approx(800)
    assert report.summary("gpt", "1f1b", "ideal_ms").median == pytest.approx(420)
    assert report.summary("gpt", "1f1b", "extra_mib").median == pytest.approx(6)
    ratios = [report.ratio("gpt", "1f1b", name, against="torch-1f1b") for name in ("step_ms", "extra_mib")]
    assert ratios == pytest.approx([0.9, 0.75])
    assert report.ratio("gpt", "1f1b", "allocated_mib", against="torch-1f1b") == pytest.approx(0.75)


@pytest.mark.parametrize("placement", [loop(2, 1), loop(2, 2), fold(2), fold(3)], ids=str)
def test_layers_are_cut_where_the_fullest_rank_has_least(placement):
    loads = [0.1, *[1.0] * 6, 0.2]
    spans = balanced(loads, placement)
    assert list(itertools.chain.from_iterable(spans)) == list(range(len(loads)))
    assert len(spans) == len(placement)
    ranks = [0.0] * len({rank for ranks in placement for rank in ranks})
    for span, (rank,) in zip(spans, placement, strict=True):
        ranks[rank] += sum(loads[span.start : span.stop])
    assert max(ranks) < sum(loads) / len(ranks) + 0.2
