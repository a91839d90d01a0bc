"""What `docs/recipes.md` and the README show is run, on one rank and on two, and leaves all ranks with one model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.mpi.job import Outcome
from tests.mpi.launch import launch

pytestmark = pytest.mark.mpi

_ROOT = Path(__file__).resolve().parents[2]
_PAGE = (_ROOT / "docs" / "recipes.md").read_text("utf-8")
_README = (_ROOT / "README.md").read_text("utf-8")
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_RECIPES = {
    section.partition("\n")[0]: "".join(_BLOCK.findall(section))
    for section in _PAGE.split("\n## ")[1:]
    if "```py" in section
}
_BEGINNING = _BLOCK.findall(_PAGE)[0]

# What the README leaves to the reader; the odd number of samples cannot be shared equally.
_READER = """
import torch
Net = lambda: torch.nn.Linear(8, 1)
loss = torch.nn.MSELoss()
data = torch.utils.data.TensorDataset(torch.randn(97, 8), torch.randn(97, 1))
"""

# Runs one program after the other in this process; what they make of `model` must be equal on all ranks.
_WORKER = """
import json, os, sys
import torch
import coordd.torch as cd

os.chdir(sys.argv[1])
for title, text in json.load(open("programs.json")).items():
    torch.manual_seed(os.getpid())
    names = {}
    exec(compile(text, title, "exec"), names)
    mine = [parameter.tolist() for parameter in names["model"].parameters()]
    assert all(theirs == mine for theirs in cd.allgather_object(mine)), title
    print("ran", title, flush=True)
"""


@pytest.fixture(scope="module", params=[(1, "python"), (2, "coordd")], ids=["alone", "two ranks"])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """All of them, in the order of the page: one resumes from the checkpoint of another."""
    size, launcher = request.param
    folder = tmp_path_factory.mktemp("recipes")
    programs = {title: _BEGINNING + text for title, text in _RECIPES.items()}
    programs["README"] = _READER + _BLOCK.findall(_README)[0]
    (folder / "programs.json").write_text(json.dumps(programs))
    impatient = {"COORDD_STALL_ABORT_SECONDS": "20"}  # where a recipe leaves ranks waiting for each other
    return launch(size, _WORKER, str(folder), launcher=launcher, variables=impatient)


@pytest.mark.parametrize("title", [*_RECIPES, "README"])
def test_it_runs_and_leaves_one_model(title: str, outcome: Outcome) -> None:
    ranks = 2 if "2 ranks of" in outcome.stderr else 1
    assert outcome.stdout.count(f"ran {title}\n") == ranks, str(outcome)


@pytest.mark.parametrize(
    ("page", "size"), [("README.md", 2), pytest.param("docs/tensorflow-and-keras.md", 4, marks=pytest.mark.slow)]
)
def test_pipelines_are_shown_whole(page: str, size: int) -> None:
    (program,) = [block for block in _BLOCK.findall((_ROOT / page).read_text("utf-8")) if "cd.Pipeline(" in block]
    outcome = launch(size, program, launcher="coordd", variables={"KERAS_BACKEND": "torch"}, timeout=110)
    assert outcome.returncode == 0, str(outcome)


def test_nothing_is_complained_of(outcome: Outcome) -> None:
    assert outcome.returncode == 0, str(outcome)
    assert "Warning" not in outcome.stderr, str(outcome)
    assert "WARNING" not in outcome.stderr, str(outcome)


def test_training_resumes_where_it_was_saved(outcome: Outcome) -> None:
    said = re.findall(r"rank (\d) goes on with epoch (\d)", outcome.stdout)
    assert sorted(said) in ([("0", "2")], [("0", "2"), ("1", "2")]), str(outcome)


@pytest.mark.parametrize("title", _RECIPES)
def test_a_recipe_is_short(title: str) -> None:
    assert len(_RECIPES[title].splitlines()) < 15


@pytest.mark.parametrize("page", sorted((_ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_the_readme_leads_to_every_page(page: Path) -> None:
    assert f"](docs/{page.name})" in _README
