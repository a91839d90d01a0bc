"""Ranks that behave identically: they share one real `Member`, whose work is measured once and charged to each."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np

from coordd.negotiation.tensor_table import Entry
from coordd.negotiation.worker import Due, Member
from coordd.ops.handles import Handle
from coordd.ops.messages import Kind, Plan, Report, Request
from coordd_tools.scale.setting import Setting

__all__ = ["Crowd", "measured"]

_SITE = (compile("", "/home/user/project/train.py", "exec"), 131)
_ARRAY = np.empty(0)
_CACHE = 4096


def measured(action: Callable[[], object]) -> float:
    """Returns the CPU seconds of this thread that an action takes; other processes do not count."""
    started = time.thread_time()
    action()
    return time.thread_time() - started


class Crowd:
    """A group of ranks with the same tensors in the same reports."""

    def __init__(self, setting: Setting, kind: int) -> None:
        """Creates the shared `Member`; each ``kind`` of crowd splits its tensors into reports at other places."""
        self._member = Member(0, cache_capacity=_CACHE)
        self._requests = [_tensor(number) for number in range(setting.tensors)]
        first = setting.tensors // (setting.cuts + kind) if setting.cuts > 1 else setting.tensors
        rest = max(1, -(-(setting.tensors - first) // max(1, setting.cuts - 1)))
        self._bounds = [0, *range(first, setting.tensors, rest), setting.tensors]
        self._said: dict[tuple[int, int], tuple[Report, float]] = {}
        self._costs: dict[int, float] = {}
        self._answered: dict[int, int] = {0: 0}

    @property
    def cuts(self) -> int:
        """The number of reports per step."""
        return len(self._bounds) - 1

    def announce(self, step: int, cut: int, seen: int) -> tuple[Report, float]:
        """Returns the report of a rank that has seen plan ``seen``, and the CPU seconds it took to make."""
        if (step, cut) not in self._said:
            entries = [
                Entry(request, _ARRAY, Handle(request.name), site=_SITE)
                for request in self._requests[self._bounds[cut] : self._bounds[cut + 1]]
            ]
            found: list[Due] = []
            seconds = measured(lambda: found.append(self._member.announce(entries)))
            said = next(message for message in found[0].messages if isinstance(message, Report))
            self._said[step, cut] = (said, seconds)
        report, seconds = self._said[step, cut]
        return (report if report.seen == seen else msgspec.structs.replace(report, seen=seen)), seconds

    def follow(self, plan: Plan) -> float:
        """Follows a plan and returns the CPU seconds; data moves instantly."""
        if plan.sequence not in self._costs:
            found: list[Due] = []
            self._costs[plan.sequence] = measured(lambda: found.append(self._member.follow(plan)))
            entries = [entry for bucket in found[0].buckets for entry in bucket.entries]
            for entry in entries:
                self._member.table.release(entry)
            self._answered[plan.sequence] = self._answered[plan.sequence - 1] + len(entries)
        return self._costs[plan.sequence]

    def answered(self, sequence: int) -> int:
        """Returns the number of tensors released up to and including a plan."""
        return self._answered[sequence]


def _tensor(number: int) -> Request:
    name = f"encoder.layers.{number // 16}.self_attention.block.{number % 16}.weight"
    return Request(Kind.ALLREDUCE, name, "float32", (1024, 1024 + number % 7))
