"""One parameter's gradient, from backward to its reduction: in a bucket, or on its own."""

from __future__ import annotations

import gc
import sys
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.hooks import RemovableHandle

from coordd.errors import ArgumentError
from coordd.messages import Request
from coordd.table import Entry
from coordd_torch.references import has_other_users, version_of, whereabouts, write
from coordd_torch.scattered import Scattered
from coordd_torch.tensors import check_dense, view

if TYPE_CHECKING:
    from coordd_torch.bucket import Bucket
    from coordd_torch.reducer import Reducer
    from coordd_torch.underway import Underway

__all__ = ["Gradient", "add_late_hook", "check_unreduced", "nested", "release"]

_NOTHING = np.empty(0, np.uint8)
_current_task = torch._C._current_graph_task_id  # noqa: SLF001 - there is no public way; FSDP uses it, too


class Gradient:
    """One parameter's gradient.

    Until it has a place in a bucket it is its own handle towards the daemon, if it is dense: made once, not every step,
    and waited for together with all others.
    """

    def __init__(self, reducer: Reducer, name: str, parameter: torch.Tensor) -> None:
        # First what each backward pass looks at, in the memory that processors fetch together.
        self.reducer = reducer
        self.bucket: Bucket | None = None
        self.started = False
        self.passes = 0
        self.parameter = parameter
        self._known: weakref.ref[torch.Tensor] | None = None
        self._version = 0
        self._whereabouts: tuple[object, int] = (None, 0)
        self._own: torch.Tensor | None = None
        self._is_new = False
        """Whether autograd has made ``.grad`` in the last pass; then it may lie where other gradients lie."""
        self._travelling: torch.Tensor | None = None
        self._entry: Entry | None = None
        self._dtype: np.dtype[Any] | None = None
        self._sparse_dim = 1
        self.scattered: Scattered | None = None
        """Its way, once it has been sparse."""
        self.name = name
        self.submitted = 0.0
        self.strides: tuple[int, ...] | None = None
        """How it lies in a bucket, the same on all ranks; None for row-major."""
        self.unused = 0
        """For how many steps it has been in no group, and no rank had it."""

    @property
    def nbytes(self) -> int:
        """How many bytes it takes in a bucket."""
        return self.parameter.nbytes

    @property
    def kind(self) -> Hashable:
        """What all gradients of a bucket have in common."""
        return self.parameter.dtype, self.parameter.device

    @property
    def owner(self) -> torch.Tensor:
        """By which the user's groups name it."""
        return self.parameter

    @property
    def underway(self) -> Underway:
        """What waits for it once it has been submitted."""
        return self.reducer.underway

    @property
    def turn(self) -> tuple[int, int]:
        """The place in the plans at which it was last reduced on its own; equal on all ranks."""
        return self._entry.turn if self._entry is not None else (0, 0)

    @property
    def request(self) -> Request:
        """What it was announced as when it was last reduced on its own."""
        assert self._entry is not None  # noqa: S101 - who has a place in a bucket was
        return self._entry.request

    def ready(self, _: torch.Tensor) -> None:
        """Runs when backward has accumulated this gradient."""
        reducer = self.reducer
        task = _current_task()
        if task not in reducer.expected and not reducer.expect_end_of_backward(task, self):
            return
        self.passes += 1
        if self.started:
            reducer.repeat(self)
        elif self.passes >= reducer.limit:
            self.submit()

    @property
    def given(self) -> bool:
        """Whether there is something to reduce: of a backward pass, or set by hand since the last step.

        Raises:
            ArgumentError: a backward pass may have made it unnoticed, for the hook is gone.
        """
        if self.passes > 0:
            return True
        found = self.by_hand
        if found:
            self.reducer.check_hook(self)
        return found

    @property
    def _rewritten(self) -> bool:
        """Whether ``.grad`` was changed since the last step, in place or by other memory, but by more than `zero_grad`.

        Sums that clipping has changed in this step, say, must not be added up again.
        """
        value = self.parameter.grad
        if value is None or value.layout is not torch.strided or not self.reducer.counts_changes:
            return False
        if self.bucket is not None and self.bucket.holds(self, value):
            changed = version_of(value) != self.bucket.version(self)
        else:
            kind, address = whereabouts(value)
            moved = kind == self._whereabouts[0] and address != self._whereabouts[1]
            changed = moved or version_of(value) != self._version
        return changed and bool(value.detach().any())

    @property
    def changed(self) -> bool:
        """Whether ``.grad`` is another tensor than what was seen last, or has been cleared."""
        value = self.parameter.grad
        if value is None:
            return self.started or self._known is not None
        if self.bucket is not None and self.bucket.holds(self, value):
            return False
        return self._known is None or self._known() is not value

    @property
    def by_hand(self) -> bool:
        """Whether the script has set ``.grad`` since it was seen last, or has changed what is there."""
        return self.parameter.grad is not None and (self.changed or self._rewritten)

    @property
    def cleared(self) -> bool:
        """Whether there was a ``.grad`` and is none."""
        return self.parameter.grad is None and self.changed

    @property
    def is_new(self) -> bool:
        """Whether a pass has made it anew; to what the script has put there it would have added."""
        value = self.parameter.grad
        return value is not None and self.changed and version_of(value) == 0

    def meddled(self, largest: torch.Tensor | None) -> bool:
        """Says whether ``.grad`` was replaced, or changed in place, since the last backward pass.

        Args:
            largest: what `largest` has returned then. Loss scalers and ``.grad.data`` change values without a trace.
        """
        value = self.parameter.grad
        if value is None:
            return False
        if self._known is None or self._known() is not value or value._version != self._version:  # noqa: SLF001 - no public way
            return True
        now = self.largest()
        return now is not None and largest is not None and not torch.equal(now.nan_to_num(), largest.nan_to_num())

    def largest(self) -> torch.Tensor | None:
        """The largest magnitude in it; None where there is none."""
        value = self.parameter.grad
        if value is None or value.layout is not torch.strided or not value.numel():
            return None
        with torch.no_grad():
            found: torch.Tensor = torch.linalg.vector_norm(value, torch.inf)
            return found

    def leave(self, hook: RemovableHandle) -> None:
        """Goes out of the reduction; in the place of its hook, an error is raised if there is a gradient after all."""
        hooks = self.parameter._post_accumulate_grad_hooks  # noqa: SLF001 - frozen parameters take no new hooks
        hooks[hook.id] = _RefusingHook(weakref.ref(self.reducer), self.name)

    def leave_bucket(self) -> None:
        """Goes on alone, when its bucket is retired."""
        self.bucket = self.strides = None

    def remember(self, *, changed: bool = False) -> None:
        """Sees which tensor ``.grad`` is, and how often it has been changed in place.

        Args:
            changed: whether the script has changed it since the last step, which is not forgotten by this.
        """
        value = self.parameter.grad
        self._known = None if value is None else weakref.ref(value)
        self._version = -1 if changed else 0 if value is None else version_of(value)
        self._whereabouts = whereabouts(value)

    def saved(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns what ``.grad`` is, and a copy if it lies in a bucket, which the end of a step writes to."""
        value = self.parameter.grad
        held = value is not None and self.bucket is not None and self.bucket.holds(self, value)
        return value, value.detach().clone() if held and value is not None else None

    def renew(self, value: torch.Tensor | None, saved: torch.Tensor | None) -> None:
        """Takes what ``.grad`` was when an earlier step was given up for one of the new step; see `saved`.

        It was cleared if another rank has discarded the earlier one.
        """
        self.parameter.grad, self._known = value, None
        if value is not None and saved is not None:
            with torch.no_grad():
                value.copy_(saved)
        if value is not None and self.bucket is not None and self.bucket.holds(self, value):
            self.bucket.note_version(self, changed=True)

    def submit(self) -> None:
        """Starts the reduction of what has been accumulated, or tells its bucket."""
        reducer = self.reducer
        reducer.touched = True
        if reducer.finiteness is not None:
            reducer.finiteness.look(self.name, self.parameter.grad)
        bucket = self.bucket
        if bucket is not None and bucket.open:
            self.started = True
            bucket.take(self)
            return
        value = self.parameter.grad
        if value is not None and value.layout is torch.sparse_coo and not reducer.sparse_as_dense:
            self._scatter(value)
            return
        gradient = self.dense()
        if gradient is None:  # a hook of the user's has taken it away
            self.fill()
        else:
            self._own = gradient
            self.remember()
            self._is_new = self.passes > 0 and self._version == 0
            # A copy travels, for autograd may still read this memory on behalf of another branch.
            self._start(gradient.detach().resolve_conj().resolve_neg().clone(), filler=False)

    def dense(self) -> torch.Tensor | None:
        """Returns ``.grad``, which becomes dense if the optimizer was told so.

        Raises:
            ArgumentError: it is sparse, and the optimizer was not told.
        """
        gradient = self.parameter.grad
        if gradient is None or gradient.layout is torch.strided:
            return gradient
        if not self.reducer.sparse_as_dense:
            check_dense(gradient)
        if self.reducer.channel.as_horovod:
            self._sparse_dim = gradient.sparse_dim()
            self.reducer.made_dense += (self,)
        self.parameter.grad = gradient.to_dense()
        return self.parameter.grad

    def make_sparse(self) -> None:
        """Gives the reduced gradient the form that it had before it was made dense."""
        value = self.parameter.grad
        if value is not None and value.layout is torch.strided:
            self.parameter.grad = value.to_sparse(self._sparse_dim)
            self.remember()

    def _scatter(self, value: torch.Tensor | None, *, filler: bool = False) -> None:
        """Takes part with a sparse gradient, or with what the user has kept or nothing where others may have one."""
        if self.scattered is None and value is not None:
            self.scattered = Scattered(self.reducer.underway, self.name, value)
        assert self.scattered is not None  # noqa: S101 - for the type checker
        self.remember()
        self.scattered.start(value, filler=filler)
        self.started = True

    def forget(self) -> None:
        """Forgets passes that were given up; what a new one has put in the place of a cleared gradient stays."""
        self.passes = 0
        value = self.parameter.grad
        if value is not None and not self.changed:
            self.parameter.grad = torch.zeros_like(value)
            self.remember()

    def fill(self, *, kept: bool = True) -> None:
        """Takes part with zeros or what the user has kept, if any rank has something fresh for this parameter.

        Args:
            kept: whether ``.grad`` is of this step.
        """
        value = self.parameter.grad
        if self.scattered is not None:
            self._scatter(value if kept and value is not None and value.is_sparse else None, filler=True)
            return
        if not kept or value is None or value.layout is not torch.strided:
            value = torch.zeros_like(self.parameter, requires_grad=False)
        else:
            self._own, self._is_new = value, False
            value = value.detach().resolve_conj().resolve_neg().clone()
        self._start(value, filler=True)

    def settle(self) -> None:
        """Keeps what has arrived; if no rank had anything, there still is no gradient."""
        if self.scattered is not None and self._travelling is None:
            self._settle_scattered(self.scattered.result())
            return
        own, self._own = self._own, None
        value, self._travelling = self._travelling, None
        if value is None or not self.started:
            return
        if own is not None and self._stays(own):
            write(own, value)
            self.remember()
            if self.bucket is not None:
                self.bucket.note_version(self)
        elif own is not None:
            own.data = value
        else:
            self.parameter.grad = value
            self.remember()

    def _stays(self, own: torch.Tensor) -> bool:
        """Whether ``.grad`` must stay where it is in memory: at its bucket's place, or where the user refers to it."""
        if self.bucket is not None and self.bucket.holds(self, own):
            return True
        return not self._is_new and has_other_users(own)

    def _settle_scattered(self, value: torch.Tensor | None) -> None:
        if value is None:
            self.started = False
        else:
            self.parameter.grad = value
        self.remember()

    def take_back(self, lost: list[object]) -> None:
        """Counts as not started if it is among those promises that are lost."""
        if self in lost or self.scattered in lost:
            self.started = False

    def reset(self) -> None:
        """Gets ready for the next step."""
        self.passes = 0
        self.started = False
        self._own = self._travelling = None
        self.remember()
        if self._entry is not None:
            self._entry.array = _NOTHING  # the gradient's memory is the user's again
            self._entry.land = None

    def land(self, value: np.ndarray, convert: Callable[[np.ndarray], Any] | None) -> None:
        """Runs on the daemon's thread when the reduced gradient has arrived."""
        self.reducer.underway.land(value, convert)

    def resolve(self, result: object) -> None:
        """Runs on the daemon's thread when no rank had anything for this parameter."""
        self.started = result is not None
        self.reducer.underway.landed()

    def fail(self, error: BaseException) -> None:
        """Runs on the daemon's thread when the reduction has failed."""
        self.reducer.underway.fail(error, self)

    def _start(self, value: torch.Tensor, *, filler: bool) -> None:
        reducer = self.reducer
        self._travelling = value
        land = None
        if reducer.channel.plain and value.is_cpu and value.layout is torch.strided:
            array = view(value)
        else:
            array, land = reducer.channel.compressed(value)
        entry = self._entry
        if entry is None or entry.request.shape != array.shape or self._dtype != array.dtype:
            entry = self._entry = Entry(reducer.channel.request(self.name, array), array, self)
            self._dtype = array.dtype
        entry.array = array
        entry.land = land
        entry.filler = filler
        entry.site = reducer.underway.site
        self.submitted = time.monotonic()
        self.started = True
        reducer.underway.submit(entry)


def release(parameter: torch.Tensor) -> None:
    """Takes a parameter from the optimizer that had it; that may be one which is about to be replaced by this one."""
    for gradient in _reduced(parameter):
        gradient.reducer.replace()
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}  # noqa: SLF001 - no public way
    for number in [number for number, hook in hooks.items() if isinstance(hook, _UnreducedHook)]:
        del hooks[number]


