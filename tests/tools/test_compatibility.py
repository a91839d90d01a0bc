from __future__ import annotations

from pathlib import Path

import pytest

from coordd_tools.compatibility.__main__ import main, page, row
from coordd_tools.compatibility.judge import judge
from coordd_tools.compatibility.name import Name
from coordd_tools.compatibility.surface import SURFACE

pytest.importorskip("tensorflow", reason="TensorFlow is not installed: pip install 'coordd[tensorflow]'")
pytest.importorskip("keras", reason="Keras is not installed: pip install 'coordd[tensorflow]'")

TORCH = ["horovod.torch"]
PAGE = Path(__file__).parents[2] / "docs" / "horovod-compatibility.md"


def test_the_page_in_the_repository_is_fresh():
    assert main(["--check", str(PAGE)]) == 0


def test_every_name_has_a_row_once():
    rows = [line for line in page(SURFACE).splitlines() if line.startswith("| `")]
    names = [(module, name.name) for part in SURFACE for module in part.modules for name in part.names]
    assert len(rows) == sum(len(part.names) for part in SURFACE)
    assert len(names) == len(set(names))
    assert {line.count(" | ") for line in rows} == {2}


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        (Name("rank", ""), "same"),
        (Name("rank", "", better="faster"), "better"),
        (Name("rank", "device"), "differs"),
        (Name("allgather", "tensor, name=3"), "differs"),
        (Name("no_such_name", ""), "missing"),
        (Name("no_such.name", "", refused="because"), "refused"),
        (Name("elastic.run", "func", better="never"), "refused"),
        (Name("DistributedOptimizer.step", "self, closure=None"), "same"),
        (Name("DistributedOptimizer.leap", "self"), "missing"),
        (Name("rank", "", differs="sometimes"), "differs"),
    ],
)
def test_a_name_is_judged_by_what_is_there(name, verdict):
    assert judge(name, TORCH).verdict == verdict


def test_a_name_that_several_modules_have_is_judged_in_each():
    tape, both = Name("DistributedGradientTape.register_local_source", "self, source"), Name("rank", "")
    modules = ["horovod.tensorflow", "horovod.keras"]
    assert [judge(name, modules[:1]).verdict for name in (tape, both)] == ["same", "same"]
    assert [judge(name, modules).verdict for name in (tape, both)] == ["missing", "same"]


def test_what_a_signature_does_not_tell_stands_behind_what_it_tells():
    name = Name("barrier", "device", differs="sometimes", note="see below")
    assert judge(name, TORCH) == ("differs", "`device` is called `process_set`; sometimes; see below")


def test_a_row_tells_what_a_refused_name_says_itself():
    assert "the ranks of a job stay the same here" in row(Name("elastic.run", "func"), TORCH)
    assert row(Name("DistributedOptimizer.step", "self, closure=None"), TORCH).startswith(
        "| `DistributedOptimizer.step(closure=None)` | same |"
    )
    assert row(Name("DistributedOptimizer.synchronize", "self"), TORCH).startswith(
        "| `DistributedOptimizer.synchronize()` |"
    )


def test_a_bar_in_a_text_does_not_open_a_cell():
    assert r"this \| that" in row(Name("rank", "", note="this | that"), TORCH)


def test_writing_makes_a_stale_page_fresh(tmp_path, capsys):
    path = tmp_path / "page.md"
    assert main(["--check", str(path)]) == 1
    path.write_text("old", "utf-8")
    assert main(["--check", str(path)]) == 1
    assert "write it anew: python -m coordd_tools.compatibility" in capsys.readouterr().out
    assert main([str(path)]) == 0
    assert main(["--check", str(path)]) == 0
