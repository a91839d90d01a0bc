"""All ranks of a pipeline are given the same batch: seen to before anything is computed of it.

Inputs and targets never travel, so ranks whose data loaders shuffle differently would train the first stage on one
batch and the last on another, and nothing would fail.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np

from coordd.errors import ArgumentError, spans
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

    def check(self, call: str, given: Mapping[str, Any], *, advice: str = _SAME_BATCHES) -> None:
        """Returns if all ranks do the same with the same batch; all ranks call it.

        Args:
            call: what is done.
            given: what it is done with, by what errors call it; large things by their `fingerprint`.
            advice: what is to be done if ranks differ.

        Raises:
            ArgumentError: on all ranks; the text says what differs, and which rank has what.
        """
        self._calls += 1
        given = {"what they call": f"{call}, call {self._calls}", **given}
        number = int.from_bytes(blake2b(repr(given).encode(), digest_size=7).digest())
        found = np.array([number, -number], np.int64)
        largest, smallest = self._operations.allreduce(found, name=self._name, op=ReduceOp.MAX).result()
        if largest == -smallest:
            return
        told = [_told(key, everybodys) for key, everybodys in self._everybodys(given) if len(everybodys) > 1]
        raise ArgumentError(f"the ranks of a pipeline differ in {'; '.join(told)}: {advice}")

    def _everybodys(self, given: Mapping[str, Any]) -> list[tuple[str, dict[Any, list[int]]]]:
        """For each thing that was given its values, and which ranks have them."""
        parts: list[Mapping[str, Any]] = allgather_object(dict(given), f"{self._name}.given")
        found: dict[str, dict[Any, list[int]]] = {}
        for rank, part in enumerate(parts):
            for key, value in part.items():
                found.setdefault(key, {}).setdefault(value, []).append(rank)
        return list(found.items())


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
