from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from coordd.config import knobs
from coordd_tools.knob_table import main, page, row

PAGE = Path(__file__).parent.parent / "docs" / "knobs.md"
FUSION = next(knob for knob in knobs() if knob.name == "fusion_mb")


def test_the_page_in_the_repository_is_fresh():
    assert main(["--check", str(PAGE)]) == 0


def test_a_row_says_everything_about_a_knob():
    assert row(FUSION) == (
        "| `fusion_mb` | `COORDD_FUSION_MB` | `--fusion-mb` | `32.0` | a number from 0 to 65536 "
        "| largest fusion bucket in MiB; 0 reduces every tensor on its own | `HOROVOD_FUSION_THRESHOLD` |\n"
    )


def test_a_switch_is_shown_as_it_is_typed_and_no_value_as_empty():
    by_name = {knob.name: row(knob).split(" | ") for knob in knobs()}
    assert by_name["stall_check"][3] == "`true`"
    assert by_name["stall_seconds"][3] == "empty"


def test_every_row_has_as_many_cells_as_the_head():
    rows = [line for line in page(knobs()).splitlines() if line.startswith("|")]
    assert len(rows) == len(knobs()) + 2
    assert {line.count("|") for line in rows} == {8}


def test_a_bar_in_a_text_does_not_open_a_cell():
    assert r"this \| that" in row(dataclasses.replace(FUSION, about="this | that"))


def test_writing_makes_a_stale_page_fresh(tmp_path):
    path = tmp_path / "knobs.md"
    assert main([str(path)]) == 0
    assert path.read_text("utf-8") == page(knobs())
    assert main(["--check", str(path)]) == 0


@pytest.mark.parametrize("text", [None, "", "# Knobs\n"])
def test_a_stale_or_missing_page_fails_and_says_what_to_do(tmp_path, capsys, text):
    path = tmp_path / "knobs.md"
    if text is not None:
        path.write_text(text, "utf-8")
    assert main(["--check", str(path)]) == 1
    assert "write it anew: python -m coordd_tools.knob_table docs/knobs.md" in capsys.readouterr().out
    assert not path.exists() or path.read_text("utf-8") == text
