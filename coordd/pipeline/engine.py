"""Carries a plan out on one rank, with the daemon's sends and receives.

Its rules: computing never waits for a send; a receive is under way before it is needed, and only what needs it waits
for it; what goes wrong in a stage is told on all ranks. What a stage is, is the business of a framework's plugin.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from coordd.errors import PeerError, ShutdownError, brief
from coordd.handles import Handle, wait_all
from coordd.pipeline.action import COMPUTE, DIRECTION, RECEIVES, SENDS, Action, Kind
from coordd.pipeline.plan import Plan
from coordd.pipeline.simulate import Span

__all__ = ["Engine", "Mail", "Stage"]


class Stage(Protocol):
    """One stage of a model, on this rank.

    Microbatches are numbers; what it keeps of each is its own business. What goes from stage to stage is an array,
    which whoever gets it understands.
    """

    def forward(self, microbatch: int, given: Mapping[int, np.ndarray]) -> None:
        """Takes a microbatch through; ``given`` is what earlier stages have sent, by stage."""
        ...

    def output(self, microbatch: int, taker: int) -> np.ndarray:
        """What a later stage gets of a microbatch's forward pass."""
        ...

    def backward(self, microbatch: int, given: Mapping[int, np.ndarray]) -> None:
        """Takes a microbatch back; ``given`` are the gradients that later stages have sent, by stage."""
        ...

    def backward_input(self, microbatch: int, given: Mapping[int, np.ndarray]) -> None:
        """Does the part of it that earlier stages wait for."""
        ...

    def backward_weight(self, microbatch: int) -> None:
        """Does the other part, the gradients of the weights."""
        ...

    def gradient(self, microbatch: int, giver: int) -> np.ndarray:
        """What an earlier stage gets of a microbatch's backward pass."""
        ...

    def recall(self, version: int) -> None:
        """Computes with the weights after so many steps of this run; -1 is for those before the last step of all."""
        ...

    def reduce(self) -> None:
        """Starts to add its gradients up over all ranks that share them."""
        ...

    def step(self) -> None:
        """Waits for that, and changes the weights."""
        ...


class Mail(Protocol):
    """Matched sends and receives; `coordd.operations.Operations` has them."""

    def send(self, array: np.ndarray, destination: int, *, name: str) -> Handle[Any]:
        """Sends to the one rank that receives under this name."""
        ...

    def recv(self, array: None, source: int, *, name: str, lazy: bool) -> Handle[Any]:
        """Receives what a rank sends under this name; ``lazy`` disturbs nobody before that comes, or is waited for."""
        ...


_Need = tuple[int, str, int]
"""A stage, a direction, and a microbatch: what is given to one pass."""


