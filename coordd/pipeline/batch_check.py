"""Checks that all ranks of a pipeline received the same batch, before anything is computed from it.

Inputs and targets are never sent, so ranks whose data loaders shuffle differently would train the first stage on one
batch and the last on another, and nothing would fail.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import Any

import numpy as np

from coordd.daemon.operations import Operations
from coordd.errors import ArgumentError, CoorddError, RefusedError, brief, spans
from coordd.ops.messages import ReduceOp
from coordd.parallel.objects import allgather_object
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

_CALL = "what they call"
_REFUSED = "what a rank refuses"
_OUTER = "the call that makes it"
_HIDDEN = {_REFUSED, _OUTER}
"""What errors do not list among the differences."""

_ABSENT = -(2**62)
"""Stands for the checksum of a part that a rank does not have; less than any checksum."""

_VALUES = 256
"""Number of values of a few rows that are compared."""

_LETTERS = 4096
"""Number of characters of a text that are compared."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


class Accord:
    """Compares the arguments of pipeline calls across ranks.

    Attributes:
        parts: number of values that some ranks share, in every comparison, so that different calls are comparable.
    """

    def __init__(self, operations: Operations, *, name: str) -> None:
        """Prepares the comparison.

        Args:
            operations: of the daemon.
            name: prefix for the names of its operations.
        """
        self._operations = operations
        self._name = name
        self.parts = 0
        self._calls = 0
        self._resets = 0
        self._open_calls: list[str] = []
        self._told_error = 0
        self._outer_calls_differ = False
        """As found by the last comparison; such as `fit` on one rank and `predict` on another."""

    @contextmanager
    def several(self, call: str) -> Iterator[Callable[[], bool]]:
        """Marks a block as one call that makes others.

        If it ends with an exception, ranks may have made a different number of them, so those of the block do not
        count.

        Args:
            call: the name of the call.

        Yields:
            a function that returns whether all ranks have got an error because they were not all in this call, so that
            those in others need not hear of the error that ends it.
        """
        if not self._open_calls:
            self._outer_calls_differ = False
        calls, resets = self._calls, self._resets
        self._open_calls.append(call)
        try:
            yield lambda: self._outer_calls_differ
        except BaseException:
            self._calls = calls if resets == self._resets else 0
            raise
        finally:
            self._open_calls.pop()

    def check(
        self,
        call: str,
        given: Mapping[str, Any] | Callable[[dict[str, Any]], None],
        *,
        advice: str = _SAME_BATCHES,
        parts: Sequence[Mapping[str, str] | None] = (),
        changed: bool | None = None,
    ) -> bool:
        """Returns if all ranks make the same call with the same batch; all ranks must call it.

        Args:
            call: name of the call.
            given: its arguments, by the names that errors use; large ones as their `fingerprint`. Or a function that
                writes them into a dict and prepares the call: an exception that it raises on one rank is reported on
                all ranks.
            advice: what the user should do if ranks differ.
            parts: values that some ranks share, equally many on all ranks; None for a part that this rank does not
                have, as by default all of them.
            changed: whether something has changed on this rank that may change on some ranks only; None if this rank
                does not have it.

        Returns:
            Whether it has changed on some ranks only.

        Raises:
            ArgumentError: on all ranks; the text says what differs, and which rank has which value.
            RefusedError: another rank cannot make this call; it names the rank and the reason.
        """
        self._calls += 1
        self._told_error = 0
        self._outer_calls_differ = False
        outer = self._open_calls[0] if self._open_calls else ""
        inside = f" in {outer}" if outer not in {"", call} else ""
        parts = parts or [None] * self.parts
        found: dict[str, Any] = {_CALL: f"{call}{inside}, call {self._calls}", _OUTER: outer}
        try:
            found.update(given) if isinstance(given, Mapping) else given(found)
        except Exception as error:
            found[_REFUSED] = brief(error)
            with suppress(CoorddError):  # on this rank its own error is raised
                self._compare(call, found, advice, parts)
            self._told_error = id(error)
            raise
        try:
            return self._compare(call, found, advice, parts, changed=changed)
        except CoorddError as error:
            self._told_error = id(error)
            raise

    def has_told(self, error: BaseException) -> bool:
        """Returns whether `check` has just raised this error, so that all ranks know of it.

        It keeps only the error's id, because the error's frames hold the batch.
        """
        return id(error) == self._told_error

    def _compare(
        self,
        call: str,
        given: Mapping[str, Any],
        advice: str,
        parts: Sequence[Mapping[str, str] | None],
        *,
        changed: bool | None = None,
    ) -> bool:
        given = {key: str(value) for key, value in given.items()}  # 8 and np.int64(8) are alike
        numbers = [_number(given), *(_ABSENT if part is None else _number(part) for part in parts)]
        both = [numbers, [number if number == _ABSENT else -number for number in numbers]]
        found = np.array([[*both[0], changed is True], [*both[1], changed is False]], np.int64)
        try:
            result = self._operations.allreduce(found, name=self._name, op=ReduceOp.MAX).result()
        except CoorddError:
            self._calls -= 1  # other ranks may have been elsewhere, such as in save()
            raise
        largest, smallest = result[:, :-1]
        if all((largest == -smallest) | (largest == _ABSENT)):
            return bool(result[:, -1].all())
        everybodys = self._everybodys(given | {key: text for part in parts if part for key, text in part.items()})
        refused = {rank: reason for reason, ranks in dict(everybodys).get(_REFUSED, {}).items() for rank in ranks}
        different = {key: values for key, values in everybodys if len(values) > 1 and key not in _HIDDEN}
        if refused and not different:
            raise RefusedError(min(refused), f"refused {call}: {refused[min(refused)]}")
        told = "; ".join(_told(key, values) for key, values in different.items())
        remedy = advice if any(key in given for key in different) else _SAME_SETTINGS
        if _CALL in different:  # all ranks count anew
            self._outer_calls_differ = len(dict(everybodys)[_OUTER]) > 1
            self._calls = 0
            self._resets += 1
        raise ArgumentError(f"the ranks of a pipeline differ in {told}: {remedy}")

    def _everybodys(self, given: dict[str, str]) -> list[tuple[str, dict[str, list[int]]]]:
        """Returns, for each key, its values and the ranks that have each value."""
        parts: list[dict[str, str]] = allgather_object(given, f"{self._name}.given")
        found: dict[str, dict[str, list[int]]] = {}
        for rank, part in enumerate(parts):
            for key, value in part.items():
                found.setdefault(key, {}).setdefault(value, []).append(rank)
        return list(found.items())


