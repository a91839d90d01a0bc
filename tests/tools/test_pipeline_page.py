"""The page about schedules says what the simulator says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from coordd.pipeline.schedules.registry import SCHEDULES
from coordd_tools.pipeline_page import fresh, main, pictures, table

PAGE = Path(__file__).parents[2] / "docs" / "pipeline.md"


@pytest.fixture
def page(tmp_path):
    shutil.copytree(PAGE.parent / "pictures", tmp_path / "pictures")
    return Path(shutil.copy(PAGE, tmp_path))


def test_the_page_and_the_pictures_in_the_repository_are_fresh():
    assert main(["--check", str(PAGE)]) == 0


def test_every_picture_is_shown_on_the_page():
    text = PAGE.read_text("utf-8")
    assert all(f"(pictures/{name})" in text for name in pictures())


def test_the_table_has_all_schedules():
    lines = table().splitlines()
    assert len(lines) == 2 + len(SCHEDULES)
    assert {line.count("|") for line in lines} == {7}
    assert "| `1f1b` | 1 | 27.3 %, 4 | 8.6 %, 4 | 17.9 %, 8 | 1 |" in lines


def test_only_what_stands_between_comments_is_written():
    text = "by hand\n<!-- coordd plan --stages 1 --microbatches 1 --actions -->\nold\n<!-- end -->\nby hand, too\n"
    assert fresh(text) == (
        "by hand\n<!-- coordd plan --stages 1 --microbatches 1 --actions -->\n"
        "```sh\ncoordd plan --stages 1 --microbatches 1 --actions\n```\n"
        "```\n1f1b, 1 microbatches, stages on 0\n0: 0F0 0B0 0STEP\n```\n<!-- end -->\nby hand, too\n"
    )


def test_a_stale_picture_and_a_stale_block_are_found_and_mended(page, capsys):
    picture = page.parent / "pictures" / "schedule-1f1b.svg"
    picture.unlink()
    page.write_text(page.read_text("utf-8").replace("27.3 %", "72.3 %"), "utf-8")
    assert main(["--check", str(page)]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == [str(picture), str(page)]
    assert "write it anew: python -m coordd_tools.pipeline_page docs/pipeline.md" in shown[0]
    assert main([str(page)]) == 0
    assert main(["--check", str(page)]) == 0
    assert page.read_text("utf-8") == PAGE.read_text("utf-8")
