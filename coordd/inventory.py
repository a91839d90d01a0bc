"""Whether all ranks have given a function the same parameters: asked at once, heard when somebody wants to know."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from coordd.census import alike, differences, fingerprint
from coordd.errors import MismatchError
from coordd.messages import ReduceOp
from coordd.objects import gathered
from coordd.operations import Operations
from coordd.process_sets import ProcessSet

__all__ = ["Inventory"]


class Inventory:
    """What the ranks must have in common, as lines of text."""

    def __init__(
        self, operations: Operations, lines: Iterable[str], *, caller: str, name: str, process_set: ProcessSet
    ) -> None:
        """Asks; nobody waits for it.

        Args:
            operations: the way to the others.
            lines: such as a parameter's name, shape and type; what differs is told line by line.
            caller: the function that was given them.
            name: of its own operation; equal on all ranks.
            process_set: the ranks that take part.
        """
        self._operations = operations
        self._lines = list(lines)
        self._caller = caller
        self._name = name
        self._process_set = process_set
        print_ = np.array(fingerprint(self._lines))
        self._handle = operations.allreduce(print_, name=self._name, op=ReduceOp.MAX, process_set=process_set)

    def check(self) -> None:
        """Hears the others.

        Raises:
            MismatchError: the parameters differ; it names some that not all ranks have.
        """
        if alike(self._handle.result().tolist()):
            return
        mine = (self._operations.daemon.world.rank, self._lines)
        everybody = gathered(self._operations, mine, f"{self._name}.lines", self._process_set)
        text = f"the ranks have given different parameters to {self._caller}: {differences(everybody)}"
        raise MismatchError.told(self._caller, "parameters", text)
