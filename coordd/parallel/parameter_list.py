"""Checks that all ranks pass the same parameters to a function; the check starts at once and is read later."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from coordd.daemon.operations import Operations
from coordd.errors import MismatchError
from coordd.ops.handles import Handle, call_site, hear_of
from coordd.ops.messages import Kind, ReduceOp
from coordd.ops.process_sets import ProcessSet
from coordd.parallel.fingerprint import ROUNDING, alike, differences, fingerprint

__all__ = ["MARK", "Everybody", "Inventory", "NearlyEqual", "different_values", "not_on_all"]

MARK = " has the checksum "
"""Separates a parameter's name from the checksum of its values in a line."""
_NOTHING = np.empty(0, np.uint8)
_SHOWN = 5

Everybody = Sequence[tuple[int, Sequence[str]]]
"""Each rank with its lines."""


class Inventory:
    """Compares lines of text that must be equal on all ranks.

    The ranks compare a checksum. If it differs, every rank sends its lines as soon as the daemon's thread sees the
    difference: even a rank that never calls `check`, because it has discarded the step meanwhile.
    """

    def __init__(  # noqa: PLR0913 - what is compared, and how it is told
        self,
        operations: Operations,
        lines: Iterable[str],
        *,
        caller: str,
        name: str,
        process_set: ProcessSet,
        names_advice: str = "",
        tell: Callable[[Everybody], str] | None = None,
    ) -> None:
        """Starts the comparison without blocking.

        Args:
            operations: submits the operations.
            lines: such as a parameter's name, shape and type; differences are listed line by line.
            caller: the function that received them.
            name: of the comparison's own operation; equal on all ranks.
            process_set: the ranks that take part.
            names_advice: what the user should do if lines differ only before their first space, in names.
            tell: writes the error, given the lines of each rank; by default it lists the lines that not all ranks have.
        """
        self._tell = tell or self._usual
        self._names_advice = names_advice
        self._operations = operations
        self._lines = list(lines)
        self._caller = caller
        self._site = call_site(sys._getframe(1))  # noqa: SLF001 - the documented way to the caller
        self._gathering = operations.request_in_call(Kind.ALLGATHER, f"{name}.lines", _NOTHING, process_set)
        self._everybody: Handle[Any] | None = None
        print_ = np.array(fingerprint(self._lines))
        self._handle = operations.allreduce(
            print_, name=name, op=ReduceOp.MAX, process_set=process_set, land=self._gather
        )
        self._handle.add_done_callback(hear_of)  # a rank may never call `check`

    def _gather(self, greatest: np.ndarray) -> None:
        """Runs on the daemon's thread when the checksums of all ranks are reduced."""
        if alike(greatest.tolist()):
            return
        line = json.dumps([self._operations.daemon.world.rank, self._lines]) + "\n"
        data = np.frombuffer(bytearray(line, "ascii"), np.uint8)
        request = msgspec.structs.replace(self._gathering, shape=data.shape)
        self._everybody = self._operations.submit(request, data, site=self._site)
        self._everybody.add_done_callback(hear_of)  # a rank may never call `check`

    @property
    def lost(self) -> bool:
        """Whether the comparison failed because of a deadlock."""
        return self._handle.lost

    def check(self) -> None:
        """Waits for the comparison.

        Raises:
            MismatchError: the parameters differ; it names some that not all ranks have.
        """
        self._handle.result()
        if self._everybody is None:
            return
        lines = bytes(self._everybody.result()).decode("ascii").splitlines()
        raise MismatchError.told(self._caller, "parameters", self._tell([json.loads(line) for line in lines]))

    def _usual(self, everybody: Everybody) -> str:
        text = f"the ranks have given different parameters to {self._caller}: {differences(everybody)}"
        without_names = {tuple(sorted(line.partition(" ")[2] for line in lines)) for _, lines in everybody}
        return f"{text}: {self._names_advice}" if self._names_advice and len(without_names) == 1 else text


class NearlyEqual:
    """Checks that all ranks have the same values up to rounding.

    Ranks with other processors, or another framework, round differently, so after a step their parameters differ in the
    last bits. Parameters of another seed or checkpoint differ in all bits.
    """

    def __init__(  # noqa: PLR0913 - what is compared, and how it is told
        self,
        operations: Operations,
        values: Mapping[str, np.ndarray],
        *,
        caller: str,
        name: str,
        process_set: ProcessSet,
        advice: str,
    ) -> None:
        """Starts the comparison without blocking.

        Args:
            operations: submits the operation.
            values: some values of each parameter, the same number on all ranks; NaN where this rank cannot see them.
            caller: the function to which the parameters belong.
            name: of the comparison's own operation; equal on all ranks.
            process_set: the ranks that take part.
            advice: what the user should do if values differ.
        """
        self._caller = caller
        self._advice = advice
        self._counts = {name: part.size for name, part in values.items()}
        mine = np.concatenate([np.empty(0), *(part.astype(np.float64) for part in values.values())])
        both = np.stack([mine, -mine])
        self._handle = operations.allreduce(both, name=name, op=ReduceOp.MAX, process_set=process_set)
        self._handle.add_done_callback(hear_of)  # the step may fail before `check` is called

    def check(self) -> None:
        """Waits for the comparison.

        Raises:
            MismatchError: values differ; it names the parameters.
        """
        largest, negated = self._handle.result()
        found, start = [], 0
        for name, size in self._counts.items():
            most, least = largest[start : start + size], -negated[start : start + size]
            start += size
            scale = np.maximum(np.abs(most), np.abs(least)).max(initial=0.0)
            with np.errstate(invalid="ignore"):
                if np.any(most - least > ROUNDING * scale):  # false where a value is NaN
                    found.append(name)
        if found:
            raise MismatchError.told(self._caller, "parameters", _values_differ(found, self._advice))


def different_values(everybody: Everybody, advice: str) -> str:
    """Lists the parameters and hyperparameters that differ, given the lines of each rank, followed by the advice."""
    common = set(everybody[0][1]).intersection(*(lines for _, lines in everybody))
    found: dict[str, None] = {}
    for rank, lines in everybody:
        for line in lines:
            if line not in common:
                name, checksum, _ = line.partition(MARK)
                found[name if checksum else f"{line} on rank {rank}"] = None
    return _values_differ([*found], advice) if found else _order_differs(everybody)


def _order_differs(everybody: Everybody) -> str:
    orders: dict[tuple[str, ...], int] = {}
    for rank, lines in everybody:
        orders.setdefault(tuple(lines), rank)
    (one, first), (other, second), *_ = orders.items()
    start = next(place for place, (mine, its) in enumerate(zip(one, other, strict=True)) if mine != its)
    mine, its = (line.partition(MARK)[0] for line in (one[start], other[start]))
    return (
        f"the ranks of a DistributedOptimizer have its parameters in another order: where rank {first} has {mine}, "
        f"rank {second} has {its}: let all ranks list them alike, for an optimizer's state is broadcast and loaded by "
        "places (a set of parameters has another order on each rank)"
    )


def not_on_all(names: Sequence[str]) -> MismatchError:
    """Creates the error for parameters that have gradients on some ranks only, where the others cannot use them."""
    text = (
        f"some ranks have gradients for {', '.join(names)}, and others have none, and cannot use theirs: let all ranks "
        "compute the same function, or add what is missing as zero times the variable"
    )
    return MismatchError.told(names[0], "gradients", text)


def _values_differ(names: Sequence[str], advice: str) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (
        f"the ranks of a DistributedOptimizer start with different values of {', '.join(names[:_SHOWN])}{rest}: "
        f"{advice}; init(check_parameters=False) lets them differ"
    )
