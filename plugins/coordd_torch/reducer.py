"""Reducing the gradients of one optimizer while backward still computes the rest.

Its one rule: no rank ever waits for a gradient that another does not have. Who has none takes part with zeros.

In the first step every gradient is reduced on its own. Then all ranks know the same order, that of the plans, and the
gradients move into buckets.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from coordd.errors import ArgumentError, CoorddError
from coordd.grouping import Grouping
from coordd.handles import call_site
from coordd.inventory import Inventory
from coordd.messages import ReduceOp
from coordd.settings import Settings
from coordd_torch.bucket import Bucket
from coordd_torch.channel import Channel
from coordd_torch.devices import overlaps
from coordd_torch.finiteness import Finiteness
from coordd_torch.gradient import Gradient, nested, release
from coordd_torch.tuning import AT_END, OVERLAP, Tuning
from coordd_torch.underway import Underway

__all__ = ["Reducer"]

_LAST_BUCKET_BYTES = 1 << 20


class Reducer:
    """All gradients of one optimizer."""

    def __init__(
        self,
        channel: Channel,
        parameters: Iterable[tuple[str, torch.Tensor]],
        *,
        passes_per_step: int,
        sparse_as_dense: bool,
        grouping: Grouping,
    ) -> None:
        self.channel = channel
        self.underway = Underway(channel)
        self.passes_per_step = passes_per_step
        self.sparse_as_dense = sparse_as_dense
        self._grouping = grouping
        self._joins = channel.joins
        config = channel.daemon.config
        self._settings = Settings(
            fusion_mb=config.fusion_mb,
            cycle_ms=config.cycle_ms,
            buckets=1,
            algorithm=OVERLAP if config.overlap else AT_END,
            compression="none" if channel.plain else "chosen",
        )
        self._first_settings = self._settings
        self._tuning: Tuning | None = None
        self._change: Settings | None = None
        self.expected: set[int] = set()
        self.skipped = False
        self._begun = False
        self._reduced = False
        self._finished = False
        self._replaced = False
        self.touched = False
        """Whether this backward pass has made a gradient."""
        self._buckets: list[Bucket] = []
        self._loose: list[Gradient] = []
        self._gone_round = False
        self._adrift: list[Gradient] = []
        self._moving: list[Gradient] = []
        self._hooks: list[RemovableHandle] = []
        self.known: set[int] = set()
        """The ids of the parameters whose gradients are reduced."""
        named = list(parameters)
        self._inventory: Inventory | None = self.channel.inventory(named)
        wanted, rank = self.channel.daemon.config.nonfinite, self.channel.daemon.world.rank
        self.finiteness = Finiteness(wanted, rank) if wanted != "ignore" else None
        self.adopt(named)
        for gradient in self._loose:
            gradient.remember()

    def adopt(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes parameters in: at the start, and those that are added or thawed later."""
        for name, parameter in parameters:
            release(parameter)
            gradient = Gradient(self, self.channel.prefix + name, parameter)
            self._loose.append(gradient)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(gradient.ready))
            self.known.add(id(parameter))
            self._finished = False

    def detach(self) -> None:
        """Takes the hooks off; for when the optimizer is gone."""
        for hook in self._hooks:
            hook.remove()

    def replace(self) -> None:
        """Gives way to another optimizer that has been made for the same parameters."""
        self.underway.wait()
        self.detach()
        self._replaced = True

    def check_current(self) -> None:
        """Refuses to go on without the parameters.

        Raises:
            ArgumentError: another optimizer has taken them.
        """
        if self._replaced:
            text = (
                "another DistributedOptimizer was made for parameters of this one, and reduces their gradients now; "
                "use one for all parameters, or let each have its own"
            )
            raise ArgumentError(text)

    def expect_end_of_backward(self, task: int, first: Gradient) -> None:
        """Has autograd call us when the backward pass with this number ends; it has made this gradient first."""
        if self._begun and self._given_up(first):
            self.drop()
        if not self._begun and self._joins != self.channel.joins:
            self._start_over()
        self._begun = True
        self.expected.add(task)
        self.touched = self._finished = False
        self.underway.site = call_site(sys._getframe(1))  # noqa: SLF001 - the documented way to the caller
        engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - there is no public way; FSDP uses it, too
        engine.queue_callback(lambda: self._end_of_backward(task))

    def _given_up(self, first: Gradient) -> bool:
        """Says whether the gradients of this step were cleared without a step; one stands for all."""
        for gradient in (first, *self._gradients()):
            if gradient.passes and (self._reduced or not gradient.started):
                return gradient.changed
        return False

    def _gradients(self) -> Iterator[Gradient]:
        yield from self._loose
        for bucket in self._buckets:
            yield from bucket

    def too_many(self, gradient: Gradient) -> CoorddError:
        """Says that a gradient was computed when its step should have been made."""
        if nested():
            text = (
                f"{gradient.name!r} is computed in several reentrant checkpoints of one backward pass, so nobody can "
                "tell when it is complete: use checkpoint(..., use_reentrant=False)"
            )
        else:
            text = (
                "Gradients were computed more than backward_passes_per_step times before call to step() "
                f"({gradient.name!r}, {self.passes_per_step}). Increase backward_passes_per_step to accumulate "
                "gradients locally; to skip a step, clear them by optimizer.zero_grad()."
            )
        return CoorddError(text)

    def _end_of_backward(self, task: int) -> None:
        self.expected.discard(task)
        if not self.touched:
            return
        if not nested():
            self._round(more=True)
        elif not self.expected:
            # Nobody may call us when the outer pass ends, for all parameters may lie in inner ones.
            self.underway.settle()
            for gradient in (*self._loose, *self._adrift):
                gradient.settle()

    def _round(self, *, more: bool, wanted: bool = True) -> None:
        """Reduces what has been accumulated and waits; no rank is left waiting for what another does not have.

        Parameters without a gradient here take part with zeros, if another rank has one. Where none has, the ranks ask
        each other whether any may still get one in this step, so that all of them make the same number of rounds.

        Args:
            more: whether this rank may make another backward pass in this step.
            wanted: whether this rank still has a use for the gradients; else it takes part for the others' sake.
        """
        first, self._gone_round = not self._gone_round, True
        inventory, self._inventory = self._inventory, None
        if inventory is not None:
            inventory.check()
        for bucket in self._buckets:
            bucket.close()
        alone = [*self._loose, *self._adrift]
        self._start(alone, wanted=wanted)
        self.underway.settle()
        if wanted:
            self._settle(alone)
        if first:
            self._listen()
            self._adrift = [gradient for bucket in self._buckets for gradient in bucket.settle()]
            self._moving = [gradient for gradient in self._loose if gradient.started and gradient.scattered is None]
        missing = [gradient for gradient in (*self._loose, *self._adrift) if not gradient.started]
        self._finished = not missing or not self._any(more)
        self._reduced = True

    def _start(self, gradients: Iterable[Gradient], *, wanted: bool) -> None:
        """Starts what has not started yet, on behalf of other ranks where this one has nothing."""
        for gradient in gradients:
            if not gradient.started:
                if wanted and gradient.given:
                    gradient.submit()
                else:
                    gradient.fill()

    def _settle(self, gradients: Iterable[Gradient]) -> None:
        """Takes over what has been reduced on its own, and looks at all sums if the user wants that."""
        for gradient in gradients:
            gradient.settle()
        if self.finiteness is not None:
            self.finiteness.judge(self._sums())

    def _sums(self) -> Iterator[torch.Tensor]:
        """What has been reduced."""
        for bucket in self._buckets:
            yield bucket.sums
        for gradient in self._loose:
            if gradient.started and (value := gradient.parameter.grad) is not None:
                yield value if value.layout is torch.strided else value.coalesce().values()

    def _any(self, more: bool) -> bool:
        return bool(self.channel.agree(np.array(more), "another backward pass", ReduceOp.MAX))

    def reduced(self, loss: float) -> float:
        """Reduces a loss as its gradients are."""
        return float(self.channel.agree(np.array(loss), "loss", self.channel.op))

    def finish_step(self) -> None:
        """Makes sure that everything is reduced, on ranks with fewer backward passes than others, too."""
        while not self._finished:
            self._round(more=False)

    def reset(self) -> None:
        """Gets ready for the next step."""
        self._begun = self._reduced = self._finished = self._gone_round = False
        self.underway.failed = None
        if self.finiteness is not None:
            self.finiteness.skips = False
        for gradient in (*self._loose, *self._adrift):
            gradient.reset()
        for bucket in self._buckets:
            bucket.reset()
        self._adrift = []
        if self._moving:
            self._move_in()
        if self._change is not None:
            self._rearrange(self._change)

    def end_step(self, *, made: bool) -> None:
        """Gets ready for the next step, after this one has been made, or skipped by the optimizer itself."""
        for bucket in self._buckets if made else ():
            bucket.commit()
        self.drop()
        if self._tuning is not None:
            self._tuning.step_done()

    def signal(self, bucket: Bucket) -> None:
        """Lets autotune speak behind the gradients of the first bucket."""
        if self._tuning is None or bucket is not self._buckets[0]:
            bucket.signals.zero_()
        else:
            bucket.signals.copy_(torch.tensor(self._tuning.signals()))

    def _listen(self) -> None:
        """Hears what autotune says, the same on all ranks in the same step."""
        if self._tuning is not None and self._buckets:
            scale = self.channel.members if self.channel.op.averages else 1
            self._change = self._tuning.hear((self._buckets[0].signals.double() * scale).tolist())

    def _move_in(self) -> None:
        """Gives the gradients that were reduced on their own places in buckets, in the order of the plans."""
        moving, self._moving = sorted(self._moving, key=lambda gradient: gradient.turn), []
        self._loose = [gradient for gradient in self._loose if gradient not in moving]
        self._settle_in(moving)
        daemon = self.channel.daemon
        if daemon.config.autotune and self._tuning is None and self.channel.members == daemon.world.size:
            requests = [gradient.request for gradient in moving]
            self._tuning = Tuning(daemon.config, daemon.world, requests, self._settings)

    def _settle_in(self, gradients: Sequence[Gradient]) -> None:
        """Makes buckets for gradients, as the settings want them."""
        settings = self._settings
        early = settings.algorithm == OVERLAP
        early &= all(overlaps(gradient.parameter.device.type) for gradient in gradients)
        total = sum(gradient.parameter.nbytes for gradient in gradients)
        limit = settings.bucket_bytes(total) if early else sys.maxsize
        last = min(limit, _LAST_BUCKET_BYTES) if early else limit
        for group in self._grouping.buckets(gradients, limit=limit, last=last):
            name = f"{self.channel.prefix}gradients.{len(self._buckets)}"
            self._buckets.append(Bucket(self, name, group, early=early))

    def _start_over(self) -> None:
        """Makes the next step a first one, as on ranks that have joined and missed what the others did meanwhile."""
        self._joins = self.channel.joins
        for bucket in self._buckets:
            for gradient in bucket:
                gradient.leave_bucket()
                self._loose.append(gradient)
            bucket.retire()
        self._buckets, self._moving, self._tuning, self._change = [], [], None, None
        self._settings = self._first_settings

    def _rearrange(self, settings: Settings) -> None:
        """Carries a choice of autotune out, between two steps."""
        self._settings, self._change = settings, None
        self.channel.daemon.set_window(settings.cycle_ms / 1e3)
        self.channel.compress(wanted=settings.compression != "none")
        gradients = [gradient for bucket in self._buckets for gradient in bucket.gradients]
        for bucket in self._buckets:
            bucket.retire()
        self._buckets = []
        self._settle_in(gradients)

    def drop(self) -> None:
        """Lets what is under way end, whatever comes of it, before its memory is used for something else.

        Other ranks may still be in this step, so it is made to its end.
        """
        if not self._begun and not self._reduced:
            return
        while self._reduced and not self._finished:
            self._round(more=False, wanted=False)
        self.underway.wait()
        self.reset()
