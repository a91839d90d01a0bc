"""The four benchmarks' arithmetic, on blocks written by hand."""

import pytest

from coordd_tools.bench import allreduce, idle, sets, startup, step
from coordd_tools.bench.blocks import Block


def row(subject, engine, *seconds_by_rank, cpu=0.0, switches=0):
    return tuple(Block(subject, engine, seconds, cpu, switches) for seconds in seconds_by_rank)


def test_a_step_lasts_as_long_as_on_the_slowest_rank():
    report = step.report([row("gpt", "none", (0.1, 0.3), (0.5, 0.1))])
    assert report.summary("gpt", "none", "step_ms").median == pytest.approx(300)


def test_the_cpu_time_of_a_step_is_the_mean_over_ranks():
    blocks = (Block("gpt", "none", (1.0, 1.0), 1.0), Block("gpt", "none", (1.0, 1.0), 3.0))
    assert step.report([blocks]).summary("gpt", "none", "cpu_ms").median == pytest.approx(1000)


def test_the_overhead_is_taken_round_by_round():
    drifting = [("none", 1.0), ("ddp", 1.2), ("none", 2.0), ("ddp", 2.2), ("none", 4.0), ("ddp", 4.2)]
    rows = [row("gpt", engine, (seconds,)) for engine, seconds in drifting]
    overhead = step.report(rows).summary("gpt", "ddp", "overhead_ms")
    assert (overhead.p10, overhead.median, overhead.p90) == pytest.approx((200, 200, 200))


def test_steps_without_a_floor_have_no_overhead():
    report = step.report([row("gpt", "ddp", (1.0,))])
    assert report.summary("gpt", "ddp", "overhead_ms") is None


def test_overheads_are_compared_with_those_of_ddp():
    rows = [row("mlp", "none", (1.0,)), row("mlp", "coordd", (1.1,)), row("mlp", "ddp", (1.4,))]
    report = step.report(rows)
    assert report.ratio("mlp", "coordd", "overhead_ms", against="ddp") == pytest.approx(0.25)
    assert report.ratio("mlp", "coordd", "step_ms", against="none") == pytest.approx(1.1)


def test_an_allreduce_lasts_as_long_as_on_the_rank_that_it_took_longest():
    report = allreduce.report([row("4096", "gloo", (1e-3, 2e-3, 9e-3), (3e-3, 1e-3, 1e-3))])
    assert report.summary("4096", "gloo", "call_us").median == pytest.approx(3000)
    assert report.summary("4096", "gloo", "call_us").n == 3
    assert report.summary("4096", "gloo", "rate_mbps").median == pytest.approx(4096 / 3e-3 / 1e6)


def test_allreduces_are_compared_with_gloo_and_mpi():
    rows = [row("4", engine, (seconds,)) for engine, seconds in (("coordd", 2.0), ("gloo", 8.0), ("mpi", 1.0))]
    report = allreduce.report(rows)
    assert report.ratio("4", "coordd", "call_us", against="gloo") == pytest.approx(0.25)
    assert report.ratio("4", "coordd", "call_us", against="mpi") == pytest.approx(2.0)


def test_a_set_is_as_fast_as_its_slowest_rank_and_compared_with_itself_beside_an_idle_set():
    rows = [row("1000", "idle", (0.1, 0.1), (0.1, 0.3), (), ()), row("1000", "stalled", (0.4, 0.4), (0.1, 0.1), (), ())]
    report = sets.report(rows)
    assert report.summary("1000", "idle", "calls_per_second").median == pytest.approx(5.0)
    assert report.summary("1000", "idle", "rate_gbps").median == pytest.approx(5e-6)
    assert report.ratio("1000", "stalled", "calls_per_second", against="idle") == pytest.approx(0.5)


def test_idle_tells_of_the_busiest_rank():
    busy, quiet = Block("idle", "gloo", (10.0,), 0.05, 100), Block("idle", "gloo", (10.0,), 0.01, 20)
    report = idle.report([(quiet, busy)])
    assert report.summary("idle", "gloo", "cpu_percent").median == pytest.approx(0.5)
    assert report.summary("idle", "gloo", "wakeups_per_second").median == pytest.approx(10)


def test_startup_tells_of_the_slowest_rank():
    report = startup.report([row("init", "coordd", (0.1,), (0.3,)), row("init", "gloo", (0.2,), (0.1,))])
    assert report.summary("init", "coordd", "start_ms").median == pytest.approx(300)
    assert report.ratio("init", "coordd", "start_ms", against="gloo") == pytest.approx(1.5)
    report = startup.report([(Block("init", "coordd", (0.3,), 0.1), Block("init", "coordd", (0.2,), 0.2))])
    assert report.summary("init", "coordd", "cpu_ms").median == pytest.approx(200)