def add_late_hook(reducer: Reducer, name: str, parameter: torch.Tensor) -> None:
    """Has autograd tell of a gradient that is not reduced yet: its backward pass may compute no other.

    The parameter may be frozen, and PyTorch's own function adds no hooks to frozen ones.
    """
    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks or OrderedDict()  # noqa: SLF001 - no public way
    if not any(isinstance(hook, _LateHook) and hook.reducer() is reducer for hook in hooks.values()):
        hooks[RemovableHandle(hooks).id] = _LateHook(weakref.ref(reducer), name)
        parameter._post_accumulate_grad_hooks = hooks  # noqa: SLF001 - as above


class _UnreducedHook:
    """The hook of a parameter whose gradient is not reduced."""

    def __init__(self, reducer: weakref.ref[Reducer], name: str) -> None:
        self.reducer, self._name = reducer, name

    def _begin(self, reducer: Reducer, parameter: torch.Tensor) -> None:
        """Has autograd tell how this backward pass ends, if nothing else has."""
        if (task := _current_task()) not in reducer.expected:
            reducer.expect_end_of_backward(task, Gradient(reducer, self._name, parameter))


class _LateHook(_UnreducedHook):
    """The hook of a parameter that is in a group, and frozen or new; the next round of reductions takes it in."""

    def __call__(self, parameter: torch.Tensor) -> None:
        """Runs when backward has accumulated a gradient."""
        reducer = self.reducer()
        if reducer is not None and reducer.awaits(parameter):
            self._begin(reducer, parameter)


