"""Autotune during training: rank 0 times the steps and chooses settings, which are sent together with the gradients.

Thus all ranks get the choice in the same step, without a message of its own, and apply it before the next step.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Iterable, Sequence

from coordd.config import Config
from coordd.host.world import World
from coordd.ops.messages import Request
from coordd.tuning.key import Key, fingerprint, shape
from coordd.tuning.record import host_kind, path_for
from coordd.tuning.session import Session
from coordd.tuning.settings import Settings, Space

__all__ = ["AT_END", "OVERLAP", "SIGNALS", "Tuning", "first_settings"]

log = logging.getLogger("coordd")

OVERLAP, AT_END = "overlap", "at-end"
"""Algorithms: reduce each bucket as soon as it is full, or all gradients when backward ends."""
SIGNALS = 1 + len(Settings.__struct_fields__)
_SETTLE = 6
"""Steps that are not measured after a change: one until all ranks have it, more until the plan is locked again."""


class Tuning:
    """Autotune of one optimizer; rank 0 runs the search, other ranks only apply its choices."""

    def __init__(self, config: Config, world: World, requests: Iterable[Request], start: Settings) -> None:
        """Starts the search, or continues that of an earlier run.

        Args:
            config: limits of the search, and the path of its log.
            world: the ranks of the job.
            requests: the gradients of a step.
            start: the initial settings; the search tries no compression other than the user's choice.

        Raises:
            ConfigError: Optuna is not installed.
        """
        self._space = Space.around(start, algorithms=(OVERLAP, AT_END), compressions=("none",))
        self._now = start
        self._session: Session | None = None
        self._last = 0.0
        if world.rank == 0:
            key = Key(model=fingerprint(requests), world=shape(world), host=host_kind())
            path = path_for(key, config.autotune_log, os.environ)
            share, limit = config.autotune_share, config.autotune_steps
            self._session = Session(self._space, start, key, path=path, share=share, limit=limit, settle=_SETTLE)
            atexit.register(self._session.close)

    def close(self) -> None:
        """Ends the search and writes its record; a later search continues it."""
        if self._session is not None:
            atexit.unregister(self._session.close)
            self._session.close()

    def step_done(self) -> None:
        """Records the duration of a training step; called after each step."""
        if self._session is None:
            return
        now = time.monotonic()
        if self._last:
            self._session.tell(now - self._last)
        self._last = now

    def signals(self) -> list[float]:
        """Returns this rank's signals: zeros, or on rank 0 for a new choice: 1 and the indices of the chosen values."""
        if self._session is None or self._session.settings == self._now:
            return [0.0] * SIGNALS
        wanted = self._session.settings
        places = [self._space.choices(knob).index(getattr(wanted, knob)) for knob in Settings.__struct_fields__]
        return [1.0, *map(float, places)]

    def hear(self, signals: Sequence[float]) -> Settings | None:
        """Reads the reduced signals of all ranks; returns the new settings, if any.

        Their scale depends on the reduction, and on how many ranks have joined; rank 0's first signal, 1, gives it.
        """
        scale = signals[0]
        if not scale:
            return None
        knobs = zip(Settings.__struct_fields__, signals[1:], strict=True)
        chosen = {knob: self._space.choices(knob)[round(place / scale)] for knob, place in knobs}
        self._now = Settings(**chosen)  # type: ignore[arg-type]  # the space has the right type for each
        if self._session is not None:
            log.info("autotune: %s", ", ".join(f"{knob} {value}" for knob, value in chosen.items()))
        return self._now


def first_settings(config: Config, *, compresses: bool) -> Settings:
    """Returns the settings without autotune.

    Args:
        config: the user's configuration.
        compresses: whether the user has chosen a compression.
    """
    return Settings(
        fusion_mb=config.fusion_mb,
        cycle_ms=config.cycle_ms,
        buckets=1,
        algorithm=OVERLAP if config.overlap else AT_END,
        compression="chosen" if compresses else "none",
    )
