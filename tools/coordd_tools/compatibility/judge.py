"""Compares a Horovod name with coordd's counterpart and returns the judgement for one row of the table."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from inspect import Parameter, Signature
from typing import Any, NamedTuple

from coordd.launch.drop_in import FOLDER
from coordd_tools.compatibility.name import Name

__all__ = ["Judgement", "differences", "judge", "ours", "signature"]

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_TAKEN = ("same", "better")


class Judgement(NamedTuple):
    """The judgement on a name.

    Attributes:
        verdict: ``same``, ``better``, ``differs``, ``refused`` or ``missing``.
        why: the differences or the reason, in words.
    """

    verdict: str
    why: str


@cache
def horovod(module: str) -> Any:
    """Imports a Horovod module as the drop-in provides it."""
    sys.path.insert(0, str(FOLDER))
    try:
        return import_module(module)
    finally:
        sys.path.remove(str(FOLDER))


def ours(name: str, module: str) -> Any:
    """Returns the drop-in's object for a name; None if there is none.

    Methods of an optimizer or a tape are looked up in the class that the function mixes in, and attributes of a process
    set in the global process set.
    """
    first, *rest = name.split(".")
    found = getattr(horovod(module), first, None)
    if rest and first == "ProcessSet":
        found = horovod(module).global_process_set
    elif rest and inspect.isfunction(found):
        found = getattr(sys.modules[found.__module__], "_Distributed", None)
    for part in rest:
        found = getattr(found, part, None)
    return found


def signature(name: Name, module: str) -> Signature:
    """Returns Horovod's signature; defaults that are names have the drop-in's values."""
    (function,) = ast.parse(f"def f({name.signature}): ...").body
    space: dict[str, Any] = {}
    exec(compile(ast.Module([function], []), name.name, "exec"), dict(vars(horovod(module))), space)  # noqa: S102 - our own table
    return inspect.signature(space["f"])


def differences(theirs: Signature, here: Signature) -> list[str]:
    """Lists why a call that Horovod accepts would fail or differ here, one phrase each; empty for no difference."""
    own = here.parameters
    takes_any = {parameter.kind for parameter in own.values()}
    order = [name for name, parameter in own.items() if parameter.kind in _POSITIONAL]
    told, moved = [], []
    for place, (name, parameter) in enumerate(theirs.parameters.items()):
        if parameter.kind is Parameter.VAR_KEYWORD:
            continue
        mine = own.get(name)
        passed_on = mine is None and place >= len(order) and Parameter.VAR_POSITIONAL in takes_any
        if (mine is None or mine.kind not in _NAMED) and Parameter.VAR_KEYWORD not in takes_any:
            other = next(iter(order[place : place + 1]), "")
            told.append(f"`{name}` is called `{other}`" if other else f"there is no `{name}`")
        elif order[place : place + 1] != [name] and not passed_on:
            moved.append(f"`{name}`")
        elif mine is not None and parameter.default not in {Parameter.empty, mine.default}:
            told.append(f"`{name}` is {mine.default!r} by default")
    needed = [name for name, mine in own.items() if mine.kind in _NAMED and mine.default is Parameter.empty]
    told += [f"`{name}` is needed" for name in needed if name not in theirs.parameters]
    return [*told, f"give {', '.join(moved)} by name"] if moved else told


def judge(name: Name, modules: Sequence[str]) -> Judgement:
    """Judges one name in several modules; a module where the name is not ``same`` or ``better`` decides."""
    judgements = [_judge_in(name, module) for module in modules]
    return next((each for each in judgements if each.verdict not in _TAKEN), judgements[0])


def _judge_in(name: Name, module: str) -> Judgement:
    here = ours(name.name, module)
    if here is None:
        return Judgement("refused", name.refused) if name.refused else Judgement("missing", "")
    if why := getattr(here, "why", ""):
        return Judgement("refused", why)
    told = differences(signature(name, module), inspect.signature(here)) if name.signature is not None else []
    if name.differs or told:
        return Judgement("differs", "; ".join(filter(None, [*told, name.differs, name.note])))
    return Judgement("better" if name.better else "same", name.better or name.note)
