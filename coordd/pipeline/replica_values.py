"""Checks now and then that several ranks' copies of a parameter are still equal: replicas, and tied layers.

Their gradients are summed, but each rank updates its own copy, and a script may change one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from coordd.daemon.operations import Operations
from coordd.gradients.value_check import Drift, Drifts, Trained, is_due
from coordd.ops.process_sets import ProcessSet

__all__ = ["ReplicaValues"]

_REMEDY = "load(...) with a checkpoint of save(...)"


class ReplicaValues:
    """Compares some values of this rank's shared parameters in training steps 2, 4, 8, … 128 and every 128th."""

    def __init__(
        self,
        operations: Operations,
        shared: Iterable[tuple[Sequence[int], Trained]],
        *,
        framework: str,
        name: str,
    ) -> None:
        """Groups the parameters by their ranks.

        Args:
            operations: of the daemon.
            shared: this rank's parameters that other ranks have, too, each with these ranks; in the same order on all
                of them.
            framework: of this rank; values may differ more between different ones.
            name: prefix of the names of its operations.
        """
        self._operations = operations
        groups: dict[tuple[int, ...], list[Trained]] = {}
        for ranks, trained in shared:
            groups.setdefault(tuple(ranks), []).append(trained)
        self._groups = [
            (Drifts(operations, framework=framework, prefix=_prefix(name, ranks), process_set=ProcessSet(ranks)), found)
            for ranks, found in sorted(groups.items())
        ]
        self._steps = 0
        self._pending: list[Drift] = []

    def begin(self) -> None:
        """Counts a step and starts its comparisons, if any; does not wait. All ranks call it in the same steps."""
        self._steps += 1
        if is_due(self._steps) and self._operations.daemon.config.check_parameters:
            self._pending = [drifts.begin(found, None, step=self._steps) for drifts, found in self._groups]

    def check(self) -> None:
        """Waits for the pending comparisons; all ranks call it before the next step.

        Raises:
            MismatchError: on the ranks that have the parameter: their values differ.
        """
        pending, self._pending = self._pending, []
        for drift in pending:
            drift.check("Pipeline", _REMEDY)


def _prefix(name: str, ranks: Sequence[int]) -> str:
    return f"{name}.{'-'.join(map(str, ranks))}."
