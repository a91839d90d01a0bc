"""Reduction of one optimizer's gradients while backward still computes the rest.

Invariant: no rank ever waits for a gradient that another rank does not have. A rank without it contributes zeros. In
the first step every gradient is reduced on its own. Then all ranks know the same order, that of the plans, and the
gradients move into buckets.

Every reduction counts on all ranks or on none. A rank whose backward pass fails still takes part in all remaining
reductions of the step, with a flag that makes every rank discard the step; see `Reducer.abandon`.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from coordd.errors import (
    CoorddError,
    DiscardedStepError,
    MismatchError,
    NotInitializedError,
    PeerError,
    ShutdownError,
    brief,
    is_deadlock,
)
from coordd.gradients.bucketing import Grouping
from coordd.gradients.discard_step import (
    discarded,
    error_of,
    given_up,
    is_discarded,
    of_step,
    reduced_already,
)
from coordd.negotiation.tensor_table import show_site
from coordd.ops.handles import Handle, call_site, check_may_wait, raised_by_handler
from coordd.ops.messages import ReduceOp
from coordd_torch.accumulation import Accumulated, compiled, is_compiled, not_all_have_repeated, replaced, too_many
from coordd_torch.backward_pass import BackwardPass
from coordd_torch.communication import Channel
from coordd_torch.consistency import Consistency
from coordd_torch.finiteness import Finiteness
from coordd_torch.gradient import Gradient, nested
from coordd_torch.late_parameters import Groups
from coordd_torch.pending import Told
from coordd_torch.placement import Placement

__all__ = ["Reducer"]

log = logging.getLogger("coordd")

_NEVER = sys.maxsize
_DISCARDING = "the end of a step that is discarded"
_IDLE_STEPS = 3
_IDLE = (
    "this rank has made %d steps in a row without a backward pass through the parameters of its optimizer, and counts "
    "as zeros in the averages of the other ranks' gradients: if the script trains a copy of the model, or has replaced "
    "layers, make a new DistributedOptimizer of the parameters that it trains"
)


class Reducer(Placement):
    """Reduces all gradients of one optimizer, step by step."""

    made_dense: tuple[Gradient, ...] = ()
    """Gradients that become sparse again after their reduction."""

    def __init__(
        self,
        channel: Channel,
        parameters: Iterable[tuple[str, torch.Tensor]],
        *,
        groups: Groups,
        passes_per_step: int,
        sparse_as_dense: bool,
        grouping: Grouping,
        consistency: Consistency,
    ) -> None:
        """Starts to reduce the gradients of one optimizer; ``consistency`` compares its parameters across ranks."""
        super().__init__(channel, grouping, groups)
        self.passes_per_step = passes_per_step
        self.sparse_as_dense = sparse_as_dense
        self.expected: set[int] = set()
        """The autograd task ids of the running backward passes."""
        self._failed: set[int] = set()
        self.skipped = False
        self.local = 0
        """Number of open `no_sync` contexts."""
        self.limit = _NEVER
        """A gradient is submitted after this many passes have computed it."""
        self._passes, self._spoilt = 0, ""
        self._idle = 0  # steps without a backward pass on this rank, in a row
        self._begun = self._reduced = self._finished = self._owed = self._gone_round = False
        self._repeated = self._adds = self._asks = self._wants_again = self._abandoned = self._replaced = False
        self._counted = self._answered = self._nested = False
        self._discarded: CoorddError | None = None
        self._cause: BaseException | None = None  # of the discard, if this rank raises that after it
        self._told = Told()
        self._adrift: list[Gradient] = []
        self._accumulated = Accumulated()
        named, self.consistency = list(parameters), consistency
        wanted, rank = self.channel.daemon.config.nonfinite, self.channel.daemon.world.rank
        self.finiteness = Finiteness(wanted, rank) if wanted != "ignore" else None
        self.adopt(named)
        for gradient in self._loose:
            gradient.remember()
        self.add_late_hooks()

    def awaits(self, parameter: torch.Tensor) -> bool:
        """Returns whether a parameter whose gradient is not reduced yet is adopted in the next round."""
        return not self._replaced and id(parameter) in self._trained() - self.known

    def replace(self) -> None:
        """Stops when another distributed optimizer takes over the parameters; waits for pending reductions."""
        if self._abandoned:
            self._end_abandoned()
        self.underway.wait()
        self.detach()
        self._replaced = True

    def check_current(self) -> None:
        """Rejects further use after `replace`.

        Raises:
            ArgumentError: another optimizer has taken over the parameters.
        """
        if self._replaced:
            raise replaced()

    def expect_end_of_backward(self, task: int, first: Gradient) -> bool:
        """Registers for the end of the backward pass with this task id, when its first gradient is ready.

        Returns:
            Whether the gradients of this pass count; they do not if it has failed on another autograd thread.
        """
        if task in self._failed:
            return False
        try:
            self._expect_end(task, first)
        except BaseException as error:
            self._not_begun(error)
            raise
        if is_compiled():
            raise compiled()
        return True

    def _expect_end(self, task: int, first: Gradient) -> None:
        if not self.expected:
            self._failed.add(task)  # in case it cannot begin: autograd may compute more gradients on other threads
            self._begin_pass(first)
            self._failed.discard(task)
        self.expected.add(task)
        self._finished = False
        self.graphs |= torch.is_grad_enabled()  # it is enabled in hooks if the pass creates a graph
        self.underway.site = call_site(sys._getframe(2))  # noqa: SLF001 - the documented way to the caller
        ended, failed = lambda: self.end_of_backward(task), lambda: self.backward_failed(task)
        BackwardPass(ended, failed, self._interrupted, order=self.channel.prefix)

    def _not_begun(self, error: BaseException) -> None:
        """Discards the step, in which a backward pass could not begin, for want of memory, say; or fails the job."""
        other = isinstance(error, Exception) and not isinstance(error, CoorddError)
        if other and not self._abandoned and not raised_by_handler(error.__traceback__):
            self._discard_failed(f"could not begin a backward pass: {brief(error)}")
        else:
            self.channel.broken_off(error, "the start of a backward pass")

    def _interrupted(self, error: BaseException) -> None:
        """Fails the job if an exception that coordd has not raised interrupts the end of a backward pass.

        Does nothing for an error for which this rank has already discarded the step, of a compressor, say.
        """
        if not (self._abandoned and isinstance(error, Exception)):
            self.channel.broken_off(error, "the reduction of gradients", all_submitted=self._gone_round)

    def _begin_pass(self, first: Gradient) -> None:
        """Determines the step of a backward pass, and whether its gradients are reduced."""
        self._idle = 0
        if self._abandoned or (self._begun and self._given_up(first)):
            kept = (each for each in self._gradients() if each.by_hand or self._is_local(each))
            self._begin_anew([first, *kept])
        if not self._begun:
            self._begin_step()
        elif self._reduced and not self._adds:
            self._begin_again(first)
            self._adds = True
        last = not self.local and self._passes + 1 >= self.passes_per_step
        self.limit = 1 if last else _NEVER if self.local else self.passes_per_step

    def _begin_anew(self, gradients: Iterable[Gradient]) -> None:
        """Ends an abandoned step; the values of the given gradients belong to the next step."""
        fresh = [(gradient, *gradient.saved()) for gradient in gradients]
        self.drop()
        for gradient, value, saved in fresh:
            gradient.renew(value, saved)

    def _begin_step(self) -> None:
        self._begun, self._discarded = True, None
        if self._joins != self.channel.joins:
            self._start_over()
        for bucket in self._buckets:  # a loop, because this delays each backward pass
            if bucket.outdated:
                self._start_over()
                break
        for bucket in self._buckets:
            bucket.secure()

    def _begin_again(self, first: Gradient) -> None:
        """Prepares another pass that adds to reduced gradients of this step, as with several losses.

        Averaging values that are equal on all ranks does not change them, so the sums of old and new gradients are
        reduced. In a step that is not finished, in which ranks expect another pass, the ranks exchange flags first.
        """
        if self._finished:
            self._reopen()
            if not self._repeats and any(gradient.passes for gradient in self._gradients()):
                raise self._refused(first)
        if self._repeats:
            self._asks = not self._finished
            for gradient in self._gradients():
                gradient.passes = 0

    @property
    def _repeats(self) -> bool:
        return self.passes_per_step == 1 and self.channel.repeats

    def _reopen(self) -> None:
        """Prepares another reduction of all gradients in this step."""
        self._note_used()
        self._repeated, self._gone_round, self._adrift = True, False, []
        self._counted = False
        for gradient in self._loose:
            gradient.started = False
        for bucket in self._buckets:
            bucket.reopen()
            bucket.secure()
        self.open_buckets = len(self._buckets)

    def _given_up(self, first: Gradient) -> bool:
        """Returns whether the script cleared all gradients of this step without making the step.

        Once gradients are reduced, the result is equal on all ranks, whichever gradients a rank computed itself.
        """
        done = self._reduced
        had = {each for each in self._gradients() if (each.started if done else each.passes and not each.started)}
        others = had - {first}
        new = first.changed if others else first.is_new
        return bool(had) and all(each.cleared for each in others) and (new or first not in had)

    def repeat(self, gradient: Gradient) -> None:
        """Records that a gradient was computed again after its reduction had begun.

        Raises:
            CoorddError: it cannot be reduced again.
        """
        if not self._asks:
            raise self._refused(gradient)
        self._wants_again = True

    def _refused(self, gradient: Gradient) -> CoorddError:
        error = too_many(gradient, self.passes_per_step, nested=self._nested or nested())
        self.abandon(f"has computed a gradient too often: {error}", error)
        return error

    def end_of_backward(self, task: int) -> None:
        """Reduces gradients and waits, if this was the last pass to accumulate."""
        self.expected.discard(task)
        if self._abandoned:
            self._raise_discarded()
        self._nested = nested()
        if self._nested:
            if not self.expected:
                self._end_of_nested()
            return
        self._passes += 1
        if self.limit == 1:
            self._round(more=True)
        else:
            self._observe()

    def _end_of_nested(self) -> None:
        """Waits for complete buckets, as the end of the outer pass may go unnoticed; `finish_step` reduces the rest."""
        if self.limit != 1:
            self._observe()
        if all(bucket.full or not bucket.open for bucket in self._buckets):
            for bucket in self._buckets:
                bucket.close()
        self.underway.settle()
        self._take_over((*self._loose, *self._adrift))

    def _observe(self) -> None:
        self._accumulated.observe(filter(self._is_local, self._gradients()))

    def _is_local(self, gradient: Gradient) -> bool:
        """Returns whether a gradient has local contributions of backward passes that are not reduced."""
        return gradient.passes > 0 and (self._asks or not gradient.started)

    def backward_failed(self, task: int) -> None:
        """Runs when a backward pass has failed, before its error reaches the script."""
        self.expected.discard(task)
        self._failed.add(task)
        if self._abandoned:
            self._clear()  # gradients computed since
        if self._abandoned or self._replaced or self.channel.has_left_off:
            return
        reason = f"has not completed its backward pass at {show_site(self.underway.site)}, which has failed"
        if self.limit != 1 and not self.touched:
            self._spoilt = reason
            self._passes += 1
            self._observe()
            return
        self._discard_failed(reason)

    def _discard_failed(self, reason: str) -> None:
        """Discards this step on all ranks because a backward pass has failed here; fails the job if it cannot."""
        try:
            self.abandon(reason)
        except (PeerError, ShutdownError, NotInitializedError):  # later operations raise the error
            log.debug("the other ranks could not be told that a backward pass has failed", exc_info=True)
        except Exception as error:  # noqa: BLE001 - of a compressor, say; the other ranks must not wait for this rank
            self.channel.daemon.fail(f"could not discard a step: {brief(error)}", traceback.format_exc())

    def _check_unspoilt(self) -> None:
        """Discards the step if a failed pass has added to gradients that were not cleared since."""
        reason, self._spoilt = self._spoilt, ""
        if reason and any(gradient.passes and gradient.parameter.grad is not None for gradient in self._gradients()):
            self.abandon(reason)
            self._raise_discarded()

    def abandon(self, reason: str, error: BaseException | None = None) -> None:
        """Discards this step on all ranks, without waiting.

        Takes part in all reductions that the others wait for in this round: in buckets with the discard flag, so that
        no rank uses their values, in other gradients with placeholders. If there are no buckets yet, and in later
        rounds of a step, the flag is part of the flags that the ranks exchange at the end of a round.

        Args:
            reason: what this rank has done, as the end of a sentence.
            error: what this rank raises then, if it does: `discard_step` recognises it as an error of this step.
        """
        # The traceback keeps the graph alive. The next step drops the error, but after a failed job there is none.
        self._cause = None if isinstance(error, PeerError) else error
        self._count()
        if not self._gone_round:
            self.adopt_late()  # the other ranks do so at the beginning of this round
        self._abandoned, self.limit = True, _NEVER
        self._discarded = discarded([(self.channel.daemon.world.rank, reason)], self.channel.prefix)
        self._answered = False
        self._clear()
        first, self._gone_round = not self._gone_round, True
        with self.channel.unbroken(_DISCARDING):
            flagged, again = self._discard_all()
            if not ((first or again) and self._buckets):
                self._told.tell(lambda: self._question(discard=True))
            elif not flagged:
                self.channel.daemon.fail(f"{reason}, after it had given its gradients away: others make this step")
            self._told.tell(lambda: self.channel.tell("discarded", reason))

    def _discard_all(self) -> tuple[bool, bool]:
        """Submits flags and placeholders for reductions that have not started, or that a deadlock between ranks failed.

        Ranks that missed the failed ones may still submit theirs, in their own step, which is then discarded: a rank
        that took part in more reductions than they would pair different steps from then on.

        Returns:
            Whether a bucket has the flag, and whether a bucket was lost.
        """
        lost = self.underway.take_lost()
        again = [bucket for bucket in self._buckets if bucket.take_back(lost)]
        flagged = [bucket for bucket in self._buckets if bucket.discard()]
        alone = [*self._loose, *self._adrift]
        for gradient in alone:
            gradient.take_back(lost)
        self._start(alone, wanted=False)
        self.consistency.begin_again()
        return bool(flagged), bool(again)

    def discard_step(self) -> None:
        """Discards the current step on all ranks; waits only until they have discarded an abandoned previous step.

        Does nothing if the step is already discarded, because a backward pass failed on this or another rank: that is
        so if no error is being handled, or an error of the step's backward pass.

        Raises:
            CoorddError: the gradients of this step are already reduced, so other ranks may have used them.
        """
        error = sys.exception()
        answered, self._answered = self._answered, True
        mine = is_discarded(error, self.channel.prefix)
        if mine or (self._abandoned and not answered and is_deadlock(error)):
            if self._discarded is not None:
                self._clear()
            return
        known, cause = self._discarded is not None and not answered, self._cause
        self._cause = None  # its traceback keeps what the step has computed
        if known and (error is None or of_step(error, own=self._abandoned, cause=cause)):
            return
        if self._abandoned:
            self.drop()
        if self.complete:
            raise reduced_already()
        if not self._begun:
            self._begin_step()
        self.underway.site = call_site(sys._getframe(1))  # noqa: SLF001 - the documented way to the caller
        self.abandon(given_up(self.underway.site, error))
        self._answered = True

    def _end_abandoned(self) -> None:
        """Waits until the other ranks have discarded the step too.

        If they wait for this rank in another operation, that fails, and they discard the step only then. So this rank
        goes on to wait for them, once.

        Raises:
            MismatchError: they still wait for this rank, and not for the end of this step.
        """
        again = False
        while (error := self._wait_abandoned()) is not None and is_deadlock(error):
            self._clear()  # a new pass may have computed gradients
            with self.channel.unbroken(_DISCARDING):
                self._discard_all()
                self._told.tell_again()
            if again:
                self._answered = False
                raise error
            again = True
        self.consistency.begin_again()  # the comparison may have failed after the other operations
        self.reset()

    def _wait_abandoned(self) -> BaseException | None:
        """Waits for this rank's part of an abandoned step; returns the first error."""
        self.underway.wait()
        error = self.underway.failed
        if error is None or self.underway.lost:
            error = self._told.wait() or error
        return error

    def _discard(self, reason: str = "") -> None:
        """Discards this step because a rank has set the discard flag; all ranks call it.

        Raises:
            DiscardedStepError: always.
        """
        if self._repeated and not reason:
            reason = not_all_have_repeated(self.underway.site)
        error = error_of(self.channel.tell("discarded", reason), self.channel.prefix)
        self._clear()
        self.reset()
        self._discarded, self._cause, self._answered = error, None, False
        self._raise_discarded()

    def _raise_discarded(self) -> None:
        if self._discarded is not None:
            raise self._discarded.with_traceback(None)

    def _round(self, *, more: bool, wanted: bool = True) -> None:
        """Reduces the accumulated gradients and waits; no rank waits for a gradient that another rank does not have.

        Parameters without a gradient here contribute zeros, if another rank has a gradient. If no rank has, the ranks
        exchange flags that say whether any may still compute it in this step, so that all ranks make the same number
        of rounds. They do so as well if the buckets change for the next step.

        Args:
            more: whether this rank may make another backward pass in this step.
            wanted: whether this rank still uses the gradients; otherwise it takes part only for the other ranks.
        """
        try:
            self._go_round(more=more, wanted=wanted)
        except BaseException as error:
            self._interrupted(error)
            raise

    def _go_round(self, *, more: bool, wanted: bool) -> None:
        self._check_unspoilt()
        if first := not self._gone_round:
            self.adopt_late()
        self._reduce(first=first, wanted=wanted)
        moving = self._moving
        if first:
            self._listen()
            self._adrift = [gradient for bucket in self._buckets for gradient in bucket.missing()]
            moving = [gradient for gradient in self._loose if gradient.started and gradient.scattered is None]
        missing = [gradient for gradient in (*self._loose, *self._adrift) if not gradient.started]
        again = False
        if first and self._buckets and not (missing or moving or self._change):
            self._finished = True
        else:
            self._finished, again = self._ask(more=more, moving=moving)
        self._moving, self._owed = moving, not self._finished
        self._reduced, self._passes = True, 0
        self.touched = self._adds = self._asks = self._wants_again = False
        if first and wanted:
            self._hear()
        if again:
            self._reopen()
            if not wanted:
                self.abandon("has given up the gradients to which another rank has added")
                self._raise_discarded()
            self._round(more=more, wanted=wanted)

    def _count(self) -> None:
        """Counts this step, once, and starts its consistency check."""
        counted, self._counted = self._counted, True
        if not counted:
            self.consistency.begin()

    def _hear(self) -> None:
        """Checks the result of the consistency check, when no other rank waits for this rank.

        Raises:
            MismatchError: on all ranks: their parameters differ, so no rank may make this step.
        """
        try:
            self.consistency.hear()
        except MismatchError as error:
            self._discarded, self._cause, self._answered = error, None, True
            raise

    def _reduce(self, *, first: bool, wanted: bool) -> None:
        """Starts all reductions that have not started, and waits for all.

        Raises:
            DiscardedStepError: a rank has abandoned the step.
            CoorddError: a gradient could not be reduced.
        """
        alone = [*self._loose, *self._adrift]
        self._count()
        try:
            check_may_wait("waiting for gradients")
            self.consistency.check_alone()
            self._start(alone, wanted=wanted)
            self._close_buckets()  # the last bucket carries the flags of this step
        except Exception as error:
            self.abandon(f"could not give its gradients away: {brief(error)}", error)
            raise
        self._gone_round = True
        self.underway.wait()
        if self.underway.lost and (failed := self.underway.failed) is not None:
            self.abandon(f"could not reduce its gradients: {brief(failed)}", failed)
            raise failed
        if any(bucket.refused for bucket in self._buckets):
            self._discard()
        if (failed := self.underway.failed) is not None and not (first and self._buckets):
            self.abandon(f"could not reduce its gradients: {brief(failed)}", failed)
        self.underway.settle()
        if wanted:
            self._settle(alone)
        made_dense, self.made_dense = self.made_dense, ()
        for gradient in made_dense:
            gradient.make_sparse()

    def _question(self, *, more: bool = False, discard: bool = False, moving: Iterable[Gradient] = ()) -> Handle[Any]:
        """Starts the allreduce of the flags that ranks exchange at the end of a round."""
        flags = np.array([more, self._wants_again, discard, True, self._note_layouts(moving)], np.float64)
        return self.channel.ask(flags, "another backward pass", ReduceOp.SUM)

    def _ask(self, *, more: bool, moving: list[Gradient]) -> tuple[bool, bool]:
        """Exchanges flags; returns whether no rank makes another round in this step, and whether any must reduce again.

        Raises:
            DiscardedStepError: a rank has abandoned the step.
        """
        try:
            others_more, again, discard, present, strided = self._question(more=more, moving=moving).result().tolist()
        except MismatchError as error:
            self.abandon(f"could not end its step: {brief(error)}", error)
            raise
        if discard:
            self._discard()
        if again and self.channel.op is ReduceOp.AVERAGE and present < self.channel.members:
            self._repeated = bool(self._wants_again)
            self._discard()
        if strided:
            self._compare_layouts(moving)
        return not others_more, bool(again)

    def _settle(self, gradients: Iterable[Gradient]) -> None:
        """Stores the reduced gradients, and checks all of them for non-finite values if the user wants that."""
        self._take_over(gradients)
        if self.finiteness is not None:
            self.finiteness.judge(self._sums())

    def reduced(self, loss: float) -> float:
        """Reduces a loss with the operation that reduces the gradients."""
        return float(self.channel.agree(np.array(loss), "loss", self.channel.op))

    def finish_step(self, *, stepping: bool = False) -> None:
        """Completes the reduction of all gradients, also on ranks with fewer backward passes than others.

        Args:
            stepping: whether `step` follows; gradients that are not averaged yet must then be as backward left them.

        Raises:
            DiscardedStepError: the step was discarded on all ranks.
            CoorddError: the script has changed gradients that are not averaged yet.
        """
        self._raise_discarded()
        if self._reduced and self.channel.op.averages and self._replaced_by_hand():
            self._begin_anew([each for each in self._gradients() if each.by_hand])
        if not self._finished:
            by_hand = not self._begun and any(gradient.by_hand for gradient in self._gradients())
            idle = not (self._begun or by_hand)
            self._finish(stepping=stepping)
            if idle:
                self._note_idle_step()
            elif by_hand:
                self._idle = 0
        if self.adopt_late():
            self._finish(stepping=False)

    def _finish(self, *, stepping: bool) -> None:
        if not self._begun:
            self._begin_step()
        if stepping and (text := self._accumulated.check(filter(self._is_local, self._gradients()))):
            refusal = CoorddError(text)
            self.abandon(f"has refused to make it: {text}", refusal)
            raise refusal
        while not self._finished:
            self._round(more=False)

    def _note_idle_step(self) -> None:
        """Warns, once, that this rank makes steps without backward passes while other ranks have gradients."""
        grads = [gradient.parameter.grad for gradient in self._gradients()]
        self._idle += any(grad is not None and grad.layout is torch.strided and bool(grad.any()) for grad in grads)
        if self._idle == _IDLE_STEPS:
            log.warning(_IDLE, self._idle)

    def reset(self) -> None:
        """Prepares the next step."""
        unused = self.unused() if self.grown and self._finished else []
        self._begun = self._reduced = self._finished = self._owed = self._gone_round = self._counted = False
        self._repeated = self._adds = self._asks = self._wants_again = self._abandoned = self.touched = False
        self._passes, self._spoilt, self.graphs = 0, "", False
        self._accumulated.forget()
        self.underway.failed = None
        self._told.forget()
        if self.finiteness is not None:
            self.finiteness.skips = False
        for gradient in (*self._loose, *self._adrift):
            gradient.reset()
        for bucket in self._buckets:
            bucket.reset()
        self.open_buckets = len(self._buckets)
        self._adrift, self._used = [], set()
        if self._moving:
            self._move_in()
        if self._change is not None:
            self._rearrange(self._change)
        if unused:
            self.let_go(unused)
            self.consistency.forget(gradient.parameter for gradient in unused)

    def end_step(self, *, made: bool) -> None:
        """Ends a step; `made` is False if the optimizer or ``nonfinite`` skipped it."""
        for bucket in self._buckets if made else ():
            bucket.commit()
        self.drop()
        if self._tuning is not None:
            self._tuning.step_done()

    def drop(self) -> None:
        """Completes pending reductions of this step, which other ranks may wait for, before its memory is reused."""
        if not (self._begun or self._abandoned):
            self._discarded = self._cause = None
            return
        with self.channel.unbroken("the end of a step"):
            if self._begun and (self._owed or self.touched) and not self._abandoned:
                self._take_part_without_gradients()
            if self._abandoned:
                self._end_abandoned()
            elif self._begun:
                self.underway.wait()
                self.reset()
            self._discarded = self._cause = None

    def _take_part_without_gradients(self) -> None:
        """Makes the rounds of this step that other ranks may wait for; drops local gradients of this rank."""
        self._spoilt, self._wants_again = "", False
        for gradient in self._gradients():
            if self._is_local(gradient):
                gradient.forget()
        try:
            while not self._finished:
                self._round(more=False, wanted=False)
        except (DiscardedStepError, MismatchError):
            log.debug("a step that was given up here has failed", exc_info=True)
