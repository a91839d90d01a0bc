from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordd_tools.line_budget import FILE_LINES, FUNCTION_LINES, Size, Sources, main, ninth_decile

REPOSITORY = Path(__file__).parent.parent


def function(name: str, lines: int) -> str:
    return f"def {name}():\n" + "    ...\n" * (lines - 1)


def write(folder: Path, *parts: str) -> Path:
    path = folder / "noun.py"
    path.write_text("".join(parts), "utf-8")
    return path


@pytest.mark.parametrize("folder", ["coordd", "plugins", "tools", "examples", "tests"])
def test_the_project_keeps_its_own_budget(folder):
    assert Sources.measure(REPOSITORY / folder).excess() == []


def test_a_file_may_be_full_but_not_over(tmp_path):
    path = write(tmp_path, "x = 1\n" * FILE_LINES)
    assert Sources.measure(tmp_path).excess() == []
    write(tmp_path, "x = 1\n" * (FILE_LINES + 2))
    assert Sources.measure(tmp_path).excess() == [f"{path} has 602 lines, 2 over 600: make a file of each noun in it"]


def test_one_long_function_in_ten_is_allowed_two_are_not(tmp_path):
    short = "".join(function(f"short{i}", FUNCTION_LINES) for i in range(8))
    path = write(tmp_path, short, function("nine", 3), function("long", 40))
    assert Sources.measure(tmp_path).excess() == []
    write(tmp_path, short, function("longer", 50), function("long", 40))
    first, *offenders = Sources.measure(tmp_path).excess()
    assert first.startswith(f"below {tmp_path} more than one function in ten is over 30 lines (p90 is 40)")
    assert offenders == [f"  {path}:241 longer has 50 lines", f"  {path}:291 long has 40 lines"]


NESTED = """\
class A:
    def method(self):
        def inner():
            ...
        return inner

async def f(): ...
"""


def test_methods_nested_and_async_functions_are_measured_too(tmp_path):
    path = write(tmp_path, NESTED)
    sizes = sorted(Sources.measure(tmp_path).functions)
    assert sizes == [Size(1, f"{path}:7 f"), Size(2, f"{path}:3 inner"), Size(4, f"{path}:2 method")]


DECORATED = '''\
@property
def f():
    """Says.

    More.
    """
    return 1

# a comment after the end
'''


def test_lines_count_from_def_to_the_last_statement_docstring_included(tmp_path):
    write(tmp_path, DECORATED)
    assert [size.lines for size in Sources.measure(tmp_path).functions] == [6]


def test_folders_are_read_to_the_bottom(tmp_path):
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    path = write(deep, "x = 1\n")
    assert Sources.measure(tmp_path).files == (Size(1, str(path)),)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=200))
def test_the_ninth_decile_is_the_smallest_size_that_at_most_one_in_ten_exceeds(lines):
    decile = ninth_decile([Size(n, "here") for n in lines])
    assert 10 * sum(n > decile for n in lines) <= len(lines)
    assert 10 * sum(n >= decile for n in lines) > len(lines)


def test_an_empty_folder_is_within_budget(tmp_path, capsys):
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}: longest file 0/600 lines, p90 of functions 0/30\n"


def test_the_command_fails_and_names_the_offender(tmp_path, capsys):
    path = write(tmp_path, "x = 1\n" * 700)
    assert main([str(tmp_path)]) == 1
    assert f"{path} has 700 lines" in capsys.readouterr().out


def test_the_command_refuses_a_folder_that_is_not_there(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "missing")])
    assert stop.value.code == 2
    assert "missing is no folder" in capsys.readouterr().err


def test_what_is_not_python_is_reported_with_its_place(tmp_path):
    path = write(tmp_path, "def (:\n")
    with pytest.raises(SyntaxError) as error:
        Sources.measure(tmp_path)
    assert error.value.filename == str(path)
