"""Runs a plan on one rank, with the daemon's sends and receives.

Rules: computing never waits for a send; a receive is posted before it is needed, and only the pass that needs it waits
for it; an error in a stage is reported on all ranks. Framework plugins define the stages.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from coordd.errors import PeerError, ShutdownError, brief
from coordd.ops.handles import Handle, wait_all
from coordd.pipeline.action import COMPUTE, DIRECTION, RECEIVES, SENDS, Action, Kind
from coordd.pipeline.plan import Plan
from coordd.pipeline.simulate import Span

__all__ = ["Engine", "Mail", "Stage"]


class Stage(Protocol):
    """One stage of a model, on this rank.

    Microbatches are numbers; the stage decides what it keeps of each. Stages exchange arrays, which the receiving stage
    can interpret.
    """

    def forward(self, microbatch: int, given: Mapping[int, np.ndarray]) -> None:
        """Runs the forward pass of a microbatch; ``given`` are the arrays received from earlier stages, by stage."""
        ...

    def output(self, microbatch: int, taker: int) -> np.ndarray:
        """Returns the array that a later stage gets from a microbatch's forward pass."""
        ...

    def backward(self, microbatch: int, given: Mapping[int, np.ndarray]) -> None:
        """Runs the backward pass of a microbatch; ``given`` are the gradients received from later stages, by stage."""
        ...

    def backward_input(self, microbatch: int, given: Mapping[int, np.ndarray]) -> None:
        """Runs the part of the backward pass that earlier stages wait for, the gradients of the inputs."""
        ...

    def backward_weight(self, microbatch: int) -> None:
        """Runs the other part, the gradients of the weights."""
        ...

    def gradient(self, microbatch: int, giver: int) -> np.ndarray:
        """Returns the array that an earlier stage gets from a microbatch's backward pass."""
        ...

    def recall(self, version: int) -> None:
        """Selects the weights after ``version`` steps of this run; -1 selects those before the last step of all."""
        ...

    def reduce(self) -> None:
        """Starts the reduction of the stage's gradients over all ranks that share them."""
        ...

    def step(self) -> None:
        """Waits for the reduction and updates the weights."""
        ...


class Mail(Protocol):
    """Matched sends and receives, as provided by `coordd.daemon.operations.Operations`."""

    def send(self, array: np.ndarray, destination: int, *, name: str) -> Handle[Any]:
        """Sends to the one rank that receives under this name."""
        ...

    def recv(self, array: None, source: int, *, name: str, lazy: bool) -> Handle[Any]:
        """Receives from a rank under this name.

        With ``lazy``, the receive may start only when a thread waits for it, and does not wake the daemon's thread.
        """
        ...


_Need = tuple[int, str, int]
"""The inputs of one pass: a stage, a direction, and a microbatch."""


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
        """Prepares the engine.

        Args:
            stages: the stages of this rank.
            mail: sends and receives.
            name: prefix for the names of messages; the same on all ranks, and unique among pipelines.
            fail: reports on all ranks that the job has failed: the reason in one line, and the traceback.
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
        """Runs the actions of a rank.

        Returns its passes and optimizer steps, timed in seconds since the start of the run.

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
        """Reports an error inside the block to all ranks.

        They may be waiting to receive, and only the end of the job ends these waits. An error is reported once, by the
        innermost block.

        Args:
            where: where the error occurred, for the reported reason.
            rank: this rank.
            known: returns whether all ranks already know of an error.
        """
        try:
            yield
        except BaseException as error:
            if not known(error):
                self._tell(error, where, rank)
            raise

    def _tell(self, error: BaseException, where: str, rank: int) -> None:
        """Reports an error to all ranks, unless they know of it already."""
        if error is not self._told and not isinstance(error, (PeerError, ShutdownError)):
            error.add_note(f"{where}, on rank {rank}")
            if isinstance(error, SystemExit):  # not kept: an exit that is alive does not end the process with its code
                self._fail(f"called sys.exit({error.code!r}) {where}", "")
            else:
                self._told = error
                self._fail(f"failed {where}: {brief(error)}", traceback.format_exc())

    def _do(self, plan: Plan, action: Action) -> None:
        stage, kind, microbatch, peer = action
        if kind in COMPUTE:
            self._pass(plan, action)
        elif kind in SENDS:
            frame = self._result(action, peer)
            self._sent = [sent for sent in self._sent if not _arrived(sent)]  # handles keep the sent data alive
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
        """Runs a pass once all its inputs are there."""
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
        """Waits for the inputs of a pass and returns them by stage."""
        need = (action.stage, DIRECTION[action.kind], action.microbatch)
        coming = {peer: handle.result() for peer, handle in self._coming.pop(need, {}).items()}
        return coming | self._here.pop(need, {})

    def _hand_over(self, plan: Plan, action: Action) -> None:
        """Passes the results of a pass to other stages of this rank."""
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
