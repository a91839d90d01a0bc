"""One run of an autotune search: resumes from the last run's record and saves its own results. Rank 0 only."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from coordd.tuning.autotune import Progress, Tuner
from coordd.tuning.key import Key
from coordd.tuning.proposals import Proposals, require_optuna
from coordd.tuning.record import Record, RecordError
from coordd.tuning.settings import Settings, Space

__all__ = ["Session"]

log = logging.getLogger("coordd")


class Session:
    """A `Tuner` with a record.

    ```
    session = Session(space, start, key, path=path_for(key, config.autotune_log, os.environ))
    apply(session.settings)                       # on all ranks, at a step boundary
    while training:
        ...
        if (settings := session.tell(step_seconds)) is not None:
            apply(settings)                       # likewise
    session.close()
    ```
    """

    def __init__(  # noqa: PLR0913 - settings of a search, and its file
        self,
        space: Space,
        start: Settings,
        key: Key,
        *,
        path: Path,
        share: float = 0.01,
        limit: int = 0,
        settle: int = 2,
    ) -> None:
        """Starts a search, or resumes the one in the record.

        Args:
            space: the choices.
            start: the settings without tuning.
            key: identifies the model, world size and host; a record with another key is reported and replaced.
            path: of the record.
            share: upper limit on the fraction of all steps that trials may take.
            limit: number of steps after which no new trial starts; 0: no limit.
            settle: number of steps after each change that are not measured.

        Raises:
            ConfigError: there is something to tune, and Optuna is not installed.
            ArgumentError: the start is not in the space.
        """
        self._space, self._key, self._path = space, key, path
        known = self._known()
        proposals = Proposals(space, start)
        end = limit or math.inf
        self._tuner = Tuner(space, start, proposals, share=share, settle=settle, limit=end, progress=known)
        if not self._tuner.done:
            require_optuna()
        self._saved = self._state
        self._writable = True

    @property
    def settings(self) -> Settings:
        """The current settings, in effect from the next step boundary at the latest."""
        return self._tuner.settings

    @property
    def done(self) -> bool:
        """Whether the search has ended."""
        return self._tuner.done

    @property
    def progress(self) -> Progress:
        """All results of the search so far."""
        return self._tuner.progress

    def tell(self, step_seconds: float) -> Settings | None:
        """Takes the time of one training step; returns other settings when they should change.

        Raises:
            ArgumentError: a time that is not a positive number.
        """
        settings = self._tuner.tell(step_seconds)
        if self._state != self._saved:
            self._save()
        return settings

    def close(self) -> None:
        """Saves the final state, including the step credit left for the next trial."""
        self._save()

    @property
    def _state(self) -> tuple[int, bool]:
        """Values whose change triggers a new save."""
        return self._tuner.measured, self._tuner.done

    def _known(self) -> Progress | None:
        """Returns the progress of earlier runs, or None if there is no usable record."""
        try:
            progress = self._read()
        except FileNotFoundError:
            return None
        except RecordError as error:
            self._set_aside(error)
            return None
        log.info("autotune goes on from %s: %s", self._path, progress.best)
        return progress

    def _read(self) -> Progress:
        record = Record.load(self._path)
        progress = record.progress
        if record.key != self._key:
            raise RecordError(self._path, f"is about {record.key}, and this is {self._key}")
        if progress.best not in self._space or progress.start not in self._space:
            raise RecordError(self._path, "tells of settings that are no longer among the choices")
        return progress

    def _set_aside(self, error: RecordError) -> None:
        """Renames an unusable file instead of overwriting it, as it may belong to something else."""
        aside = self._path.with_name(self._path.name + ".old")
        try:
            self._path.replace(aside)
        except OSError as trouble:
            log.warning("%s; the search begins anew (%s)", error, trouble)
        else:
            log.warning("%s; it is now called %s, and the search begins anew", error, aside.name)

    def _save(self) -> None:
        """Saves the record; a write error such as a full disk is logged and does not stop training."""
        progress = self._tuner.progress
        if self._tuner.done and not self._saved[1]:
            log.info("autotune has ended: %s, %.3f of the step time", progress.best, progress.relative)
        self._saved = self._state
        try:
            Record(key=self._key, space=self._space, progress=progress).save(self._path)
        except OSError as error:
            if self._writable:
                log.warning("the autotune record cannot be written, and a later run will begin anew: %s", error)
            self._writable = False
