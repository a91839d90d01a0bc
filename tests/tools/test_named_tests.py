"""Pages that name tests name those that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordd_tools.named_tests import flaws, main

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "bad-input.md"
HEAD = "| when | coordd | shown by |\n|---|---|---|\n"
TEXT = """
def test_a(): ...
def helper(): ...
class TestB:
    def test_c(self): ...
"""


@pytest.fixture
def tests(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "test_x.py").write_text(TEXT)
    return tmp_path


def test_the_page_in_the_repository_names_tests_that_exist():
    assert main([str(PAGE), "--tests", str(TESTS)]) == 0


@pytest.mark.parametrize("name", ["test_a", "TestB::test_c"])
def test_a_test_that_exists_is_found(tests, name):
    assert not list(flaws(f"{HEAD}| a | b | `x/test_x.py::{name}` |\n", tests))


@pytest.mark.parametrize("name", ["x/test_x.py::test_b", "x/test_x.py::helper", "x/test_x.py::test_c", "y.py::test_a"])
def test_a_name_that_is_stale_is_told_wherever_it_stands(tests, name):
    assert list(flaws(f"as `{name}` shows", tests)) == [f"there is no test {name}"]


def test_a_row_without_a_test_is_told_but_not_one_of_another_table(tests):
    page = f"{HEAD}| it rains | it pours | trust me |\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"
    assert list(flaws(page, tests)) == ["names no test: it rains"]


def test_the_command_fails_and_names_page_and_flaw(tests, capsys):
    page = tests / "page.md"
    page.write_text("`x/test_x.py::test_gone`")
    assert main([str(page), "--tests", str(tests)]) == 1
    assert capsys.readouterr().out == f"{page}: there is no test x/test_x.py::test_gone\n"
