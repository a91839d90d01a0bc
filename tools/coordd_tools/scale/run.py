"""One run: the ranks connect, negotiate all tensors for the first time, and then repeat that a few times."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from coordd.negotiation.aggregator import Hub, hub
from coordd.negotiation.coordinator import Coordinator
from coordd.negotiation.tree import Post
from coordd.ops.messages import Hello, Message, Plan, Welcome
from coordd_tools.scale.crowd import Crowd
from coordd_tools.scale.fabric import Account, Fabric
from coordd_tools.scale.node import Node, Readings
from coordd_tools.scale.setting import Setting
from coordd_tools.sim.agenda import Agenda

__all__ = ["Phase", "Run"]

_KINDS = 4
_PATIENCE = 1e4


@dataclass(frozen=True)
class Phase:
    """The figures of one phase.

    Attributes:
        name: the name of the phase.
        seconds: virtual time from the last rank's start of the phase to the last rank's end of it.
        accounts: by rank.
    """

    name: str
    seconds: float
    accounts: list[Account]


class Run:
    """A job in virtual time."""

    def __init__(self, setting: Setting, *, progress: Callable[[str, int], None]) -> None:
        """Creates the ranks.

        Args:
            setting: what is simulated.
            progress: called with the name of a phase and the number of ranks that have finished it.
        """
        self._setting = setting
        self._progress = progress
        self._agenda = Agenda()
        self._fabric = Fabric(
            setting, self._agenda, lambda receiver, sender, data: self._nodes[receiver].arrive(sender, data)
        )
        readings = Readings()
        crowds = [Crowd(setting, kind) for kind in range(min(_KINDS, setting.cuts))]
        self._nodes = [
            Node(
                post,
                self._hub(post),
                crowds[post.rank % len(crowds)],
                agenda=self._agenda,
                fabric=self._fabric,
                readings=readings,
                postage=setting.postage,
            )
            for post in setting.posts
        ]

    def phases(self) -> Iterator[Phase]:
        """Runs the phases, one by one."""
        with _undisturbed():
            yield self._start()
            for step in range(self._setting.steps + 1):
                yield self._step(step)

    def _hub(self, post: Post) -> Hub | None:
        return hub(
            post,
            lambda voices: Coordinator(self._setting.ranks, cache_capacity=4096, fusion_bytes=32 << 20, voices=voices),
        )

    def _start(self) -> Phase:
        for node in self._nodes:
            host = f"node{node.post.rank * self._setting.hosts // self._setting.ranks:05d}"
            node.greet(Hello("0.1", "0123456789ab", 10_000 + node.post.rank * 7919 % 50_000, host))
        return self._until("start", lambda _, message: isinstance(message, Welcome), 0.0)

    def _step(self, step: int) -> Phase:
        setting, begin = self._setting, self._agenda.now
        delay = setting.delay if setting.late else 0.0
        for node in self._nodes:
            for cut in range(node.crowd.cuts):
                at = begin + cut * setting.gap + (delay if node.post.rank in setting.late else 0.0)
                self._agenda.at(at, partial(node.report, step, cut))
        last = delay + setting.gap * (max(node.crowd.cuts for node in self._nodes) - 1)
        wanted = setting.tensors * (step + 1)

        def complete(node: Node, message: Message) -> bool:
            return (
                isinstance(message, Plan)
                and node.crowd.follow(message) >= 0
                and node.crowd.answered(message.sequence) == wanted
            )

        return self._until("cold" if step == 0 else f"steady {step}", complete, begin + last)

    def _until(self, name: str, ends: Callable[[Node, Message], bool], begin: float) -> Phase:
        """Runs until no event is left; all ranks must have received a message that ends the phase."""
        times: dict[int, float] = {}

        def watch(node: Node) -> Callable[[Message, float], None]:
            def told(message: Message, at: float) -> None:
                if ends(node, message):
                    times[node.post.rank] = at
                    self._progress(name, len(times))

            return told

        for node in self._nodes:
            node.told = watch(node)
        if not self._agenda.run(limit=_PATIENCE) or len(times) < len(self._nodes):
            text = f"{name}: only {len(times)} of {len(self._nodes)} ranks are through"
            raise RuntimeError(text)
        return Phase(name, max(times.values()) - begin, self._fabric.settle())


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Disables garbage collection, which would scan the objects of all ranks and charge the time to one."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
