import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd_tools.bench.report import Figure, Ratio, Report, Summary, figures, ratios

READINGS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


def test_percentiles_are_interpolated():
    assert Summary.of([float(reading) for reading in range(11)]) == Summary(median=5.0, p10=1.0, p90=9.0, n=11)


def test_a_single_reading_is_all_its_percentiles():
    assert Summary.of([7.0]) == Summary(median=7.0, p10=7.0, p90=7.0, n=1)


def test_nothing_has_no_summary():
    with pytest.raises(ValueError, match="no readings"):
        Summary.of([])


@given(READINGS)
def test_a_summary_lies_within_its_readings(readings):
    found = Summary.of(readings)
    slack = 1e-6  # interpolation rounds
    assert min(readings) - slack <= found.p10 <= found.median + slack <= found.p90 + 2 * slack
    assert found.p90 <= max(readings) + slack


def test_figures_scale_their_readings():
    made = figures("step_ms", {("gpt", "ddp"): [0.001, 0.003]}, scale=1e3)
    assert made[0].summary.median == pytest.approx(2.0)


def figure(subject, engine, median, name="step_ms"):
    return Figure(subject, engine, name, Summary(median, median, median, 1))


def test_ratios_stay_within_a_subject_and_a_figure():
    found = [
        figure("gpt", "coordd", 3.0),
        figure("gpt", "ddp", 6.0),
        figure("mlp", "coordd", 1.0),
        figure("gpt", "coordd", 9.0, name="cpu_ms"),
    ]
    assert ratios(found, "step_ms", against="ddp") == [Ratio("gpt", "coordd", "ddp", "step_ms", 0.5)]


@pytest.mark.parametrize("divisor", [0.0, -0.1])
def test_a_ratio_against_no_overhead_means_nothing(divisor):
    found = [figure("gpt", "coordd", 3.0), figure("gpt", "ddp", divisor)]
    assert ratios(found, "step_ms", against="ddp")[0].value is None


def test_rows_keep_subjects_together_in_first_seen_order():
    found = (figure("mlp", "b", 1.0), figure("gpt", "b", 1.0), figure("mlp", "a", 1.0))
    assert Report(found, ()).rows() == [("mlp", "b"), ("mlp", "a"), ("gpt", "b")]
