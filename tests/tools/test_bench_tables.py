import io

import pytest
from rich.console import Console

from coordd_tools.bench import step
from coordd_tools.bench.blocks import Block
from coordd_tools.bench.tables import digits, render, size_text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.012345, "0.012"), (1.2345, "1.23"), (-12.345, "-12.3"), (123.45, "123"), (45161.2, "45,161")],
)
def test_numbers_have_three_significant_digits(value, text):
    assert digits(value) == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (4, "4 B"), (1000, "1000 B"), (4096, "4 KiB"), (1 << 26, "64 MiB")]
)
def test_sizes_have_the_largest_unit_that_divides_them(size, text):
    assert size_text(size) == text


def test_the_table_reads_like_this():
    seconds = {"none": 0.1, "coordd": 0.105, "ddp": 0.125}
    report = step.report([(Block("gpt", engine, (wall,), wall),) for engine, wall in seconds.items()])
    out = io.StringIO()
    Console(file=out, width=90).print(render(report, step.COLUMNS, title="step, 1 rank"))
    lines = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
    assert lines[0] == "step, 1 rank"
    assert [line.split() for line in lines[3:]] == [
        ["gpt", "none", "100", "100..100", "0.80", "-", "-", "100", "-", "0.80", "1"],
        ["coordd", "105", "105..105", "0.84", "5.00", "0.20", "105", "1.05", "0.84", "1"],
        ["ddp", "125", "125..125", "-", "25.0", "-", "125", "1.25", "-", "1"],
    ]