def _number(values: Mapping[str, str]) -> int:
    """Returns a checksum of values and their order."""
    return int.from_bytes(blake2b(repr(values).encode(), digest_size=7).digest())


def _told(key: str, everybodys: Mapping[str, list[int]]) -> str:
    each = (f"{value} on rank{'s' * (len(ranks) > 1)} {spans(ranks)}" for value, ranks in everybodys.items())
    return f"{key} ({', '.join(each)})"


def settings(config: PipelineConfig) -> dict[str, str]:
    """Formats settings as texts, by name; tuples and lists are treated as equal."""
    return {name: repr(list(value) if isinstance(value, tuple) else value) for name, value in vars(config).items()}


def some(values: Any) -> Any:
    """Returns a few values of the first, the middle and the last row of an array or tensor."""
    rows = values[:: max(1, (len(values) - 1) // 2)] if values.ndim else values
    flat = rows.reshape(-1)
    return flat[:: max(1, len(flat) // _VALUES)]


def fingerprint(leaves: Iterable[Any]) -> str:
    """Returns a short text that identifies the contents of a batch.

    Args:
        leaves: the batch's arrays and other values. Of arrays, the bytes count; of numbers, truth values, texts, bytes
            and None, type and value; of any other object, whose ``repr`` may contain its address in memory, the type
            only.
    """
    found = 0
    for leaf in leaves:
        if isinstance(leaf, np.ndarray):
            found = zlib.crc32(leaf.tobytes(), found)
        else:
            told = repr(leaf)[:_LETTERS] if isinstance(leaf, _PLAIN) else ""
            found = zlib.crc32(f"{type(leaf).__name__} {told}".encode(), found)
    return f"{found:08x}"
