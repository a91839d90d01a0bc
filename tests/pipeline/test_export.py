"""Pictures in files."""

from __future__ import annotations

import sys

import pytest

from coordd.errors import ArgumentError
from coordd.pipeline.export import check_ending, save

PICTURE = '<svg xmlns="http://www.w3.org/2000/svg" width="10" height="10"><title>µ</title></svg>\n'


def test_an_svg_is_written_as_it_is(tmp_path):
    save(PICTURE, tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text("utf-8") == PICTURE


def test_a_png_is_made(tmp_path):
    try:
        check_ending(tmp_path / "plan.png")
    except ArgumentError as error:
        pytest.skip(str(error))
    save(PICTURE, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["plan", "plan.jpg", ".svg"])
def test_other_endings_are_refused(tmp_path, name):
    with pytest.raises(ArgumentError, match=r"end in \.svg or \.png"):
        save(PICTURE, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_what_a_png_needs_is_said(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    with pytest.raises(ArgumentError, match=r"pip install 'coordd\[picture\]'"):
        check_ending(tmp_path / "plan.png")
