"""Where gradients live: on their own in the first step, then in buckets, in the order in which they were reduced."""

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

from coordd.grouping import Grouping
from coordd.messages import ReduceOp
from coordd.settings import Settings
from coordd_torch.accumulation import without_hook
from coordd_torch.bucket import Bucket, strides_of
from coordd_torch.channel import Channel
from coordd_torch.devices import overlaps
from coordd_torch.gradient import Gradient, add_late_hook, release
from coordd_torch.late import Groups, late, unchanged
from coordd_torch.tuning import OVERLAP, Tuning, first_settings
from coordd_torch.underway import Underway

if TYPE_CHECKING:
    from coordd_torch.reducer import Reducer

__all__ = ["Placement"]

_BEHIND = operator.attrgetter("_cdata")
"""What a tensor of Python stands for; autograd calls its hooks, and there is no public way to know it."""
_LAST_BUCKET_BYTES = 1 << 20
_UNUSED_STEPS = 16
"""Steps in which no rank has the gradient of a parameter that is in no group, before it is let go."""


class Placement:
    """The gradients of one optimizer, by where they live; autotune may lay the buckets out anew between two steps."""

    def __init__(self, channel: Channel, grouping: Grouping, groups: Groups) -> None:
        """Starts without gradients.

        Args:
            channel: how they travel.
            grouping: which of them the user wants in one bucket.
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
        """Whether anything has been given to be reduced since the last round."""
        self.graphs = False
        """Whether a pass of this step may have given gradients graphs, by ``create_graph=True``."""
        self.open_buckets = 0
        """How many buckets have not been given to be reduced in this round."""
        self.closing = False
        """Whether all buckets that are open are given to be reduced, and awaited next."""
        self._buckets: list[Bucket] = []
        self._loose: list[Gradient] = []
        self._moving: list[Gradient] = []
        self._hooks: dict[Gradient, RemovableHandle] = {}
        self._hooked: list[torch.Tensor] = []
        self._behind: list[int] = []
        self.known: set[int] = set()
        """The ids of the parameters whose gradients are reduced."""
        self._lists: list[list[torch.Tensor]] = []
        """The groups' parameters when they were last looked at, if the gradients of all of them are reduced."""
        self._used: set[Gradient] = set()
        self.grown = False
        """Whether parameters were added that may have taken the places of others."""
        self._row_major = False
        """Whether all gradients are row-major in buckets, because the ranks' parameters have different strides."""

    @property
    def counts_changes(self) -> bool:
        """Whether gradients that the script has changed in place are to be reduced, if no pass has made them."""
        return self.channel.op.averages or not self._reduced

    @property
    def complete(self) -> bool:
        """Whether all gradients of the present step are reduced."""
        return self._begun and self._finished

    @property
    def accumulating(self) -> bool:
        """Whether all that passes have made in this step is this rank's alone."""
        return self._begun and not (self._reduced or self.touched or self._abandoned)

    def _gradients(self) -> list[Gradient]:
        return list(itertools.chain(self._loose, *self._buckets))

    @property
    def names(self) -> Iterator[str]:
        """What the parameters are called whose gradients are reduced."""
        return (gradient.name.removeprefix(self.channel.prefix) for gradient in self._gradients())

    def adopt(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Takes parameters in: at the start, and those that are added or thawed later."""
        for name, parameter in parameters:
            release(parameter)
            gradient = Gradient(cast("Reducer", self), self.channel.prefix + name, parameter)
            self._loose.append(gradient)
            self._hooks[gradient] = parameter.register_post_accumulate_grad_hook(gradient.ready)
            self.known.add(id(parameter))
            self._finished, self.grown = False, True
        self._note_hooked()

    def adopt_late(self) -> bool:
        """Takes in the parameters that were added or thawed; says whether there are any.

        All ranks have made the same rounds of a step when they call it: in other rounds they would wait for each other.
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
        """Lists the parameters of each group; nothing if there are some whose gradients are not reduced."""
        lists = [list(group["params"]) for group in groups]
        enough = sum(map(len, lists)) <= len(self.known)  # quickly: most of a model may be frozen
        return lists if enough and self.known.issuperset(map(id, itertools.chain(*lists))) else []

    def add_late_hooks(self) -> None:
        """Has backward passes noticed that compute gradients only of parameters that may be adopted late."""
        for name, parameter in late(self._groups(), self.known, self.names, frozen=True):
            add_late_hook(cast("Reducer", self), name, parameter)

    def restore_hooks(self) -> None:
        """Has autograd call our hooks again where PyTorch has swapped what is behind parameters, as `to()` may."""
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
        """Refuses a gradient that a backward pass may have made without a call of its hook.

        Raises:
            ArgumentError: PyTorch has swapped what is behind a parameter.
        """
        if list(map(_BEHIND, self._hooked)) != self._behind:
            self._hook_again()
            raise without_hook(gradient.name)

    def detach(self) -> None:
        """Takes the hooks off; for when the optimizer is gone."""
        for hook in self._hooks.values():
            hook.remove()

    def trains(self, parameter: torch.Tensor) -> bool:
        """Says whether a parameter is in one of the optimizer's groups, or the optimizer is gone."""
        return not self._groups() or id(parameter) in self._trained()

    def _trained(self) -> set[int]:
        return {id(parameter) for group in self._groups() for parameter in group["params"]}

    def unused(self) -> list[Gradient]:
        """Finds the gradients of parameters that are in no group any more, if no rank had one in the last steps.

        All ranks find the same, for their groups are equal. Steps that a rank has missed because it has joined do not
        count: it would not find the same.
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
        """Remembers, before gradients are reduced once more in a step, which there were."""
        self._used |= {gradient for gradient in self._gradients() if self.grown and gradient.started}

    def let_go(self, gradients: Sequence[Gradient]) -> None:
        """Reduces gradients no longer, between two steps, so that their parameters do not live on for our sake."""
        if not gradients:
            return
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
        """Starts what has not started yet, on behalf of other ranks where this one has nothing."""
        for gradient in gradients:
            if not gradient.started:
                if wanted and gradient.given:
                    gradient.submit()
                else:
                    gradient.fill(kept=wanted or not gradient.changed)

    def _take_over(self, gradients: Iterable[Gradient]) -> None:
        """Takes over what has arrived: in buckets, and what these gradients have reduced on their own."""
        for bucket in self._buckets:
            bucket.settle()
        for gradient in gradients:
            gradient.settle()

    def _sums(self) -> Iterator[torch.Tensor]:
        """What has been reduced."""
        for bucket in self._buckets:
            yield bucket.sums
        for gradient in self._loose:
            if gradient.started and (value := gradient.parameter.grad) is not None:
                yield value if value.layout is torch.strided else value.coalesce().values()

    def _replaced_by_hand(self) -> bool:
        """Whether all sums of this step were cleared or replaced, and what lies there instead is to be reduced.

        If none was cleared, they are the sums still, clipped, say.
        """
        gradients = self._gradients()
        if not [gradient for gradient in gradients if gradient.parameter.grad is None]:  # the usual case
            return False
        had = [gradient for gradient in gradients if gradient.started]
        given_up = all(gradient.changed for gradient in had) and any(gradient.cleared for gradient in had)
        beside = (gradient for gradient in gradients if gradient.started or not gradient.passes)
        return given_up and any(gradient.by_hand for gradient in beside)

    def passes(self) -> dict[torch.Tensor, int]:
        """Counts each parameter's backward passes of this step."""
        return {gradient.parameter: gradient.passes for gradient in self._gradients()}

    def signal(self, bucket: Bucket) -> None:
        """Lets autotune speak behind the gradients of the first bucket."""
        tuning = self._tuning if bucket is self._buckets[0] else None
        bucket.signal(None if tuning is None else tuning.signals(), repeated=self._repeated)

    def _listen(self) -> None:
        """Hears what autotune says, the same on all ranks in the same step."""
        if self._tuning is not None and self._buckets:
            scale = self.channel.members if self.channel.op.averages else 1
            self._change = self._tuning.hear((self._buckets[0].signals.double() * scale).tolist())

    def _move_in(self) -> None:
        """Gives the gradients that were reduced on their own places in buckets, in the order of the plans."""
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
        """Has gradients laid out as their parameters are now, which autograd and optimizers like.

        Returns:
            whether one is not row-major.
        """
        for gradient in moving:
            gradient.strides = strides_of(gradient.parameter)
        return any(gradient.strides is not None for gradient in moving)

    def _compare_layouts(self, moving: Sequence[Gradient]) -> None:
        """Finds out whether parameters have the same strides on all ranks: buckets are added number by number.

        All ranks call it if a rank has a gradient that is not row-major.
        """
        texts = sorted(f"{gradient.name} {gradient.strides}" for gradient in moving)
        number = int.from_bytes(blake2b(repr(texts).encode(), digest_size=7).digest())
        largest, negated = self.channel.agree(np.array([number, -number], np.int64), "layouts", ReduceOp.MAX)
        self._row_major |= bool(largest != -negated)

    def _settle_in(self, gradients: Sequence[Gradient]) -> None:
        """Makes buckets for gradients, as the settings want them."""
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
        """Makes the next step a first one, as on ranks that have joined and missed what the others did meanwhile."""
        self._joins = self.channel.joins
        for gradient in self._gradients():
            gradient.unused = 0
        for bucket in self._buckets:
            for gradient in bucket:
                gradient.leave_bucket()
                self._loose.append(gradient)
            bucket.retire()
        self._buckets, self._moving, self._tuning, self._change = [], [], None, None
        self.open_buckets, self._row_major = 0, False
        if self._settings != self._first_settings:  # a rank that has joined does not know what was chosen since
            self._use(self._first_settings)

    def _use(self, settings: Settings) -> None:
        self._settings = settings
        self.channel.daemon.set_window(settings.cycle_ms / 1e3)
        self.channel.compress(wanted=settings.compression != "none")

    def _rearrange(self, settings: Settings) -> None:
        """Carries a choice of autotune out, between two steps."""
        self._use(settings)
        self._change = None
        gradients = [gradient for bucket in self._buckets for gradient in bucket]
        for bucket in self._buckets:
            bucket.retire()
        self._buckets = []
        self._settle_in(gradients)