class _RefusingHook(_UnreducedHook):
    """The hook of a parameter that is in no group of its optimizer any more, and whose gradient no rank reduces."""

    def __call__(self, parameter: torch.Tensor) -> None:
        """Runs when backward has accumulated a gradient; the other ranks hear that this pass fails.

        Raises:
            ArgumentError: always, while the optimizer lives and no group has the parameter.
        """
        reducer = self.reducer()
        if reducer is None or reducer.trains(parameter):
            return
        self._begin(reducer, parameter)
        text = (
            f"{self._name!r} has a gradient, but it has left the parameter groups of its optimizer, and its gradients "
            "are not reduced any more, for no rank had one in many steps: add it to a group, or freeze it by "
            "requires_grad_(False)"
        )
        raise ArgumentError(text)


def check_unreduced(parameters: Mapping[str, torch.Tensor]) -> None:
    """Refuses parameters, by name, of which a `DistributedOptimizer` reduces the gradients, for a pipeline.

    Raises:
        ArgumentError: there are some; a pipeline reduces what its ranks have in common itself.
    """
    if any(map(_reduced, parameters.values())):
        gc.collect()  # an optimizer that the script has deleted may still be there
    if found := [name for name, parameter in parameters.items() if _reduced(parameter)]:
        raise ArgumentError(
            f"a DistributedOptimizer reduces the gradients of {found[0]!r}, and a pipeline reduces them itself where "
            "needed: let `optimizer` make a plain one, and delete an earlier DistributedOptimizer of this model"
        )


def _reduced(parameter: torch.Tensor) -> list[Gradient]:
    """The gradient of a parameter that an optimizer reduces, if one does."""
    hooks = list((parameter._post_accumulate_grad_hooks or {}).values())  # noqa: SLF001 - no public way
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return [owner for owner in owners if isinstance(owner, Gradient)]


def nested() -> bool:
    """Says whether this backward pass runs inside another one, as in reentrant checkpointing."""
    runs = 0
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the documented way to the callers
    while frame is not None:
        runs += frame.f_code.co_name == "_engine_run_backward"
        frame = frame.f_back
    return runs > 1
