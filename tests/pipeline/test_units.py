"""How numbers are written."""

from __future__ import annotations

import pytest

from coordd.errors import ArgumentError
from coordd.pipeline.units import Units, in_bytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (33, "33 s"), (0.0285, "28.5 ms"), (2.5e-5, "25 µs"), (3e-9, "0.003 µs"), (1, "1 s")],
)
def test_seconds_have_a_fitting_prefix(seconds, text):
    assert Units().span(seconds) == text


@pytest.mark.parametrize(("amount", "text"), [(0, "0 B"), (12, "12 B"), (1536, "1.5 KiB"), (3 * 2**30, "3 GiB")])
def test_bytes_do_too(amount, text):
    assert Units().size(amount) == text


def test_other_units_are_written_as_they_are():
    units = Units("units", "activations")
    assert (units.span(1500), units.span(1), units.size(5.5)) == ("1500 units", "1 unit", "5.5 activations")


@pytest.mark.parametrize(
    ("text", "size"), [(7, 7), (1.5, 1.5), ("12", 12), ("12 B", 12), ("2GiB", 2**31), (" 1.5 KiB ", 1536)]
)
def test_amounts_of_memory_are_read(text, size):
    assert in_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "2GB", "-1", "1e3", "KiB"])
def test_what_is_no_amount_is_refused(text):
    with pytest.raises(ArgumentError, match="is no amount of memory: write bytes, or a number with KiB, MiB or GiB"):
        in_bytes(text)
