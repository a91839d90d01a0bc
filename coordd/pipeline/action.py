"""One step of a rank in a pipeline schedule. Pure: actions are values that print and parse."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from coordd.errors import ArgumentError

__all__ = ["COMPUTE", "DIRECTION", "RECEIVES", "SENDS", "Action", "Kind"]


class Kind(StrEnum):
    """The kinds of actions; a ``BACKWARD`` is an ``INPUT`` and a ``WEIGHT`` in one."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"
    SEND_FORWARD = "SEND_F"
    RECV_FORWARD = "RECV_F"
    SEND_BACKWARD = "SEND_B"
    RECV_BACKWARD = "RECV_B"
    REDUCE = "REDUCE"
    STEP = "STEP"


_WORDS = {
    Kind.FORWARD: "forward pass",
    Kind.BACKWARD: "backward pass",
    Kind.INPUT: "backward pass for inputs",
    Kind.WEIGHT: "backward pass for weights",
    Kind.SEND_FORWARD: "send of the results",
    Kind.RECV_FORWARD: "receive of the inputs",
    Kind.SEND_BACKWARD: "send of the gradients",
    Kind.RECV_BACKWARD: "receive of the gradients",
    Kind.REDUCE: "reduction of the gradients",
    Kind.STEP: "optimizer's step",
}

COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT})
"""The kinds that occupy the processor."""

SENDS = frozenset({Kind.SEND_FORWARD, Kind.SEND_BACKWARD})
RECEIVES = frozenset({Kind.RECV_FORWARD, Kind.RECV_BACKWARD})

DIRECTION = {
    Kind.FORWARD: "F",
    Kind.SEND_FORWARD: "F",
    Kind.RECV_FORWARD: "F",
    Kind.BACKWARD: "B",
    Kind.INPUT: "B",
    Kind.SEND_BACKWARD: "B",
    Kind.RECV_BACKWARD: "B",
    Kind.WEIGHT: "W",
}
"""The direction of each kind: forward, backward, or weight gradient, which is not sent."""

_FORM = re.compile(r"(\d+)([A-Z]+(?:_[A-Z])?)(\d+)?(?:[<>](\d+))?")


class Action(NamedTuple):
    """One action: stage, kind, microbatch, and the other stage of a send or receive.

    ``2F0`` is the forward pass of microbatch 0 through stage 2, ``2SEND_F0>3`` sends its result to stage 3, ``2REDUCE``
    starts the reduction of the stage's gradients, and ``2STEP`` runs its optimizer step.
    """

    stage: int
    kind: Kind
    microbatch: int = -1
    peer: int = -1

    def __str__(self) -> str:
        microbatch = str(self.microbatch) if self.microbatch >= 0 else ""
        arrow = "<" if self.kind in RECEIVES else ">"
        peer = f"{arrow}{self.peer}" if self.peer >= 0 else ""
        return f"{self.stage}{self.kind}{microbatch}{peer}"

    @property
    def told(self) -> str:
        """The action in words, for errors: ``the forward pass of microbatch 0 in stage 2``."""
        microbatch = f" of microbatch {self.microbatch}" if self.microbatch >= 0 else ""
        return f"the {_WORDS[self.kind]}{microbatch} in stage {self.stage}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parses the output of `str`.

        Raises:
            ArgumentError: the text is no action.
        """
        found = _FORM.fullmatch(text)
        if found is None or found[2] not in _KINDS:
            raise ArgumentError(f"{text!r} is no action of a pipeline; actions look like 2F0 or 2SEND_F0>3")
        stage, kind, microbatch, peer = found.groups()
        return cls(int(stage), _KINDS[kind], int(microbatch or -1), int(peer or -1))


_KINDS = {str(kind): kind for kind in Kind}