class Engine:
    """One rank's part of a pipeline.

    Attributes:
        since: when the last run began, by `time.perf_counter`.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        mail: Mail,
        *,
        name: str,
        fail: Callable[[str, str], None],
    ) -> None:
        """Prepares it.

        Args:
            stages: those of this rank.
            mail: sends and receives.
            name: begins the names of what is sent; the same on all ranks, and no other pipeline's.
            fail: tells all ranks that the job has failed: why in one line, and the traceback.
        """
        self._stages = stages
        self._mail = mail
        self._name = name
        self._fail = fail
        self._runs = 0
        self._coming: dict[_Need, dict[int, Handle[Any]]] = {}
        self._here: dict[_Need, dict[int, np.ndarray]] = {}
        self._sent: list[Handle[Any]] = []
        self._began = 0.0
        self._told: BaseException | None = None
        self.since = 0.0

    def run(self, plan: Plan, rank: int) -> list[Span]:
        """Carries out what a plan has this rank do; returns when it computed or changed what, in seconds from now on.

        Raises:
            PeerError: another rank has failed.
        """
        begin = self.since = time.perf_counter()
        spans: list[Span] = []
        action: Action | None = None
        try:
            for action in plan.actions[rank]:
                self._do(plan, action)
                if action.kind in COMPUTE or action.kind is Kind.STEP:
                    spans.append(Span(action, self._began - begin, time.perf_counter() - begin))
            action = None
            sent, self._sent = self._sent, []
            wait_all(sent)
            self._runs += 1
        except BaseException as error:
            passage = "" if action is None else f"{action} of "
            self._tell(error, f"in {passage}the pipeline{f', {action.told}' if action is not None else ''}", rank)
            raise
        return spans

    @contextmanager
    def telling(
        self, where: str, rank: int, *, known: Callable[[BaseException], bool] = lambda _: False
    ) -> Iterator[None]:
        """Tells all ranks of an error inside the block: they may be waiting to receive, which only the job's end ends.

        Of one error they are told once, by the innermost block.

        Args:
            where: it is, for the reason that they are told.
            rank: this one.
            known: says of an error whether all ranks have heard of it already.
        """
        try:
            yield
        except BaseException as error:
            if not known(error):
                self._tell(error, where, rank)
            raise

    def _tell(self, error: BaseException, where: str, rank: int) -> None:
        """Tells all ranks of an error, unless they know already."""
        if error is not self._told and not isinstance(error, (PeerError, ShutdownError)):
            self._told = error
            error.add_note(f"{where}, on rank {rank}")
            self._fail(f"failed {where}: {brief(error)}", traceback.format_exc())

    def _do(self, plan: Plan, action: Action) -> None:
        stage, kind, microbatch, peer = action
        if kind in COMPUTE:
            self._pass(plan, action)
        elif kind in SENDS:
            frame = self._result(action, peer)
            self._sent = [sent for sent in self._sent if not _arrived(sent)]  # handles keep what was sent
            self._sent.append(
                self._mail.send(frame, plan.rank(peer, microbatch), name=self._title(action, stage, peer))
            )
        elif kind in RECEIVES:
            title = self._title(action, peer, stage)
            handle = self._mail.recv(None, plan.rank(peer, microbatch), name=title, lazy=True)
            self._coming.setdefault((stage, DIRECTION[kind], microbatch), {})[peer] = handle
        elif kind is Kind.REDUCE:
            self._stages[stage].reduce()
        else:
            self._began = time.perf_counter()
            self._stages[stage].step()

    def _pass(self, plan: Plan, action: Action) -> None:
        """Computes, once all that it needs is there."""
        stage, microbatch = self._stages[action.stage], action.microbatch
        given = self._await(action)
        self._began = time.perf_counter()
        if plan.versions:
            stage.recall(plan.versions[action.stage][microbatch])
        if action.kind is Kind.FORWARD:
            stage.forward(microbatch, given)
        elif action.kind is Kind.BACKWARD:
            stage.backward(microbatch, given)
        elif action.kind is Kind.INPUT:
            stage.backward_input(microbatch, given)
        else:
            stage.backward_weight(microbatch)
        self._hand_over(plan, action)

    def _await(self, action: Action) -> dict[int, np.ndarray]:
        """Waits for what other stages give to a pass, and returns it by stage."""
        need = (action.stage, DIRECTION[action.kind], action.microbatch)
        coming = {peer: handle.result() for peer, handle in self._coming.pop(need, {}).items()}
        return coming | self._here.pop(need, {})

    def _hand_over(self, plan: Plan, action: Action) -> None:
        """Gives the results of a pass to other stages of this rank."""
        stage, kind, microbatch, _ = action
        direction = DIRECTION[kind]
        ends = {
            "F": [taker for giver, taker in plan.flows if giver == stage],
            "B": [giver for giver, taker in plan.flows if taker == stage],
        }
        for other in ends.get(direction, ()):
            if plan.rank(other, microbatch) == plan.rank(stage, microbatch):
                self._here.setdefault((other, direction, microbatch), {})[stage] = self._result(action, other)

    def _result(self, action: Action, taker: int) -> np.ndarray:
        stage = self._stages[action.stage]
        made = stage.output if DIRECTION[action.kind] == "F" else stage.gradient
        return made(action.microbatch, taker)

    def _title(self, action: Action, giver: int, taker: int) -> str:
        return f"{self._name}.{self._runs}.{DIRECTION[action.kind]}{action.microbatch}.{giver}>{taker}"


def _arrived(sent: Handle[Any]) -> bool:
    return sent.poll() and sent.error() is None
