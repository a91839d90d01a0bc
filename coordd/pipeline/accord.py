"""All ranks of a pipeline are given the same batch: seen to before anything is computed of it.

Inputs and targets never travel, so ranks whose data loaders shuffle differently would train the first stage on one
batch and the last on another, and nothing would fail.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import Any

import numpy as np

from coordd.errors import ArgumentError, CoorddError, RefusedError, brief, spans
from coordd.messages import ReduceOp
from coordd.objects import allgather_object
from coordd.operations import Operations
from coordd.pipeline.config import PipelineConfig

__all__ = ["ALIKE", "Accord", "fingerprint", "settings", "some"]

ALIKE = "all of them must make the same pipeline, of the same model"
_SAME_BATCHES = (
    "all of them must make the same calls with the same batches (shuffle with the same seed everywhere, and use no "
    "sampler that deals rows out to ranks)"
)

_SAME_SETTINGS = (
    "ranks that train the same parameters must do so with the same optimizer, hyperparameters and values, also those "
    "that a script changes later"
)

_REFUSED = "what a rank refuses"

_ABSENT = -(2**62)
"""Stands for the checksum of what a rank does not have; less than any of them."""

_VALUES = 256
"""So many of a few rows' values are looked at."""

_LETTERS = 4096
"""So many of a text's letters are looked at."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


class Accord:
    """Compares what the ranks were given."""

    def __init__(self, operations: Operations, *, name: str) -> None:
        """Prepares it.

        Args:
            operations: of the daemon.
            name: of the reductions.
        """
        self._operations = operations
        self._name = name
        self._calls = 0
        self._told_error = 0

    @contextmanager
    def several(self) -> Iterator[None]:
        """Counts calls from the start again if the block, which all ranks leave so together, ends by an exception."""
        try:
            yield
        except BaseException:
            self._calls = 0
            raise

    def check(
        self,
        call: str,
        given: Mapping[str, Any] | Callable[[dict[str, Any]], None],
        *,
        advice: str = _SAME_BATCHES,
        parts: Sequence[Mapping[str, str] | None] = (),
    ) -> None:
        """Returns if all ranks do the same with the same batch; all ranks call it.

        Args:
            call: what is done.
            given: what it is done with, by what errors call it; large things by their `fingerprint`. Or a function that
                writes it into a dict and prepares the call: the exception that it raises on one rank is told to all.
            advice: what is to be done if ranks differ.
            parts: what some ranks have in common, equally many on all ranks; None for what this rank does not have.

        Raises:
            ArgumentError: on all ranks; the text says what differs, and which rank has what.
            RefusedError: another rank cannot make this call; it names the rank and the reason.
        """
        self._calls += 1
        self._told_error = 0
        found: dict[str, Any] = {"what they call": f"{call}, call {self._calls}"}
        try:
            found.update(given) if isinstance(given, Mapping) else given(found)
        except Exception as error:
            found[_REFUSED] = brief(error)
            with suppress(CoorddError):  # of them its own is the one to be raised here
                self._compare(call, found, advice, parts)
            self._told_error = id(error)
            raise
        try:
            self._compare(call, found, advice, parts)
        except CoorddError as error:
            self._told_error = id(error)
            raise

    def has_told(self, error: BaseException) -> bool:
        """Whether `check` has just raised this error, so that all ranks have heard of it.

        It keeps the error's number only, for the error's frames hold the batch.
        """
        return id(error) == self._told_error

    def _compare(
        self, call: str, given: Mapping[str, Any], advice: str, parts: Sequence[Mapping[str, str] | None]
    ) -> None:
        numbers = [_number(given), *(_ABSENT if part is None else _number(part) for part in parts)]
        both = [numbers, [number if number == _ABSENT else -number for number in numbers]]
        found = np.array(both, np.int64)
        largest, smallest = self._operations.allreduce(found, name=self._name, op=ReduceOp.MAX).result()
        if all((largest == -smallest) | (largest == _ABSENT)):
            return
        everybodys = self._everybodys({**given, **{key: text for part in parts if part for key, text in part.items()}})
        refused = {rank: reason for reason, ranks in dict(everybodys).get(_REFUSED, {}).items() for rank in ranks}
        different = {key: values for key, values in everybodys if len(values) > 1 and key != _REFUSED}
        if refused and not different:
            raise RefusedError(min(refused), f"refused {call}: {refused[min(refused)]}")
        told = "; ".join(_told(key, values) for key, values in different.items())
        remedy = advice if any(key in given for key in different) else _SAME_SETTINGS
        raise ArgumentError(f"the ranks of a pipeline differ in {told}: {remedy}")

    def _everybodys(self, given: Mapping[str, Any]) -> list[tuple[str, dict[Any, list[int]]]]:
        """For each thing that was given its values, and which ranks have them."""
        parts: list[Mapping[str, Any]] = allgather_object(dict(given), f"{self._name}.given")
        found: dict[str, dict[Any, list[int]]] = {}
        for rank, part in enumerate(parts):
            for key, value in part.items():
                found.setdefault(key, {}).setdefault(value, []).append(rank)
        return list(found.items())


def _number(values: Mapping[str, Any]) -> int:
    """A checksum of values and their order."""
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=7).digest())


def _told(key: str, everybodys: Mapping[Any, list[int]]) -> str:
    each = (f"{value} on rank{'s' * (len(ranks) > 1)} {spans(ranks)}" for value, ranks in everybodys.items())
    return f"{key} ({', '.join(each)})"


def settings(config: PipelineConfig) -> dict[str, str]:
    """Writes settings as texts, by name; a tuple is as good as a list."""
    return {name: repr(list(value) if isinstance(value, tuple) else value) for name, value in vars(config).items()}


def some(values: Any) -> Any:
    """Takes a few values of the first row of an array or tensor, of the middle one, and of the last."""
    rows = values[:: max(1, (len(values) - 1) // 2)] if values.ndim else values
    flat = rows.reshape(-1)
    return flat[:: max(1, len(flat) // _VALUES)]


def fingerprint(leaves: Iterable[Any]) -> str:
    """Makes a short text of what a batch consists of.

    Args:
        leaves: of arrays the bytes that are looked at; of anything else that is no number, truth value, text or None,
            and may tell of itself where it lies in memory, the type is.
    """
    found = 0
    for leaf in leaves:
        if isinstance(leaf, np.ndarray):
            found = zlib.crc32(leaf.tobytes(), found)
        else:
            told = repr(leaf)[:_LETTERS] if isinstance(leaf, _PLAIN) else ""
            found = zlib.crc32(f"{type(leaf).__name__} {told}".encode(), found)
    return f"{found:08x}"
