"""Checks now and then that several ranks' copies of a parameter are still equal: replicas, and tied layers.

Their gradients are summed, but each rank updates its own copy, and a script may change one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from coordd.daemon.operations import Operations
from coordd.gradients.value_check import Drift, Drifts, Trained, is_due
from coordd.ops.process_sets import ProcessSet

__all__ = ["ReplicaValues"]

_Shared = Iterable[tuple[Sequence[int], Trained]]


class ReplicaValues:
    """Compares some values of this rank's shared parameters in training steps 2, 4, 8, … 128 and every 128th."""

    def __init__(
        self,
        operations: Operations,
        shared: Callable[[], _Shared],
        *,
        framework: str,
        name: str,
        remedy: str,
    ) -> None:
        """Prepares the comparisons.

        Args:
            operations: of the daemon.
            shared: returns this rank's trained parameters that other ranks have, too, each with these ranks; in the
                same order on all of them.
            framework: of this rank; values may differ more between different ones.
            name: prefix of the names of its operations.
            remedy: what makes values equal again, as the end of a sentence that begins with "call".
        """
        self._operations = operations
        self._shared = shared
        self._framework = framework
        self._name = name
        self._remedy = remedy
        self._drifts: dict[tuple[int, ...], Drifts] = {}
        self._steps = 0
        self._pending: list[Drift] = []

    def begin(self) -> None:
        """Counts a step and starts its comparisons, if any; does not wait. All ranks call it in the same steps."""
        self._steps += 1
        if not (is_due(self._steps) and self._operations.daemon.config.check_parameters):
            return
        groups: dict[tuple[int, ...], list[Trained]] = {}
        for ranks, trained in self._shared():
            groups.setdefault(tuple(ranks), []).append(trained)
        self._pending = [
            self._drifts_of(ranks).begin(found, None, step=self._steps) for ranks, found in sorted(groups.items())
        ]

    def check(self) -> None:
        """Waits for the pending comparisons; all ranks call it before the next step.

        Raises:
            MismatchError: on the ranks that have the parameter: their values differ.
        """
        pending, self._pending = self._pending, []
        for drift in pending:
            drift.check("Pipeline", self._remedy)

    def forget(self) -> None:
        """Drops the pending comparisons, because all ranks have loaded other values."""
        self._pending = []

    def _drifts_of(self, ranks: tuple[int, ...]) -> Drifts:
        if ranks not in self._drifts:
            prefix = f"{self._name}.{'-'.join(map(str, ranks))}."
            self._drifts[ranks] = Drifts(
                self._operations, framework=self._framework, prefix=prefix, process_set=ProcessSet(ranks)
            )
        return self._drifts[ranks]
