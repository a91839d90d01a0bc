"""Compares a name of Horovod's with what there is here: the judgement on one row of the table."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from importlib import import_module
from inspect import Parameter, Signature
from typing import Any, NamedTuple

from coordd.launch.drop_in import FOLDER
from coordd_tools.compatibility.surface import Name

__all__ = ["Judgement", "differences", "judge", "ours", "signature"]

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_NAMED = (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


class Judgement(NamedTuple):
    """What is to be said of a name.

    Attributes:
        verdict: ``same``, ``better``, ``differs``, ``refused`` or ``missing``.
        why: in what, in words.
    """

    verdict: str
    why: str


@cache
def horovod() -> Any:
    """Imports `horovod.torch` as the drop-in has it."""
    sys.path.insert(0, str(FOLDER))
    try:
        return import_module("horovod.torch")
    finally:
        sys.path.remove(str(FOLDER))


def ours(name: str) -> Any:
    """Returns what the drop-in has under a name; None if it has nothing.

    The methods of an optimizer are those of the class that `DistributedOptimizer` mixes in, and what a process set has
    is asked of one.
    """
    first, _, rest = name.partition(".")
    if first == "DistributedOptimizer" and rest:
        return getattr(import_module("coordd_torch.optimizer")._Distributed, rest, None)  # noqa: SLF001 - its home
    found = horovod()
    if first == "ProcessSet" and rest:
        return getattr(found.global_process_set, rest, None)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def signature(name: Name) -> Signature:
    """Reads the signature that Horovod has; defaults are those of the drop-in, where they are names."""
    (function,) = ast.parse(f"def f({name.signature}): ...").body
    names = vars(horovod())
    space: dict[str, Any] = {}
    exec(compile(ast.Module([function], []), name.name, "exec"), dict(names), space)  # noqa: S102 - our own table
    return inspect.signature(space["f"])


def differences(theirs: Signature, here: Signature) -> list[str]:
    """Lists what a call that Horovod takes would stumble over here; one sentence each, empty if all is well."""
    own = here.parameters
    takes_any = {parameter.kind for parameter in own.values()}
    order = [name for name, parameter in own.items() if parameter.kind in _POSITIONAL]
    told = []
    for place, (name, parameter) in enumerate(theirs.parameters.items()):
        if parameter.kind is Parameter.VAR_KEYWORD:
            continue
        mine = own.get(name)
        if (mine is None or mine.kind not in _NAMED) and Parameter.VAR_KEYWORD not in takes_any:
            other = next(iter(order[place : place + 1]), "")
            told.append(f"`{name}` is called `{other}`" if other else f"there is no `{name}`")
        elif order[place : place + 1] != [name] and not (place >= len(order) and Parameter.VAR_POSITIONAL in takes_any):
            told.append(f"`{name}` stands elsewhere, give it by name")
        elif mine is not None and parameter.default not in {Parameter.empty, mine.default}:
            told.append(f"`{name}` is {mine.default!r} by default")
    needed = [name for name, mine in own.items() if mine.kind in _NAMED and mine.default is Parameter.empty]
    return told + [f"`{name}` is needed" for name in needed if name not in theirs.parameters]


def judge(name: Name) -> Judgement:
    """Judges one name."""
    here = ours(name.name)
    if here is None:
        return Judgement("refused", name.refused) if name.refused else Judgement("missing", "")
    if why := getattr(here, "why", ""):
        return Judgement("refused", why)
    if name.signature is not None and (told := differences(signature(name), inspect.signature(here))):
        return Judgement("differs", "; ".join(told))
    return Judgement("better" if name.better else "same", name.better or name.note)
