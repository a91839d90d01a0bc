"""Placement of gradients: on their own in the first step, then in buckets, in the order in which they were reduced."""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from coordd.gradients.bucketing import Grouping
from coordd.ops.messages import ReduceOp
from coordd.tuning.settings import Settings
from coordd_torch.accumulation import without_hook
from coordd_torch.bucket import Bucket, strides_of
from coordd_torch.communication import Channel
from coordd_torch.devices import overlaps
from coordd_torch.gradient import Gradient, add_late_hook, release
from coordd_torch.late_parameters import Groups, late, unchanged
from coordd_torch.pending import Underway
from coordd_torch.tuning import OVERLAP, Tuning, first_settings

if TYPE_CHECKING:
    from coordd_torch.reducer import Reducer

__all__ = ["Placement"]

_BEHIND = operator.attrgetter("_cdata")
"""The C++ tensor of a Python tensor, whose hooks autograd calls; there is no public way to get it."""
_LAST_BUCKET_BYTES = 1 << 20
_UNUSED_STEPS = 16
"""A parameter in no group is released after this many steps in which no rank has its gradient."""


class Placement:
    """The gradients of one optimizer and their buckets; autotune may rebuild the buckets between two steps."""

    def __init__(self, channel: Channel, grouping: Grouping, groups: Groups) -> None:
        """Starts without gradients.

        Args:
            channel: communication settings.
            grouping: the gradients that the user wants in one bucket.
            groups: the optimizer's parameter groups.
        """
        self.channel = channel
        self.underway = Underway(channel)
        self._grouping = grouping
        self._groups = groups
        self._joins = channel.joins
        self._settings = first_settings(channel.daemon.config, compresses=not channel.plain)
        self._first_settings = self._settings
        self._tuning: Tuning | None = None
        self._change: Settings | None = None
        self._repeated = self._reduced = self._finished = self._begun = self._abandoned = False
        self.touched = False
        """Whether any gradient was submitted since the last round."""
        self.graphs = False
        """Whether gradients of this step may have graphs, by ``create_graph=True``."""
        self.open_buckets = 0
        """Number of buckets that are not submitted yet in this round."""
        self.closing = False
        """Whether all open buckets are being submitted, and this thread waits for them next."""
        self._buckets: list[Bucket] = []
        self._loose: list[Gradient] = []
        self._moving: list[Gradient] = []
        self._hooks: dict[Gradient, RemovableHandle] = {}
        self._hooked: list[torch.Tensor] = []
        self._behind: list[int] = []
        self.known: set[int] = set()
        """The ids of the parameters whose gradients are reduced."""
        self._lists: list[list[torch.Tensor]] = []
        """The groups' parameters when last checked, if the gradients of all of them are reduced."""
        self._used: set[Gradient] = set()
        self.grown = False
        """Whether parameters were added, which may have replaced others."""
        self._row_major = False
        """Whether all gradients are row-major in buckets, because the ranks' parameters have different strides."""

    @property
    def counts_changes(self) -> bool:
        """Whether gradients that the script changed in place are reduced, if no pass has computed them."""
        return self.channel.op.averages or not self._reduced

    @property
    def complete(self) -> bool:
        """Whether all gradients of the current step are reduced."""
        return self._begun and self._finished

    @property
    def accumulating(self) -> bool:
        """Whether all gradients of this step are still local to this rank."""
        return self._begun and not (self._reduced or self.touched or self._abandoned)

    def _gradients(self) -> list[Gradient]:
        return list(itertools.chain(self._loose, *self._buckets))

    @property
    def names(self) -> Iterator[str]:
        """The names of the parameters whose gradients are reduced, without the prefix."""
        return (gradient.name.removeprefix(self.channel.prefix) for gradient in self._gradients())

    def adopt(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Starts to reduce the gradients of parameters: initial ones, and ones that are added or unfrozen later."""
        for name, parameter in parameters:
            release(parameter)
            gradient = Gradient(cast("Reducer", self), self.channel.prefix + name, parameter)
            self._loose.append(gradient)
            self._hooks[gradient] = parameter.register_post_accumulate_grad_hook(gradient.ready)
            self.known.add(id(parameter))
            self._finished, self.grown = False, True
        self._note_hooked()

    def adopt_late(self) -> bool:
        """Adopts the parameters that were added or unfrozen; returns whether there are any.

        All ranks call it after the same number of rounds of a step; otherwise they would wait for each other.
        """
        groups = self._groups()
        if self._lists and unchanged(groups, self._lists):
            return False
        found = late(groups, self.known, self.names)
        if found:
            self.adopt(found)
        self._lists = self._known_lists(groups)
        return bool(found)

    def _known_lists(self, groups: Iterable[Mapping[str, Any]]) -> list[list[torch.Tensor]]:
        """Returns the parameters of each group; an empty list if the gradients of some are not reduced."""
        lists = [list(group["params"]) for group in groups]
        enough = sum(map(len, lists)) <= len(self.known)  # a quick check first: most of a model may be frozen
        return lists if enough and self.known.issuperset(map(id, itertools.chain(*lists))) else []

    def add_late_hooks(self) -> None:
        """Adds hooks that detect backward passes with gradients only of parameters that are not adopted yet."""
        for name, parameter in late(self._groups(), self.known, self.names, frozen=True):
            add_late_hook(cast("Reducer", self), name, parameter)

    def restore_hooks(self) -> None:
        """Registers the hooks again if PyTorch has swapped the C++ tensors of parameters, as `to()` may."""
        if list(map(_BEHIND, self._hooked)) != self._behind:
            self._hook_again()

    def _hook_again(self) -> None:
        for parameter in self._hooked:
            parameter._post_accumulate_grad_hooks = parameter._post_accumulate_grad_hooks  # noqa: SLF001 - no public way
        self._note_hooked()

    def _note_hooked(self) -> None:
        self._hooked = [gradient.parameter for gradient in self._hooks]
        self._behind = list(map(_BEHIND, self._hooked))

    def check_hook(self, gradient: Gradient) -> None:
        """Rejects a gradient that a backward pass may have computed without calling its hook.

        Raises:
            ArgumentError: PyTorch has swapped the C++ tensor of a parameter.
        """
        if list(map(_BEHIND, self._hooked)) != self._behind:
            self._hook_again()
            raise without_hook(gradient.name)

    def detach(self) -> None:
        """Removes the hooks when the optimizer is replaced or garbage-collected."""
        for hook in self._hooks.values():
            hook.remove()

    def trains(self, parameter: torch.Tensor) -> bool:
        """Returns whether a parameter is in one of the optimizer's groups, or the optimizer no longer exists."""
        return not self._groups() or id(parameter) in self._trained()

    def _trained(self) -> set[int]:
        return {id(parameter) for group in self._groups() for parameter in group["params"]}

    def unused(self) -> list[Gradient]:
        """Returns the gradients of parameters that have left all groups, if no rank had them in the last steps.

        The result is equal on all ranks, because their groups are. Steps that a joined rank has missed do not count,
        because that rank would find another result.
        """
        if not (self._buckets and self._buckets[0].has_all_ranks):
            return []
        trained = self._trained()
        beside = [gradient for gradient in self._gradients() if id(gradient.parameter) not in trained]
        self.grown = bool(beside)
        for gradient in beside:
            gradient.unused = 0 if gradient.started or gradient in self._used else gradient.unused + 1
        return [gradient for gradient in beside if gradient.unused >= _UNUSED_STEPS]

    def _note_used(self) -> None:
        """Records which gradients exist, before another reduction in the same step."""
        self._used |= {gradient for gradient in self._gradients() if self.grown and gradient.started}

    def let_go(self, gradients: Sequence[Gradient]) -> None:
        """Stops reducing gradients, between two steps, so that coordd does not keep their parameters alive."""
        leaving, self._lists = set(gradients), []
        for gradient in leaving:
            self.known.discard(id(gradient.parameter))
            gradient.leave(self._hooks.pop(gradient))
            self.channel.forget(gradient.name)
        self._note_hooked()
        self._loose = [gradient for gradient in self._loose if gradient not in leaving]
        left = [bucket for bucket in self._buckets if not leaving.isdisjoint(bucket)]
        self._buckets = [bucket for bucket in self._buckets if bucket not in left]
        for bucket in left:
            bucket.retire()
        self._settle_in([gradient for bucket in left for gradient in bucket if gradient not in leaving])

    def _clear(self) -> None:
        for gradient in self._gradients():
            gradient.parameter.grad = None

    def _close_buckets(self) -> None:
        self.closing = True
        try:
            for bucket in self._buckets:
                bucket.close()
        finally:
            self.closing = False

    def _start(self, gradients: Iterable[Gradient], *, wanted: bool) -> None:
        """Submits the gradients that have not started, and placeholders for missing ones."""
        for gradient in gradients:
            if not gradient.started:
                if wanted and gradient.given:
                    gradient.submit()
                else:
                    gradient.fill(kept=wanted or not gradient.changed)

    def _take_over(self, gradients: Iterable[Gradient]) -> None:
        """Stores the reduced values of all buckets, and of the given gradients that were reduced on their own."""
        for bucket in self._buckets:
            bucket.settle()
        for gradient in gradients:
            gradient.settle()

    def _sums(self) -> Iterator[torch.Tensor]:
        """Yields the reduced gradients."""
        for bucket in self._buckets:
            yield bucket.sums
        for gradient in self._loose:
            if gradient.started and (value := gradient.parameter.grad) is not None:
                yield value if value.layout is torch.strided else value.coalesce().values()

    def _replaced_by_hand(self) -> bool:
        """Returns whether the script cleared or replaced all reduced gradients, so that the new ones must be reduced.

        If none was cleared, they count as the reduced gradients, clipped, say.
        """
        gradients = self._gradients()
        if any(gradient.started and not gradient.changed for gradient in gradients):  # usually the first one is
            return False
        given_up = any(gradient.started and gradient.cleared for gradient in gradients)
        beside = (gradient for gradient in gradients if gradient.started or not gradient.passes)
        return given_up and any(gradient.by_hand for gradient in beside)

    def passes(self) -> dict[torch.Tensor, int]:
        """Returns the number of backward passes of this step by parameter."""
        return {gradient.parameter: gradient.passes for gradient in self._gradients()}

    def signal(self, bucket: Bucket) -> None:
        """Writes the flags of a bucket, and in the first bucket the signals of autotune."""
        tuning = self._tuning if bucket is self._buckets[0] else None
        bucket.signal(None if tuning is None else tuning.signals(), repeated=self._repeated)

    def _listen(self) -> None:
        """Reads the reduced signals of autotune, which are equal on all ranks in the same step.

        A choice waits for the end of the step, also when the step's gradients are reduced again, without a new choice.
        """
        if self._tuning is not None and self._buckets:
            self._change = self._tuning.hear(self._buckets[0].signals.double().tolist()) or self._change

    def _move_in(self) -> None:
        """Creates buckets for the gradients that were reduced on their own, in the order of the plans."""
        moving, self._moving = sorted(self._moving, key=lambda gradient: gradient.turn), []
        self._loose = [gradient for gradient in self._loose if gradient not in moving]
        for gradient in moving if self._row_major else ():
            gradient.strides = None
        self._settle_in(moving)
        daemon = self.channel.daemon
        if daemon.config.autotune and self._tuning is None and self.channel.members == daemon.world.size:
            requests = [gradient.request for gradient in moving]
            self._tuning = Tuning(daemon.config, daemon.world, requests, self._settings)

    @staticmethod
    def _note_layouts(moving: Iterable[Gradient]) -> bool:
        """Sets the strides of gradients in buckets to those of their parameters, as autograd and optimizers prefer.

        Returns:
            Whether a gradient is not row-major.
        """
        for gradient in moving:
            gradient.strides = strides_of(gradient.parameter)
        return any(gradient.strides is not None for gradient in moving)

    def _compare_layouts(self, moving: Sequence[Gradient]) -> None:
        """Falls back to row-major gradients if strides differ between ranks, because buckets are summed elementwise.

        All ranks call it if a rank has a gradient that is not row-major.
        """
        texts = sorted(f"{gradient.name} {gradient.strides}" for gradient in moving)
        number = int.from_bytes(blake2b(repr(texts).encode(), digest_size=7).digest())
        largest, negated = self.channel.agree(np.array([number, -number], np.int64), "layouts", ReduceOp.MAX)
        self._row_major |= bool(largest != -negated)

    def _settle_in(self, gradients: Sequence[Gradient]) -> None:
        """Creates buckets for gradients according to the settings."""
        settings = self._settings
        early = settings.algorithm == OVERLAP
        early &= all(overlaps(gradient.parameter.device.type) for gradient in gradients)
        total = sum(gradient.parameter.nbytes for gradient in gradients)
        limit = settings.bucket_bytes(total) if early else sys.maxsize
        last = min(limit, _LAST_BUCKET_BYTES) if early else limit
        for group in self._grouping.buckets(gradients, limit=limit, last=last):
            self._buckets.append(Bucket(self, self._free_name(), group, early=early))
        self.open_buckets = len(self._buckets)

    def _free_name(self) -> str:
        taken = {bucket.name for bucket in self._buckets}
        names = (f"{self.channel.prefix}gradients.{number}" for number in itertools.count())
        return next(name for name in names if name not in taken)

    def _start_over(self) -> None:
        """Makes the next step a first step, because joined ranks have missed the steps of the others."""
        self._joins = self.channel.joins
        for gradient in self._gradients():
            gradient.unused = 0
        for bucket in self._buckets:
            for gradient in bucket:
                gradient.leave_bucket()
                self._loose.append(gradient)
            bucket.retire()
        if self._tuning is not None:
            self._tuning.close()
        self._buckets, self._moving, self._tuning, self._change = [], [], None, None
        self.open_buckets, self._row_major = 0, False
        if self._settings != self._first_settings:  # a joined rank does not know the later choices
            self._use(self._first_settings)

    def _use(self, settings: Settings) -> None:
        self._settings = settings
        self.channel.daemon.set_window(settings.cycle_ms / 1e3)
        self.channel.compress(wanted=settings.compression != "none")

    def _rearrange(self, settings: Settings) -> None:
        """Applies new settings of autotune, between two steps."""
        self._use(settings)
        self._change = None
        gradients = [gradient for bucket in self._buckets for gradient in bucket]
        for bucket in self._buckets:
            bucket.retire()
        self._buckets = []
        self._settle_in(gradients)
