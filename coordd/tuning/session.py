"""One run's share in a search: goes on where the last run stopped, writes down what it finds. Rank 0 only."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from coordd.autotune import Progress, Tuner
from coordd.settings import Settings, Space
from coordd.tuning.key import Key
from coordd.tuning.proposals import Proposals, require_optuna
from coordd.tuning.record import Record, RecordError

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

    def __init__(  # noqa: PLR0913 - a search's frame, and its file
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
        """Begins a search, or goes on with the one that the record tells of.

        Args:
            space: the choices.
            start: the settings without tuning.
            key: what the search is about; the record of another one is reported and replaced.
            path: of the record.
            share: most steps of all that trials may take.
            limit: steps after which no trial begins any more; 0: none.
            settle: steps after each change that are not measured.

        Raises:
            ConfigError: there is something to search for, and Optuna is not installed.
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
        """What runs now, or from the next step boundary on."""
        return self._tuner.settings

    @property
    def done(self) -> bool:
        """Whether the search has ended."""
        return self._tuner.done

    @property
    def progress(self) -> Progress:
        """All that is known."""
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
        """Writes down what is left to write: the steps that were saved for the next trial."""
        self._save()

    @property
    def _state(self) -> tuple[int, bool]:
        """What makes the record worth writing again when it changes."""
        return self._tuner.measured, self._tuner.done

    def _known(self) -> Progress | None:
        """What earlier runs found, if it can be used."""
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
        """Keeps a file that cannot be used, in case it was not meant for us, and makes room for ours."""
        aside = self._path.with_name(self._path.name + ".old")
        try:
            self._path.replace(aside)
        except OSError as trouble:
            log.warning("%s; the search begins anew (%s)", error, trouble)
        else:
            log.warning("%s; it is now called %s, and the search begins anew", error, aside.name)

    def _save(self) -> None:
        """Saves; training does not end because a disk is full."""
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
