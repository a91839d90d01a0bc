"""Handles variables that several ranks have, as replicas or tied stages: first values, then gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from coordd.daemon.operations import Operations
from coordd.gradients.reducer import Gradients, Parameter
from coordd.gradients.settings import Choices
from coordd.ops.dtypes import dtype_of
from coordd.ops.handles import wait_all
from coordd.ops.messages import ReduceOp
from coordd.ops.process_sets import ProcessSet
from coordd_keras.pipeline.graph import arrays_of, is_seed, place_of

__all__ = ["Sharing"]

Owners = Mapping[str, tuple[int, ...]]
"""For each variable of a rank the ranks that have it."""


class Sharing:
    """Sums the gradients of shared variables over the ranks that have them; each set of ranks has its own buckets."""

    def __init__(
        self, held: Mapping[int, Mapping[str, Any]], owners: Owners, operations: Operations, *, name: str
    ) -> None:
        """Groups the shared trainable variables by their ranks.

        Args:
            held: for each stage of this rank its variables by key; a key is the same on all ranks that have the
                variable.
            owners: for each key the ranks that have it.
            operations: of the daemon.
            name: prefix of operation names.
        """
        self._operations = operations
        self._name = name
        self._owners = owners
        self._variables = {key: variable for mine in held.values() for key, variable in mine.items()}
        self._held = {
            stage: [key for key, variable in mine.items() if len(owners[key]) > 1 and variable.trainable]
            for stage, mine in held.items()
        }
        groups: dict[tuple[int, ...], list[str]] = {}
        for key in sorted({key for keys in self._held.values() for key in keys}, key=place_of):
            groups.setdefault(owners[key], []).append(key)
        self._groups: list[tuple[Gradients, list[str]]] = []
        for ranks, keys in sorted(groups.items()):
            described = [
                Parameter(key, self._variables[key].shape, dtype_of(self._variables[key].dtype)) for key in keys
            ]
            choices = Choices(op=ReduceOp.SUM, process_set=ProcessSet(ranks))
            prefix = f"{name}.{'-'.join(map(str, ranks))}."
            self._groups.append((Gradients(operations, described, choices, prefix=prefix), keys))
        self._places = {key: (group, keys.index(key)) for group, keys in self._groups for key in keys}
        self._open: dict[str, int] = {}

    def align(self) -> None:
        """Copies each shared variable from its first rank to the others, except seeds, which differ by rank."""
        rank, coming = self._operations.daemon.world.rank, []
        for key, variable in sorted(self._variables.items(), key=lambda item: place_of(item[0])):
            if len(owners := self._owners[key]) > 1 and is_seed(variable):
                (seed,) = arrays_of([variable])
                variable.assign(seed + np.array([owners.index(rank), 0], seed.dtype))
            elif len(owners) > 1 and math.prod(variable.shape):
                (array,) = arrays_of([variable])
                handle = self._operations.broadcast(
                    array, owners[0], name=f"{self._name}.{key}.first", process_set=ProcessSet(owners)
                )
                coming.append((variable, array, owners[0], handle))
        wait_all([handle for *_, handle in coming])
        for variable, array, first, _ in coming:
            if first != rank:
                variable.assign(array)

    def start(self, stage: int, gradients: Mapping[str, Any], *, array: Callable[[Any], np.ndarray]) -> None:
        """Starts to reduce a stage's gradients, except those that another stage of this rank still adds to.

        Args:
            stage: of this rank.
            gradients: the sums that exist.
            array: returns the values of a gradient.
        """
        for key in self._held[stage]:
            left = self._open.get(key) or sum(key in mine for mine in self._held.values())
            self._open[key] = left - 1
            if left == 1 and key in gradients:
                group, place = self._places[key]
                group.put(place, array(gradients[key]))

    def finish(self) -> dict[str, np.ndarray | None]:
        """Waits for the reduced gradients; None for a variable that no rank has a gradient for."""
        found: dict[str, np.ndarray | None] = {}
        for group, keys in self._groups:
            reduced = group.wait()
            found |= {key: reduced[place] for place, key in enumerate(keys)}
        return found

    def average(self, variables: Mapping[str, Any]) -> None:
        """Averages variables, such as moving statistics, over the ranks that have them."""
        coming = []
        for key in sorted(variables, key=place_of):
            if len(owners := self._owners[key]) > 1:
                (array,) = arrays_of([variables[key]])
                handle = self._operations.allreduce(
                    array, name=f"{self._name}.{key}.mean", op=ReduceOp.AVERAGE, process_set=ProcessSet(owners)
                )
                coming.append((variables[key], handle))
        for variable, handle in coming:
            variable.assign(handle.result())
