"""What a case is, and how the cases of a folder are found."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["EVERY", "Case", "find", "ranks"]

SIZES = (2, 4)
EVERY = (1, 2, 3, 4)
DEADLINE = 20.0

Function = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """A function that every rank of a world calls.

    Attributes:
        module: where the function is imported from.
        name: its name there.
        sizes: the numbers of ranks that it is meant for.
        deadline: seconds after which it counts as hanging.
    """

    module: str
    name: str
    sizes: tuple[int, ...] = SIZES
    deadline: float = DEADLINE

    def __str__(self) -> str:
        """The short name in pytest's list."""
        topic = self.module.rpartition(".")[2].removeprefix("cases_")
        return f"{topic}.{self.name.removeprefix('case_')}"


def ranks(*sizes: int, deadline: float = DEADLINE) -> Callable[[Function], Function]:
    """Chooses the numbers of ranks of a case, and how many seconds it may take."""

    def note(function: Function) -> Function:
        vars(function)["demand"] = {"sizes": sizes or SIZES, "deadline": deadline}
        return function

    return note


def find(package: str, folder: Path) -> list[Case]:
    """Lists the functions ``case_*`` in the files ``cases_*.py``, in the order of their definition."""
    return [
        Case(name, attribute, **vars(function).get("demand", {}))
        for name in (f"{package}.{path.stem}" for path in sorted(folder.glob("cases_*.py")))
        for attribute, function in vars(importlib.import_module(name)).items()
        if attribute.startswith("case_")
    ]
